"""Episodes: sample them with the tool, reward them, gather them from all ranks, measure them.

An episode is a dictionary, one line of trajectories/step_000012.jsonl: the trajectory of rollout.py, whether
its answer is right, its reward and the parts of it. What the reward is made of: `Agents.reward`.

Left out: rewards that another model gives.
"""

import contextlib
import faulthandler
import itertools
import math
import os
import sys
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.distributed as dist

from chat import encode_prompt
from options import fail
from policy import take_turns
from reward import outcome, overlong_penalty, tool_shaping
from rollout import Sampler, Trajectory, run_agent
from run import Stop, breakable
from tools import PythonTool


class Agents:
    """What samples and rewards episodes on this rank: the sampler and the tool, with its settings."""

    def __init__(self, model, tokenizer, tool: PythonTool, config):
        self.tokenizer, self.tool, self.config = tokenizer, tool, config
        self.tools = {config.tool_name: tool}  # the policy's; each has a schema
        longest = min(config.max_prompt + config.max_new_tokens, model.config.max_position_embeddings)
        limits = config.max_rows, longest, config.cache_tokens
        how = dict(deterministic=config.deterministic, graphs=config.cuda_graphs)
        self.sampler = Sampler(model, tokenizer, *limits, **how)

    def encode(self, problem) -> list[int]:
        schema = [t.schema for t in self.tools.values()] if self.config.describe_tool else None
        return encode_prompt(self.tokenizer, problem.messages, schema)

    def prompt(self, problem) -> list[int]:
        ids = self.encode(problem)
        if len(ids) > (most := longest_prompt(self.config, self.sampler.model)):
            fail(
                f"problem {problem.id} has a prompt of {len(ids)} tokens, more than {most} (--max_prompt "
                f"{self.config.max_prompt}, and the model's context); take it out of the data, or raise that"
            )
        return ids

    def sample(self, problems, n: int, seed: int) -> list[dict]:
        """n episodes of each problem, in order, on every rank. Raises Stop on all if one was told to stop.

        A rank takes the next problem when it has a place free; in deterministic mode every ranks-th one.
        self.seconds then says where the time went, on the slowest rank.
        """
        c = self.config
        if self.sampler.deterministic:
            mine = range(dist.get_rank(), len(problems), dist.get_world_size())
            prompts = [self.prompt(problems[i]) for i in mine]
        else:
            mine, again = itertools.tee(take_turns(len(problems)))
            prompts = (self.prompt(problems[i]) for i in again)
        threads = ThreadPoolExecutor()  # enough: answers are compared and programs run in other processes
        start = time.perf_counter()
        try:
            with breakable():
                law = (n, c.max_turns, c.max_new_tokens, c.temperature)
                with watched(self.sampler, c.stall):
                    trajectories = run_agent(self.sampler, prompts, self.tools, *law, seed=seed, indices=mine)
                sampled = time.perf_counter()
                episodes = list(threads.map(lambda t: self.reward(t, problems[t.prompt_index]), trajectories))
        except Stop:
            return gather(None)  # raises Stop, here and on the other ranks
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
        self.seconds = {
            "time/rollout": sampled - start,
            # of its stats the seconds are floats, the counts integers
            **{f"time/{k}": v for k, v in self.sampler.stats.items() if isinstance(v, float)},
            "time/reward": time.perf_counter() - sampled,
        }
        found = gather(episodes)
        slowest = torch.tensor([*self.seconds.values()], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)  # the others wait for it
        self.seconds = dict(zip(self.seconds, slowest.tolist()))
        return found

    def reward(self, t: Trajectory, problem) -> dict:
        """The episode as it is stored: the trajectory, whether its answer is right, its reward and parts."""
        c = self.config
        right = outcome(problem.kind, t.answer(self.tokenizer), problem.answer, self.tool)
        base, rounds = (1.0 if right else -1.0), max(0, len(t.turns()) - 1)  # all turns but the last called
        length = len(t.ids) - t.prompt_len  # the tool's tokens count
        room = max(0, min(c.max_new_tokens, self.sampler.max_len - t.prompt_len))  # tokens it could have had
        parts = {
            "correct": base,
            "tool": tool_shaping(right, rounds) - base if c.tool_reward else 0.0,
            "overlong": overlong_penalty(length, room, min(c.overlong_buffer, room)),
        }
        return {
            **vars(t),
            "tool_results": [vars(r) for r in t.tool_results],
            "family": problem.family,
            "answer": problem.answer if isinstance(problem.answer, str) else None,
            "correct": right,
            "reward": sum(parts.values()),
            "reward_parts": parts,
        }


def longest_prompt(config, model) -> int:
    """Tokens: max_prompt, or what leaves room for one more in the model's context."""
    return min(config.max_prompt, model.config.max_position_embeddings - 1)


def fitting(items: list, lengths: list[int], config, model) -> list:
    """The items whose prompt, of so many tokens, is not too long; ends the program if there is none."""
    most = longest_prompt(config, model)
    found = [item for item, length in zip(items, lengths) if length <= most]
    if items and not found:
        fail(
            f"the shortest prompt of --data {config.data} has {min(lengths)} tokens, more than {most} "
            f"(--max_prompt {config.max_prompt}, and the model's context); raise it, or --no-describe_tool"
        )
    if dist.get_rank() == 0 and len(found) < len(items):
        print(
            f"{len(items) - len(found)} of {len(items)} problems left out, their prompts exceed {most} tokens"
        )
    return found


@contextlib.contextmanager
def watched(sampler: Sampler, limit: float):
    """Ends this process, and so the job, if for `limit` seconds no token was sampled and no tool answered,
    and shows where each thread stands: the other ranks would wait for hours."""
    over = threading.Event()

    def watch():
        seen, since = {}, time.monotonic()
        while not over.wait(min(limit, 1)):
            if seen != sampler.stats:
                seen, since = dict(sampler.stats), time.monotonic()
            elif time.monotonic() - since > limit:
                cause = f"rank {dist.get_rank()}: for {limit:g} s no token was sampled and no tool answered"
                print(f"{cause} (--stall); where it stands:", file=sys.stderr, flush=True)
                faulthandler.dump_traceback(sys.__stderr__)
                os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()


ARRAYS = {"ids": np.int32, "mask": np.int8, "logprobs": np.float32}  # travel as arrays: lists take far longer


def gather(episodes: list[dict] | None) -> list[dict]:
    """The episodes of all ranks, sorted, on every rank, so that nothing later depends on who sampled what.
    Raises Stop on all ranks if one has None: so they agree on the step after which they stop.

    Objects travel over gloo: a rank that waits keeps no GPU busy.
    """
    everyone: list = [None] * dist.get_world_size()
    if episodes is not None:
        episodes = [{**e, **{k: np.array(e[k], kind) for k, kind in ARRAYS.items()}} for e in episodes]
    dist.all_gather_object(everyone, episodes)
    if any(part is None for part in everyone):
        raise Stop
    found = [{**e, **{k: e[k].tolist() for k in ARRAYS}} for part in everyone for e in part]
    return sorted(found, key=lambda e: (e["prompt_index"], e["sample_index"]))


def measure(episodes: list[dict]) -> dict[str, float]:
    """Metrics of a batch of episodes; the README has a table with the meaning of each."""

    def mean(values) -> float:
        values = list(values)
        return sum(values) / len(values)

    groups, families = defaultdict(list), defaultdict(list)
    for e in episodes:
        groups[e["prompt_index"]].append(e["reward"])
        families[e["family"]].append(e["correct"])
    shaping = [part for part in episodes[0]["reward_parts"] if part != "correct"]
    calls = [r for e in episodes for r in e["tool_results"]]
    ran = [[r["status"] == "ok" for r in e["tool_results"]] for e in episodes]
    of_calls = {"tool/success": [ok for r in ran for ok in r], "tool/seconds": [r["seconds"] for r in calls]}
    return {
        "reward/mean": mean(e["reward"] for e in episodes),
        "reward/correct": mean(e["correct"] for e in episodes),
        **{f"reward/{k}": mean(e["reward_parts"][k] for e in episodes) for k in shaping},
        **{f"correct/{family}": mean(right) for family, right in sorted(families.items())},
        "length/policy_tokens": mean(sum(e["mask"]) for e in episodes),
        "length/tool_tokens": mean(len(e["ids"]) - e["prompt_len"] - sum(e["mask"]) for e in episodes),
        "length/truncated": mean(e["finish"] != "stop" for e in episodes),
        "tool/calls": len(calls) / len(episodes),
        "tool/used": mean(bool(r) for r in ran),
        "tool/repaired": mean(any(not a and b for a, b in zip(r, r[1:])) for r in ran),
        **{k: mean(values) for k, values in of_calls.items() if values},  # missing where nothing was called
        "group/zero_variance": mean(min(r) == max(r) for r in groups.values()),
    }


def mean_interval(scores: list[list[float]], z: float = 1.96) -> tuple[float, float, float]:
    """(mean, low, high): the mean over problems of their mean scores m_i, and its 95 % interval.

    scores [problems][samples] in [0, 1]. Samples of one problem hang together, so problems are what varies:
        se^2 = sum_i (m_i - m)^2 / (P (P - 1))       clustered by problem (arXiv 2411.00640, sec. 2.2)
        n = m (1 - m) / se^2                         so many independent draws would be as certain
    and the interval is Wilson's for n draws: m +- z se leaves [0, 1]. Few problems, or a weak model, show too
    little spread (none when all samples fail), so se and n count two more problems, one solved and one not.
    """
    means = np.array([np.mean(s) for s in scores])
    if not len(means) or not all(0 <= x <= 1 for s in scores for x in s):
        raise ValueError("an interval needs at least one problem, and scores from 0 to 1")
    m, wide = float(means.mean()), np.append(means, [0.0, 1.0])
    n = wide.mean() * (1 - wide.mean()) / (wide.var(ddof=1) / len(wide))
    n = min(float(n), sum(map(len, scores)))
    middle = (m + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(m * (1 - m) / n + z * z / (4 * n * n))
    return m, max(0.0, middle - half), min(1.0, middle + half)


def evaluate(agents: Agents, problems, seed: int) -> dict[str, float]:
    """Share of right answers on unseen problems, one episode each, with its 95 % interval."""
    episodes = agents.sample(problems, 1, seed)
    found, (p, low, high) = measure(episodes), mean_interval([[float(e["correct"])] for e in episodes])
    families = {f"eval/{k}": v for k, v in found.items() if k.startswith("correct/")}
    tool = {
        f"eval/tool_{k}": found[f"tool/{k}"] for k in ("used", "success", "repaired") if f"tool/{k}" in found
    }
    return {"eval/correct": p, "eval/low": low, "eval/high": high, **families, **tool}


def alarms(row: dict, before: list[dict], exact: bool) -> dict[str, str]:
    """What is probably going wrong at this step, in plain words: {metric: sentence}.

    row     metrics of the step; before: those of the steps before; entropy is compared with the first of them
    exact   the sampler is float32: rounding makes a gap of about 1e-6 then, of 1e-2 in bfloat16
    """
    first = next((r["policy/entropy"] for r in before if "policy/entropy" in r), row["policy/entropy"])
    entropy, right, gap = row["policy/entropy"], row["reward/correct"], row["sampler/gap_mean"]
    found = [
        ("policy/entropy", entropy < first / 10 and right < 0.9,
         f"entropy fell from {first:.3f} to {entropy:.3f} with {right:.0%} right: the policy explores no "
         "more; a higher --clip_high or a lower --lr keeps it up"),
        ("policy/entropy", entropy > max(3 * first, 0.5),
         f"entropy rose from {first:.3f} to {entropy:.3f}: the policy falls apart; lower --lr"),
        ("tool/used", row["tool/used"] < 0.05,
         f"{row['tool/used']:.0%} of the episodes call the tool: look at the cold start and at the prompt"),
        ("group/zero_variance", row["group/zero_variance"] == 1,
         "in every group all samples earned the same, which teaches nothing: the problems are too easy or "
         "too hard; choose them by pass rate (collect.py filter), or replace them (--resample)"),
        ("sampler/gap_mean", gap > (1e-3 if exact else 5e-2),
         f"log-probs of sampler and trainer differ by {gap:.1e} on average: they are not the same policy"),
        ("length/truncated", row["length/truncated"] > 0.5,
         f"{row['length/truncated']:.0%} of the episodes do not end by themselves: raise --max_new_tokens or "
         "--max_turns"),
    ]  # fmt: skip
    return {key: sentence for key, wrong, sentence in found if wrong}
