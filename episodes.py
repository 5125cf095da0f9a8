"""Episodes: sample them with the tool, reward them, gather them from all ranks, measure them.

An episode is a dictionary, one line of trajectories/step_000012.jsonl: the trajectory of rollout.py, whether
its answer is right, its reward and the parts of it. What the reward is made of: `Agents.reward`.

Left out: rewards that another model gives.
"""

import math
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch.distributed as dist

from chat import encode_prompt
from data import fail
from reward import outcome, overlong_penalty, tool_shaping
from rollout import Sampler, Trajectory, run_agent
from tools import PythonTool


class Agents:
    """What samples and rewards episodes on this rank: the sampler and the tool, with its settings."""

    def __init__(self, model, tokenizer, tool: PythonTool, config):
        self.tokenizer, self.tool, self.config = tokenizer, tool, config
        longest = min(config.max_prompt + config.max_new_tokens, model.config.max_position_embeddings)
        self.sampler = Sampler(model, tokenizer, config.max_rows, longest, config.cache_tokens)

    def prompt(self, problem) -> list[int]:
        schema = [self.tool.schema] if self.config.describe_tool else None
        ids = encode_prompt(self.tokenizer, problem.messages, schema)
        if len(ids) > self.config.max_prompt:
            fail(
                f"problem {problem.id} has a prompt of {len(ids)} tokens, more than --max_prompt "
                f"{self.config.max_prompt}; raise it, or take the problem out of the data"
            )
        return ids

    def sample(self, problems, n: int, seed: int) -> list[dict]:
        """n episodes of each problem, in order, on every rank; each rank samples every ranks-th problem."""
        c = self.config
        mine = range(dist.get_rank(), len(problems), dist.get_world_size())
        prompts = [self.prompt(problems[i]) for i in mine]
        start = time.perf_counter()
        tools = {"python": self.tool}
        trajectories = run_agent(
            self.sampler,
            prompts,
            tools,
            n,
            c.max_turns,
            c.max_new_tokens,
            c.temperature,
            seed=seed,
            indices=mine,
        )
        sampled = time.perf_counter()
        with ThreadPoolExecutor() as threads:  # other processes compare answers and test programs
            episodes = list(threads.map(lambda t: self.reward(t, problems[t.prompt_index]), trajectories))
        self.seconds = {
            "time/rollout": sampled - start,
            "time/tool_wait": self.sampler.stats["tool_wait"],
            "time/reward": time.perf_counter() - sampled,
        }
        return gather(episodes)

    def reward(self, t: Trajectory, problem) -> dict:
        """The episode as it is stored: the trajectory, whether its answer is right, its reward and parts."""
        c = self.config
        right = outcome(problem.kind, t.answer(self.tokenizer), problem.answer, self.tool) == 1.0
        base, rounds = (1.0 if right else -1.0), max(0, len(t.turns()) - 1)
        length = len(t.ids) - t.prompt_len  # the tool's tokens count
        parts = {
            "correct": base,
            "tool": tool_shaping(right, rounds) - base if c.tool_reward else 0.0,
            "overlong": overlong_penalty(length, c.max_new_tokens, c.overlong_buffer),
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


ARRAYS = {"ids": np.int32, "mask": np.int8, "logprobs": np.float32}  # travel as arrays: lists take far longer


def gather(episodes: list[dict]) -> list[dict]:
    """The episodes of all ranks, sorted, on every rank, so that nothing later depends on who sampled what.

    Objects travel over gloo, where a rank may wait for hours; NCCL would give up after ten minutes.
    """
    everyone: list = [None] * dist.get_world_size()
    packed = [{**e, **{k: np.array(e[k], kind) for k, kind in ARRAYS.items()}} for e in episodes]
    dist.all_gather_object(everyone, packed)
    found = [{**e, **{k: e[k].tolist() for k in ARRAYS}} for part in everyone for e in part]
    return sorted(found, key=lambda e: (e["prompt_index"], e["sample_index"]))


def measure(episodes: list[dict]) -> dict[str, float]:
    """Metrics of a batch of episodes; the README has a table with the meaning of each."""

    def mean(values) -> float:
        values = list(values)
        return sum(values) / len(values) if values else 0.0

    groups, families = defaultdict(list), defaultdict(list)
    for e in episodes:
        groups[e["prompt_index"]].append(e["reward"])
        families[e["family"]].append(e["correct"])
    calls = [r for e in episodes for r in e["tool_results"]]
    ran = [[r["status"] == "ok" for r in e["tool_results"]] for e in episodes]
    return {
        "reward/mean": mean(e["reward"] for e in episodes),
        "reward/correct": mean(e["correct"] for e in episodes),
        "reward/tool": mean(e["reward_parts"]["tool"] for e in episodes),
        "reward/overlong": mean(e["reward_parts"]["overlong"] for e in episodes),
        **{f"correct/{family}": mean(right) for family, right in sorted(families.items())},
        "length/policy_tokens": mean(sum(e["mask"]) for e in episodes),
        "length/tool_tokens": mean(len(e["ids"]) - e["prompt_len"] - sum(e["mask"]) for e in episodes),
        "length/truncated": mean(e["finish"] != "stop" for e in episodes),
        "tool/calls": len(calls) / len(episodes),
        "tool/used": mean(bool(r) for r in ran),
        "tool/success": mean(r["status"] == "ok" for r in calls),
        "tool/repaired": mean(any(not a and b for a, b in zip(r, r[1:])) for r in ran),
        "tool/seconds": mean(r["seconds"] for r in calls),
        "group/zero_variance": mean(min(r) == max(r) for r in groups.values()),
    }


def evaluate(agents: Agents, problems, seed: int) -> dict[str, float]:
    """Share of right answers on unseen problems, one episode each, with its 95 % interval (Wilson)."""
    found, n = measure(agents.sample(problems, 1, seed)), len(problems)
    p, z2 = found["reward/correct"], 1.96**2
    middle, half = p + z2 / (2 * n), math.sqrt(z2 * (p * (1 - p) / n + z2 / (4 * n * n)))
    low, high = (middle - half) / (1 + z2 / n), (middle + half) / (1 + z2 / n)
    families = {f"eval/{k}": v for k, v in found.items() if k.startswith("correct/")}
    tool = {f"eval/tool_{k}": found[f"tool/{k}"] for k in ("used", "success", "repaired")}
    return {"eval/correct": p, "eval/low": low, "eval/high": high, **families, **tool}
