"""The sampler (batched, a KV cache in blocks, rows that come and go) and the agent loop.

A row is a list of ids and the number of them whose keys and values the cache holds. One step takes every row
that is not waiting for a tool, feeds the ids the cache lacks (one for a row that decodes, many after a prompt
or a tool's result), and samples one token for each row that is fed up to its end. The rest follows:

- a group's prompt is fed once; its samples share the full blocks and copy the last, partly filled one;
- a row that waits for its tool is not in the batch, a finished one frees its place at once;
- when blocks run out, the youngest row gives its blocks back and is fed again later. ids are the truth, the
  cache is not;
- ids only ever grow: sampled tokens are kept as they are, a tool's text is encoded once, with mask 0.

With `graphs`, steps in which all rows decode run ahead of what is known here (Sampler._decode, decode.py).
Random numbers belong to (seed, prompt, sample, position), so a trajectory does not depend on its neighbours.

Left out: speculative decoding, beam search, prefix sharing between different prompts. To copy into another
project take sampling.py, attention.py, decode.py, chat.py and tool_calls.py along.
"""

import concurrent.futures
import functools
import itertools
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from attention import Blocks, Segments, keep_freed_memory, packed_weights, trunk
from chat import ToolTurn, say_once
from decode import DecodeStep
from sampling import draw_tokens, random_key, refuse_broken, uniforms
from tool_calls import ToolResult, parse_tool_calls, start_call


@dataclass
class Trajectory:
    """One episode. ids, mask, logprobs have equal length; mask is 1 and logprobs are set where the policy
    sampled the token."""

    ids: list[int]
    mask: list[int]
    logprobs: list[float]  # under the distribution it was sampled from; 0 at the prompt and at tool tokens
    prompt_len: int
    tool_results: list[ToolResult] = field(default_factory=list)
    finish: str = ""  # "stop", "length" (no room left), "turns" (called a tool in the last turn it had)
    prompt_index: int = 0
    sample_index: int = 0

    def turns(self) -> list[int]:
        """Where in ids each turn of the policy begins."""
        return [i for i, m in enumerate(self.mask) if m and not self.mask[i - 1]]

    def answer(self, tokenizer) -> str:
        """Text of the policy's last turn, whatever ended it: what is graded."""
        turns = self.turns()
        return tokenizer.decode(self.ids[turns[-1] :], skip_special_tokens=True) if turns else ""


# ---- the sampler -------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Row:
    """A sequence in work: a trajectory, or a prompt fed once for all its samples (`trajectory` is None)."""

    ids: list[int]
    group: int  # number of the prompt in this run
    limit: int = 0  # largest number of ids
    key: int = 0  # of its random numbers
    trajectory: Trajectory | None = None
    parent: "Row | None" = None  # the prompt whose blocks it will share, once that is fed
    children: int = 0  # of a prompt: samples that still have to take their share
    table: list[int] = field(default_factory=list)
    cached: int = 0  # ids whose keys and values the cache holds
    turn_start: int = 0  # where the policy's present turn begins in ids
    turns: int = 0  # turns the policy has ended
    working: bool = True  # False once it has left `running`, maybe while a step is being chosen
    pending: list = field(default_factory=list)  # futures of the tool results it waits for
    called: list[str] = field(default_factory=list)  # the name that each call is answered under
    due: int = 0  # deterministic mode: the step at which they are taken


class Sampler:
    """Samples many continuations at once; in float32 each equals the model's own full forward to about 1e-5.

    max_rows       rows that decode together
    max_len        tokens of a sequence, prompt included (default: the model's context)
    cache_tokens   tokens the cache holds for all rows together (default: max_rows * max_len, at most 4 GB, or
                   half of a GPU's free memory)
    block          tokens a block (default 16 on CPU, 256 on GPU)
    prefill        tokens of prompts and tool results fed in one step, beside the rows that decode
    deterministic  a tool's result is taken a fixed number of steps after it was asked for, waiting if it is
                   late: then batches and bits do not depend on the tool's speed (default: on CPU)
    graphs         steps in which all rows decode are CUDA graphs, launched one ahead of the host (decode.py);
                   on CPU the same code runs without recording
    """

    def __init__(
        self,
        model,
        tokenizer,
        max_rows: int = 64,
        max_len: int | None = None,
        cache_tokens: int | None = None,
        block: int | None = None,
        prefill: int = 4096,
        deterministic: bool | None = None,
        graphs: bool = False,
    ):
        cpu = model.device.type == "cpu"
        if cpu:
            keep_freed_memory()
        context = model.config.max_position_embeddings
        if max_len and max_len > context:
            raise ValueError(f"max_len {max_len} is more than the model's context of {context}; lower it")
        if max_rows < 1 or prefill < 1:
            raise ValueError(f"max_rows {max_rows} and prefill {prefill} must be 1 or more")
        self.model, self.tokenizer, self.max_rows, self.prefill = model, tokenizer, max_rows, prefill
        self.max_len = max_len or context
        size = block or (16 if cpu else 256)
        dtype = next(model.parameters()).dtype
        if cache_tokens is None:
            one = Blocks(model.config, 1, 1, dtype)
            bytes_a_token = 2 * one.k.numel() * one.k.element_size()
            if not cpu:
                torch.cuda.empty_cache()
            memory = 4e9 if cpu else 0.5 * torch.cuda.mem_get_info(model.device)[0]
            cache_tokens = min(max_rows * self.max_len, int(memory / bytes_a_token))
        self.blocks = Blocks(model.config, -(-cache_tokens // size) + 1, size, dtype, model.device)
        self.deterministic = cpu if deterministic is None else deterministic
        self.graphs = {} if graphs else None  # (places, law) -> DecodeStep
        self.pool = torch.cuda.graph_pool_handle() if graphs and model.device.type == "cuda" else None
        self.queue, self.running = deque(), []  # rows to start, rows in work
        self.delay = 4  # steps from a tool call to its result in deterministic mode
        ends = [tokenizer.eos_token_id, getattr(model.generation_config, "eos_token_id", None)]
        self.stop = {t for end in ends for t in (end if isinstance(end, (list, tuple)) else [end])} - {None}
        # of the last run: steps, tokens sampled, trajectories ended, rows put back; seconds of prefill (a
        # forward that reads prompts or tool results), decode (any other), sampling (with the head),
        # tool_wait (nothing else to do; in deterministic mode also for a result that is late), idle_slots
        # (forwards, times the share of places without a row). With graphs, decode holds the sampling too
        self.stats = {}

    @torch.inference_mode()
    def generate(
        self, prompts, n=1, max_new_tokens=512, temperature=1.0, top_p=1.0, top_k=0, seed=0, indices=None,
        respond=None, follow=None,
    ) -> list[Trajectory]:  # fmt: skip
        """n samples of each prompt (a list of ids), until a stop id or length; sample j of prompt i at i*n+j.

        max_new_tokens bounds what comes after the prompt, max_len the whole; a prompt that leaves no room
        returns at once with finish "length". indices: the prompts' numbers, for the seed (default 0, 1, 2
        ...). temperature 0 is greedy. Raises ValueError for an empty prompt and for one that could never fit
        into the cache.
        prompts and indices may be iterators: the next prompt is then drawn when a row's place is free.
        For agents (run_agent): at the end of a turn respond(row) gives the futures to wait for ([]: the
        trajectory is over), and when they are done follow(row, results) gives the ids that come next.
        """
        if n < 1 or max_new_tokens < 0 or temperature < 0 or not 0 < top_p <= 1 or top_k < 0:
            raise ValueError(
                f"n {n}, max_new_tokens {max_new_tokens}, temperature {temperature}, top_p {top_p}, "
                f"top_k {top_k}: n must be 1 or more, top_p in (0, 1], the others 0 or more"
            )
        self.law = (temperature, top_p, top_k) if temperature else (0.0, 1.0, 0)  # what is sampled from
        self.respond, self.follow, self.grouped = respond, follow, n > 1
        self.queue, self.running, self.prompts, self.drained = deque(), [], {}, False
        self.stats = dict.fromkeys(("steps", "tokens", "ended", "put_back"), 0)
        self.stats |= dict.fromkeys(("prefill", "decode", "sampling", "tool_wait", "idle_slots"), 0.0)
        capacity = len(self.blocks.count) - 1
        trajectories = []
        coming = enumerate(zip(itertools.count() if indices is None else indices, prompts))

        def take_prompt() -> bool:
            """Queue the samples of the next prompt; False if there is none."""
            item = next(coming, None)
            if item is None:
                self.drained = True
                return False
            i, (number, prompt) = item
            limit = min(self.max_len, len(prompt) + max_new_tokens)
            if not prompt:
                raise ValueError(f"prompt {i} is empty; it needs at least one token")
            if len(prompt) < limit and self.blocks.needs(limit) > capacity:
                raise ValueError(
                    f"prompt {i}: {len(prompt)} tokens and {limit - len(prompt)} new ones never fit into a "
                    f"cache of {capacity * self.blocks.size}; raise cache_tokens or lower max_new_tokens"
                )
            for j in range(n):
                t = Trajectory(list(prompt), [0] * len(prompt), [0.0] * len(prompt), len(prompt))
                t.prompt_index, t.sample_index = number, j
                trajectories.append(t)
                if len(prompt) >= limit:
                    t.finish = "length"
                else:
                    row = Row(t.ids, i, limit, random_key(seed, number, j), t, turn_start=len(prompt))
                    self.queue.append(row)
            if len(prompt) + max_new_tokens > self.max_len:
                text = f"max_new_tokens {max_new_tokens} is more than some prompts leave of {self.max_len}"
                say_once(f"{text}: they get what is left")
            return True

        idle = False
        try:
            self.take_prompt = take_prompt
            while isinstance(prompts, (list, tuple)) and take_prompt():  # an iterator is drawn from later
                pass
            with packed_weights(self.model):
                while self.queue or self.running or take_prompt():
                    self._take_results(idle)
                    self._admit()
                    batch = self._choose()
                    idle = not batch
                    self.stats["steps"] += 1
                    if batch:
                        self._step(batch)
        except BaseException as error:  # at any line: a block may just have left one list for another
            self.blocks.clear(isinstance(error, FloatingPointError))
            raise
        finally:
            self.take_prompt = self.respond = self.follow = None  # they hold this sampler, and so its cache
        return trajectories

    def _may_fork(self, row: Row) -> bool:
        """Whether a queued row may share its prompt's blocks: it has sampled nothing, its prompt has two
        tokens or more (all but the last are shared), and the cache holds its longest form and one block more,
        for the prompt keeps its partly filled block while the row writes into a copy."""
        room = self.blocks.needs(row.limit) < len(self.blocks.count) - 1
        return self.grouped and room and 1 < len(row.ids) == row.trajectory.prompt_len

    def _has_place(self) -> bool:
        """Whether the queue's first row may start, or with an empty queue whether a prompt may be drawn: the
        batch has a place, and the cache the row's blocks (one, if it shares its prompt's) and a free one more
        for each running row."""
        if sum(not r.pending and r.trajectory is not None for r in self.running) >= self.max_rows:
            return False
        if not self.queue or not self.running:
            return True
        row = self.queue[0]
        shared = self._may_fork(row) and row.group in self.prompts
        wanted = 1 if shared else self.blocks.needs(len(row.ids)) + 1
        return len(self.blocks.free) >= wanted + len(self.running)

    def _admit(self) -> None:
        """Start queued rows while there is a place for them."""
        if not self.queue and self._has_place():
            self.take_prompt()  # one a step: other ranks may draw from the same ones
        while self.queue and self._has_place():
            row = self.queue.popleft()
            fresh = self._may_fork(row)
            parent = self.prompts.get(row.group) if fresh else None
            if fresh and not parent:
                # Without its last token: feeding that one is each sample's own first step, and gives it its
                # own logits.
                parent = self.prompts[row.group] = Row(row.ids[:-1], row.group)
                self.running.append(parent)
            if parent:
                row.parent = parent
                parent.children += 1
            row.working = True
            self.running.append(row)

    def _choose(self) -> list[tuple[Row, int]]:
        """The rows of this step, oldest first, and how many ids each is fed. Their blocks are taken here."""
        batch, room, decoding = [], self.prefill, 0
        for row in list(self.running):
            if row.pending or not row.working:
                continue
            if row.parent and (row.parent.cached < len(row.parent.ids) or not self._fork(row)):
                continue  # its prompt is not fed yet, or there is no block for the copy
            new = len(row.ids) - row.cached
            if new == 1 and row.trajectory:
                if decoding == self.max_rows:
                    continue
                decoding += 1
            else:
                new = min(new, room)
                room -= new
            if new and self._until_free(row, self.blocks.grow, row.table, row.cached + new):
                batch.append((row, new))
        return batch

    def _until_free(self, row: Row, take, *arguments):
        """What take(*arguments) gives once there are blocks for it; until then the youngest row gives its own
        back. None if that is `row` itself."""
        while not (got := take(*arguments)):
            youngest = next(r for r in reversed(self.running) if r.table or r is row)
            self._put_back(youngest)
            if youngest is row:
                return None
        return got

    def _put_back(self, row: Row) -> None:
        """Take a row's blocks away; its ids are kept and fed again later. One that waits for a tool stays."""
        self.stats["put_back"] += 1
        self.blocks.release(row.table)
        row.cached = 0
        if row.pending:
            return
        # of a prompt, the samples that wait for it: the last to leave takes it out of `running`
        for r in reversed([row] if row.trajectory else [r for r in self.running if r.parent is row]):
            self.running.remove(r)
            self.queue.appendleft(r)
            r.working = False
            if r.parent:
                self._leave(r)

    def _fork(self, row: Row) -> bool:
        """Give the row its prompt's blocks, the last one as a copy; whether there was a block for that."""
        table = self._until_free(row, self.blocks.fork, row.parent.table, row.parent.cached)
        if table:
            row.table, row.cached = table, row.parent.cached
            self._leave(row)
        return bool(table)

    def _leave(self, row: Row) -> None:
        """The row needs its parent no longer; the last one to leave frees the prompt's blocks."""
        parent, row.parent = row.parent, None
        parent.children -= 1
        if not parent.children:
            parent.working = False
            self.running.remove(parent)
            self.blocks.release(parent.table)
            del self.prompts[parent.group]

    def _step(self, batch: list[tuple[Row, int]]) -> None:
        """One forward of the packed row of all ids fed, and one token for each row fed up to its end."""
        rows, new = [row for row, _ in batch], [n for _, n in batch]
        if self.graphs is not None and all(r.trajectory and r.cached + 1 == len(r.ids) for r in rows):
            return self._decode(rows)
        tables = np.zeros((len(rows), max(len(row.table) for row in rows)), np.int64)
        for i, row in enumerate(rows):
            tables[i, : len(row.table)] = row.table
        past = [row.cached for row in rows]
        seg = Segments(new, past, torch.from_numpy(tables), self.blocks, self.model.device)
        fed = [t for row, n in batch for t in row.ids[row.cached : row.cached + n]]
        start = time.perf_counter()
        hidden = trunk(self.model, torch.tensor(fed, device=self.model.device), seg)  # [N, H]
        end = time.perf_counter()
        self.stats["prefill" if len(fed) > len(rows) else "decode"] += end - start
        self.stats["idle_slots"] += (end - start) * max(0.0, 1 - len(rows) / self.max_rows)
        for row, n in batch:
            row.cached += n
        ready = [i for i, row in enumerate(rows) if row.trajectory and row.cached == len(row.ids)]
        if not ready:
            return
        rows = [rows[i] for i in ready]
        hidden, uniform = hidden[seg.last[ready]], torch.from_numpy(self._uniforms(rows))  # [B, H], [B]
        vocabulary = self.model.get_output_embeddings().weight.shape[0]
        chunk = len(rows) if hidden.is_cuda else max(1, 2**22 // vocabulary)  # rows of 16 MB of logits
        pairs = zip(hidden.split(chunk), uniform.to(hidden.device).split(chunk))
        drawn = [head_and_draw(self.model, self.law, h, u) for h, u in pairs]
        tokens, logprobs = (torch.cat(parts).tolist() for parts in zip(*drawn))
        self.stats["sampling"] += time.perf_counter() - end
        self._append(rows, tokens, logprobs)

    def _uniforms(self, rows: list[Row], ahead: int = 0) -> np.ndarray:
        at = [len(row.ids) + ahead - row.trajectory.prompt_len for row in rows]
        return uniforms([row.key for row in rows], at)

    def _decode(self, rows: list[Row]) -> None:
        """Decode steps of these rows as graphs, until one of them ends or waits, or another could join. The
        next step is launched before the tokens of this one are read: a row that these end has then made one
        token too many, which is dropped."""
        places = min(self.max_rows, 2 ** (len(rows) - 1).bit_length())  # few sizes, so few graphs
        if (places, self.law) not in self.graphs:
            width = self.blocks.needs(self.max_len)
            draw = functools.partial(head_and_draw, self.model, self.law)  # holds the model, not this sampler
            step = DecodeStep(self.model, self.blocks, places, width, draw, self.pool)
            self.graphs[places, self.law] = step
        step, tables = self.graphs[places, self.law], [row.table for row in rows]

        def launch(ahead: int, ids: list[int] | None = None):
            """ahead: 1 if a step of these rows is launched and unread, whose tokens the device alone
            knows."""
            past = [row.cached + ahead for row in rows]
            return step.launch(past, tables, self._uniforms(rows, ahead), ids)

        start = time.perf_counter()
        read, ended = launch(0, [row.ids[-1] for row in rows]), False
        while read:
            following = None if ended or not self._goes_on(rows) else launch(1)
            tokens, logprobs = read()
            live = [i for i, r in enumerate(rows) if not r.trajectory.finish and not r.pending]
            for i in live:
                rows[i].cached += 1
            some = ([values[i] for i in live] for values in (rows, tokens, logprobs))
            ended |= self._append(*some)
            read = following
            self.stats["steps"] += bool(read)
        seconds = time.perf_counter() - start
        self.stats["decode"] += seconds
        self.stats["idle_slots"] += seconds * max(0.0, 1 - len(rows) / self.max_rows)

    def _goes_on(self, rows: list[Row]) -> bool:
        """Whether the rows can take one more token than is known of them, and nothing could join them."""
        if (self.queue or not self.drained) and self._has_place():
            return False
        if any(row.pending and self._answered(row) for row in self.running):
            return False
        room = all(len(row.ids) + 1 < row.limit for row in rows)
        return room and all(self.blocks.grow(row.table, row.cached + 2) for row in rows)

    def _append(self, rows: list[Row], tokens: list[int], logprobs: list[float]) -> bool:
        """A sampled token for each row; whether a row has ended by it, or waits for a tool now."""
        refuse_broken(logprobs)
        self.stats["tokens"] += len(rows)
        ended = False
        for row, t, lp in zip(rows, tokens, logprobs):
            trajectory = row.trajectory
            row.ids.append(t)  # the same list as trajectory.ids
            trajectory.mask.append(1)
            trajectory.logprobs.append(lp)
            if t in self.stop:
                row.turns += 1
                row.pending = self.respond(row) if self.respond else []
                row.due = self.stats["steps"] + self.delay
                if not row.pending:
                    self._end(row, trajectory.finish or "stop")
                ended = True
            elif len(row.ids) >= row.limit:
                self._end(row, "length")
                ended = True
        return ended

    def _answered(self, row: Row) -> bool:
        """Whether the results of its tools are to be taken now."""
        return self.stats["steps"] >= row.due if self.deterministic else all(f.done() for f in row.pending)

    def _take_results(self, idle: bool) -> None:
        """Append the results of tools that have answered. idle: nothing is left to decode, so wait."""
        waiting = [row for row in self.running if row.pending]
        if idle and waiting and self.deterministic:
            self.stats["steps"] = max(self.stats["steps"], min(row.due for row in waiting))
        elif idle and waiting:
            start = time.perf_counter()
            futures = [f for row in waiting for f in row.pending if not f.done()]
            concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_COMPLETED)
            self.stats["tool_wait"] += time.perf_counter() - start
        for row in waiting:
            if not self._answered(row):
                continue
            results = []
            for future in row.pending:  # one by one: who watches `stats` sees that the tools answer
                start = time.perf_counter()
                results.append(_result(future))
                self.stats["tool_wait"] += time.perf_counter() - start
            ids = self.follow(row, results)
            row.trajectory.tool_results += results
            row.pending = []
            if len(row.ids) + len(ids) >= row.limit:  # a trajectory never ends with a tool's text
                self._end(row, "length")
                continue
            row.ids += ids
            row.trajectory.mask += [0] * len(ids)
            row.trajectory.logprobs += [0.0] * len(ids)
            row.turn_start = len(row.ids)

    def _end(self, row: Row, finish: str) -> None:
        row.trajectory.finish = finish
        self.stats["ended"] += 1
        self.running.remove(row)
        self.blocks.release(row.table)


def head_and_draw(model, law: tuple, hidden: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Token and log-prob [B] from hidden [B, H] and uniform [B]."""
    head = model.get_output_embeddings()  # weight [V, H]
    if hidden.is_cuda and hidden.dtype != torch.float32:  # rounded logits are off by up to 0.1
        logits = torch.mm(hidden, head.weight.T, out_dtype=torch.float32)  # [B, V]
    else:
        logits = head(hidden)
    return draw_tokens(logits, uniform, *law)


def _result(future) -> ToolResult:
    try:
        result = future.result()
    except Exception as error:  # a tool may raise anything: the policy is told, the run goes on
        return ToolResult(f"{type(error).__name__}: {error}", "error", 0.0)
    return result if isinstance(result, ToolResult) else ToolResult(str(result), "ok", 0.0)


# ---- the agent loop ----------------------------------------------------------------------------------------


def run_agent(
    sampler: Sampler,
    prompts: list[list[int]],
    tools: dict,
    n: int = 1,
    max_turns: int = 16,
    max_new_tokens: int = 512,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    indices: list[int] | None = None,
) -> list[Trajectory]:
    """Sampler.generate, but a turn that calls tools is answered and the policy goes on (2510.11701 eq. 2).

    tools           {name: tool}; what a tool is: tool_calls.py
    max_turns       turns of the policy; a call in the last of them is not run and the trajectory ends with
                    "turns"
    max_new_tokens  everything after the prompt, the tools' text included

    All calls of a turn run, and their results come back in the order of the calls. A call that cannot be
    understood is answered with what is wrong with it, so that the policy can repair it. A turn that length
    cuts off runs nothing.
    """
    options = (n, max_new_tokens, temperature, top_p, top_k, seed, indices)
    if not tools:
        return sampler.generate(prompts, *options)
    turn = ToolTurn(sampler.tokenizer)

    def respond(row: Row) -> list[concurrent.futures.Future]:
        said = row.ids[row.turn_start : -1]  # without the stop token
        calls = parse_tool_calls(sampler.tokenizer.decode(said, clean_up_tokenization_spaces=False))
        if calls and (row.turns >= max_turns or len(row.ids) >= row.limit):
            row.trajectory.finish = "turns" if row.turns >= max_turns else "length"
            return []
        row.called = [call.name if call.name in tools else next(iter(tools)) for call in calls]
        return [start_call(call, tools) for call in calls]

    def follow(row: Row, results: list[ToolResult]) -> list[int]:
        return turn.encode([result.output for result in results], row.called)

    return sampler.generate(prompts, *options, respond, follow)
