"""Cold start: supervised learning on tool-use trajectories, cross-entropy on the policy's own tokens only.

    python sft.py --preset tiny --out runs/cold                             # a laptop, about two minutes
    torchrun --nproc_per_node 8 sft.py --preset qwen3-4b --out runs/sft
    the same command again continues a run that was stopped

In the order of the file: which tokens are trained on, the loss, the loop. Real end-to-end trajectories
(thinking, calls, their true outputs, errors and repairs) are what makes the reinforcement learning after it
work (arXiv 2510.11701, section 3); collect.py makes some.

The folder --out is the trained model, with metrics.jsonl, and appears when it is complete; until then
OUT.training holds the checkpoints. Conversations are packed: they lie side by side in a row and never see
each other. Left out: LoRA, curriculum.
"""

import json
import math
import re
import shutil
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

import policy as net
import tiny
from chat import added_tokens, encode_marks, encode_plain, name_and_arguments, place_tools, render, turn_marks
from data import load_conversations
from options import check_values, fail, parse_args
from run import (
    Log,
    Stop,
    checkpoint,
    digest,
    latest,
    listen,
    make_folder,
    open_run,
    restore,
    run_script,
    told_to_stop,
)
from sampling import shuffled
from terminal import colours, paint_turns
from tools import PythonTool
from tracker import tracker_fault


@dataclass
class Config:
    """Defaults: the cold start of arXiv 2510.11701 (8 GPUs of 80 GB)."""

    model: str = ""  # hub name, folder or .gguf file; "tiny" is the built-in small model
    data: str = ""  # hub name, .jsonl or .parquet with columns messages and tools; "tiny": the teacher
    out: str = "runs/sft"  # folder of the trained model; an interrupted run is continued
    seed: int = 1  # of the order of the data, and of a model that starts from nothing
    epochs: float = 5.0  # passes over the data
    batch: int = 32  # conversations an optimizer step
    lr: float = 1e-5  # peak learning rate; cosine to a twentieth of it
    warmup: float = 0.1  # share of the steps in which the learning rate rises
    beta2: float = 0.95  # AdamW (the first beta is 0.9)
    weight_decay: float = 0.01  # AdamW
    clip_norm: float = 1.0  # largest norm of the gradient
    max_len: int = 32768  # tokens of a conversation
    too_long: str = "cut"  # what becomes of longer ones: cut (at the right) or drop
    tokens_per_row: int = 32768  # tokens of a packed row, one forward and backward
    dtype: str = ""  # of compute: float32 or bfloat16; empty: float32 on CPU, bfloat16 on GPU
    save_every: int = 62  # steps between checkpoints; the last two are kept
    tracker: str = ""  # sends the metrics to wandb, tensorboard or trackio too
    teacher: int = 14000  # conversations of the built-in teacher
    threads: int = 0  # CPU threads of torch; 0: all cores, shared among the ranks


PRESETS = {
    "tiny": dict(
        model="tiny", data="tiny", epochs=1.0, batch=8, lr=4e-3, warmup=0.03, weight_decay=0.0,
        max_len=512, save_every=500, threads=1,
    ),
    "qwen3-4b": dict(model="Qwen/Qwen3-4B-Instruct-2507", data="Gen-Verse/Open-AgentRL-SFT-3K"),
    "qwen2.5-7b": dict(model="Qwen/Qwen2.5-7B-Instruct", data="Gen-Verse/Open-AgentRL-SFT-3K"),
}  # fmt: skip


# ---- which tokens are trained on ---------------------------------------------------------------------------


def tokenize_conversation(tokenizer, messages: list[dict], tools: list[dict] | None = None):
    """(ids, mask) of a conversation: mask 1 on what the assistant wrote, its end-of-turn token included.

    The turns are found in the rendered text, where the template wrote their header and end; what a message
    merely looks like can neither begin nor end one. Headers are encoded apart from the answers, as they are
    when the policy samples. Raises ValueError if the template drops text of the assistant (stock Qwen3
    removes earlier thinking): training on such a sample would teach something that nobody wrote. Without an
    assistant's turn the mask is all 0.
    """
    header, end = turn_marks(tokenizer)
    if not any(token in header for token in added_tokens(tokenizer)):  # ordinary text: anybody can write it
        for message in messages:
            if message["role"] != "assistant" and header.strip() in (message.get("content") or ""):
                raise ValueError(f"a message of the {message['role']} contains the header {header.strip()!r}")
    ids, mask, turns, inside = [], [], [], False

    def add(new: list[int]):
        ids.extend(new)
        mask.extend([int(inside)] * len(new))

    for text, plain in render(tokenizer, *place_tools(tokenizer, messages, tools)):
        if plain:
            add(encode_plain(tokenizer, text))
            if inside:
                turns[-1] += text
            continue
        while text:
            before, mark, text = text.partition(end if inside else header)
            add(encode_marks(tokenizer, before + mark))
            if inside:
                turns[-1] += before
            if mark:
                inside = not inside
                if inside:
                    turns.append("")
    written = [m for m in messages if m["role"] == "assistant"]
    if len(turns) != len(written):
        raise ValueError(
            f"the template renders {len(turns)} assistant turns of {len(written)}; split the conversation"
        )
    for number, (message, turn) in enumerate(zip(written, turns), 1):
        if lost := _lost(message, turn):
            raise ValueError(
                f"the template drops text of assistant turn {number}: {lost[:60]!r}; split the conversation "
                "after this turn, or use a template that keeps it"
            )
    return ids, mask


def _lost(message: dict, turn: str) -> str:
    """The first text of an assistant's message that its rendered turn does not have ("": nothing is lost)."""
    at = 0  # thinking, then answer: one that repeats its thinking does not stand for it
    parts = [message.get("reasoning_content") or "", *re.split("</?think>", message.get("content") or "")]
    for part in parts:
        found = turn.find(part.strip(), at)
        if found < 0:
            return part.strip()
        at = found + len(part.strip())
    for call in message.get("tool_calls") or []:
        name, arguments = name_and_arguments(call)
        for part in [name, *(v for v in arguments.values() if isinstance(v, str))]:
            if part not in turn and json.dumps(part, ensure_ascii=False)[1:-1] not in turn:
                return part
    return ""


def tokenize_all(tokenizer, conversations, max_len: int, too_long: str = "cut"):
    """[(ids, mask)] of the conversations that have a token to train on; says how many are cut, and how many
    left out and why."""
    examples, cut, left_out = [], 0, Counter()
    for conversation in conversations:
        try:
            ids, mask = tokenize_conversation(tokenizer, conversation["messages"], conversation.get("tools"))
        except ValueError as error:
            left_out[str(error).split(":")[0]] += 1
            continue
        if len(ids) > max_len and too_long == "drop":
            left_out[f"longer than {max_len} tokens"] += 1
        elif not any(mask[1:max_len]):
            left_out["with nothing to train on"] += 1
        else:
            cut += len(ids) > max_len
            examples.append((ids[:max_len], mask[:max_len]))
    if dist.get_rank() == 0:
        print(f"{len(examples)} conversations; {cut} cut to {max_len} tokens", end="")
        print("".join(f", {n} left out ({why})" for why, n in left_out.items()))
    if not examples:
        fail("no conversation has a token to train on; check the columns and the chat template")
    return examples


# ---- the loop ----------------------------------------------------------------------------------------------


def train(policy: net.Policy, examples, config: Config, device: str = "cpu", tokenizer=None, folder=None):
    """Minimise the cross-entropy of the policy's tokens. Returns that of each step's batch, in nats a token.

        minimised = - sum of log pi(token) over the policy tokens of a batch / (conversations * tokens of one)

    where "tokens of one" is the mean of the whole data set, a constant. So each token of the data weighs the
    same, in any batch, micro-batch and rank. Dividing by the batch's own count would let tokens of short
    batches weigh more: a data set with tools in 45 % of the conversations then trains a policy that uses them
    in 19 %. folder: of checkpoints and metrics.jsonl; training goes on after the newest one there. Raises
    FloatingPointError if loss or gradient is not finite.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=0.0, betas=(0.9, config.beta2), weight_decay=config.weight_decay, fused=True
    )
    first, start = latest(folder) if folder else (0, None)
    if start:
        restore(start, policy, optimizer)
        if rank == 0:
            print(f"continued after step {first}", flush=True)
    log = Log(folder, first, config.tracker, asdict(config)) if folder else None
    losses = [row["loss"] for row in log.rows] if log else []
    steps = max(1, round(len(examples) * config.epochs / config.batch))
    tokens = policy_tokens(examples) / len(examples)  # of a conversation, on average
    order: list[int] = []
    while len(order) < steps * config.batch:
        order += shuffled(len(examples), config.seed, len(order) // len(examples))
    every = 1 if sys.stderr.isatty() else 10
    bar = tqdm(range(first, steps), "cold start", steps, initial=first, disable=rank > 0, mininterval=every)
    saved = first

    def save() -> int:
        """A checkpoint of the last step that is done; its number."""
        nonlocal saved
        if len(losses) > saved:
            saved = len(losses)
            dtype = net.compute_dtype(config.dtype, device)
            checkpoint(folder, saved, policy, optimizer, tokenizer, dtype)
        return saved

    if folder:
        listen(save)
    for step in bar:
        began = time.perf_counter()
        batch = [examples[i] for i in order[step * config.batch : (step + 1) * config.batch]]
        total = torch.zeros((), device=device)
        rows = net.micro_batches([len(ids) for ids, _ in batch], config.tokens_per_row, rank, ranks)
        rows = [[batch[i] for i in row] or [([0], [0])] for row in rows]
        rows = [net.packed_row(*zip(*row), device) for row in rows]
        for row in rows:
            logp, _ = policy(*row)
            loss = -logp.sum() / (config.batch * tokens)
            (loss * ranks).backward()  # FSDP averages over the ranks; all tokens divide the loss already
            total += loss.detach()
        dist.all_reduce(total)
        rate = config.lr * learning_rate(step, steps, config.warmup)
        for group in optimizer.param_groups:
            group["lr"] = rate
        sharded_norm, norm = net.gradient_norm(policy)
        if not torch.isfinite(norm + total):  # a NaN loss may have a gradient of 0
            raise FloatingPointError(
                f"step {step + 1}: loss or gradient is not finite{net.broken(policy, rows)}; "
                f"lower --lr {config.lr} or look at the data"
            )
        torch.nn.utils.clip_grads_with_norm_(policy.parameters(), config.clip_norm, sharded_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item() * config.batch * tokens / policy_tokens(batch))
        bar.set_postfix_str(f"loss {sum(losses[-20:]) / len(losses[-20:]):.3f}", refresh=False)
        if folder:
            row = {"step": step + 1, "loss": losses[-1], "lr": rate, "grad_norm": norm.item()}
            row |= {"tokens": sum(len(ids) for ids, _ in batch), "time/step": time.perf_counter() - began}
            log.write(row)
            if (step + 1) % config.save_every == 0 and step + 1 < steps:
                save()
            if step + 1 < steps and told_to_stop():
                raise Stop
    if log:
        log.close()
    return losses


def policy_tokens(examples) -> int:
    """Those with a loss: the first token of a conversation has none."""
    return sum(sum(mask[1:]) for _, mask in examples)


def learning_rate(step: int, steps: int, warmup: float) -> float:
    """Factor of the peak: linear up over the first `warmup` of the steps, then a cosine down to 0.05."""
    rising = max(1, round(warmup * steps))
    if step < rising:
        return (step + 1) / rising
    done = (step - rising) / max(1, steps - rising)
    return 0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2


def run(config: Config) -> Path:
    """Train as the configuration says and save a Hugging Face folder at config.out. All ranks call it."""
    rank, ranks, device = net.init_process_group()
    net.set_threads(config.threads, ranks)
    out = Path(config.out)
    if out.exists():
        fail(f"--out {out} exists already; give another name, or delete it")
    if not config.model or not config.data:
        fail("--model and --data say what to train on what; --preset tiny brings both")
    positive = "epochs batch lr clip_norm max_len tokens_per_row save_every teacher"
    choices = {"too_long": ("cut", "drop"), "dtype": ("", "float32", "bfloat16")}
    check_values(config, positive, "warmup weight_decay threads", choices)
    if not 0 <= config.beta2 < 1:
        fail(f"--beta2 {config.beta2}: take 0 to below 1")
    if config.warmup > 1:
        fail(f"--warmup {config.warmup}: take the share of the steps, 0 to 1")
    if fault := tracker_fault(config.tracker):
        fail(fault)
    folder = out.with_name(out.name + ".training")
    if rank == 0:
        make_folder(folder)  # a name that cannot be written is refused now, not after hours
    if config.data == "tiny":
        lesson = [[]]
        if rank == 0:  # one teacher for all: a program late on one rank would change its tokenizer
            with PythonTool(timeout_s=2, max_chars=tiny.MAX_CHARS) as tool:
                said = tiny.conversations(config.teacher, config.seed, tool)
                bar = tqdm(said, "teacher, every program really run", config.teacher)
                lesson = [[{"messages": messages} for messages in bar]]
        dist.broadcast_object_list(lesson)
        conversations = lesson[0]
    try:
        if config.data != "tiny":
            conversations = load_conversations(config.data)
        if config.model == "tiny":
            torch.manual_seed(config.seed)
            tokenizer = tiny.tokenizer(tiny.texts(conversations[:2000]))
            model = tiny.model(len(tokenizer))
        else:
            model, tokenizer = net.load(config.model)
    except ValueError as error:
        fail(str(error))
    examples = tokenize_all(
        tokenizer, conversations, min(config.max_len, model.config.max_position_embeddings), config.too_long
    )
    may_change = {"out", "threads", "save_every", "tracker", "tokens_per_row"}
    open_run(folder, {**asdict(config), "sha256_examples": digest(examples)}, may_change)
    if rank == 0:
        ids, mask = examples[0]
        painted = paint_turns(tokenizer, ids, mask, mask.index(1))
        title = f"the first conversation; {sum(mask)} of {len(ids)} tokens are trained on, the"
        title += " green ones" if colours() else " ones outside of bars"
        print(f"\n---- {title} ----\n{painted}\n----", flush=True)
    policy = net.shard(net.Policy(model), device, device != "cpu", config.dtype)
    train(policy, examples, config, device, tokenizer, folder)
    made = folder / "model"  # whole before it gets its name; copies, so that until then all goes on
    net.save(policy, tokenizer, made, net.compute_dtype(config.dtype, device))
    if rank == 0:
        shutil.copy(folder / "config.json", made / "training.json")
        shutil.copy(folder / "metrics.jsonl", made)
        if config.tracker:
            shutil.copytree(folder / config.tracker, made / config.tracker)
        made.rename(out)
        shutil.rmtree(folder)
    dist.barrier()
    return out


def main(config: Config) -> None:
    folder = run(config)
    if dist.get_rank() == 0:
        print(f"saved {folder}")
    dist.destroy_process_group()


if __name__ == "__main__":
    run_script(main, parse_args(Config, presets=PRESETS))
