"""Evaluate a policy: avg@k with its interval, unbiased pass@k, maj@k; with the Python tool, without, or both.

    python evaluate.py --model M --data aime2024 --samples 32         # also --no-tool, --both, --limit 10
    torchrun --nproc_per_node 8 evaluate.py --model M --data gsm8k    # the same numbers from eight processes

--data: aime2024 aime2025 gpqa livecodebench gsm8k math500, tiny (the built-in held-out set), owner/name on
the hub, or a .jsonl / .parquet file. Defaults: the published protocol (32 samples, top-p 0.6, 16 turns).

OUT/config.json    every condition of the run; going on under other conditions is refused
OUT/samples.jsonl  one line a sample, written chunk by chunk: after a kill the same command goes on
OUT/summary.json   the table, beside the conditions

Random numbers belong to (seed, problem, sample): neither chunks nor ranks change a sample (in float32; with
bfloat16 another batch may round a close call differently). Ranks on several machines need a shared folder.
Left out: judging by a model, prompts with worked examples, the published grader (exact text near the end).
"""

import concurrent.futures
import hashlib
import importlib.metadata
import json
import math
import os
import sys
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import reward
import tiny
from chat import encode_prompt
from data import Problem, fail, load_problems, parse_args
from policy import init_process_group, load
from rollout import Sampler, Trajectory, run_agent
from tools import PythonTool


@dataclass
class Config:
    model: str  # hub name, folder, or .gguf file
    data: str  # named set, hub data set, .jsonl or .parquet file, or tiny
    out: str | None = None  # folder of the results; default runs/eval-MODEL-DATA
    samples: int = 32  # samples a problem
    limit: int | None = None  # only so many problems, the first
    tool: bool = True  # the policy may call the Python tool
    both: bool = False  # with the tool and then without, from the same weights
    temperature: float = 1.0  # 0 = the most likely token, with samples 1
    top_p: float = 0.6  # share of the probability that is sampled from
    top_k: int = 0  # number of tokens that are sampled from, 0 = all
    max_new_tokens: int = 20480  # tokens after the prompt, those of tool results included
    max_turns: int = 16  # turns of the policy; a call in the last one is not run
    seed: int = 0  # of the samples
    dtype: str = "auto"  # float32 or bfloat16; auto = float32 on CPU, bfloat16 on GPU
    tool_name: str = "python"  # what the prompt calls the tool
    tool_timeout: float = 30.0  # seconds a call may take
    tool_memory: int = 2048  # MB a call may take
    tool_chars: int = 256  # characters of a result that the policy sees, head and tail
    tool_workers: int | None = None  # processes that run code; default: by cores
    chunk: int = 16  # problems sampled together, then written
    max_rows: int = 64  # trajectories that decode together
    cache_tokens: int | None = None  # tokens the KV cache holds; default: by memory
    as_published: bool = False  # also best@k and maj@k as the published scripts bootstrap them


FREE = ("out", "chunk", "max_rows", "cache_tokens", "tool_workers", "as_published")  # these change no sample


# ---- the numbers -------------------------------------------------------------------------------------------


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that k of n samples, drawn without replacement, hold a right one when c are right:
    1 - C(n-c,k) / C(n,k), unbiased (arXiv 2107.03374, eq. 1). ValueError unless 0 <= c <= n, 1 <= k <= n."""
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {n} samples, {c} right: needs 1 <= k <= {n} and 0 <= right <= {n}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def majority_at_k(answers: list[str | None], correct: list[bool]) -> float:
    """Score of the answer that most of the k samples give.

    Answers that math_correct calls equal vote together. An answer scores the mean of its voters' marks;
    answers that tie share, so the order of samples has no say. None never wins over an answer, all None is 0.
    """
    if len(answers) != len(correct):
        raise ValueError(f"{len(answers)} answers but {len(correct)} marks")
    marks = defaultdict(list)
    for answer, mark in zip(answers, correct):
        if answer is not None:
            marks[str(answer)].append(float(mark))
    groups = {}  # first spelling -> marks of its voters
    for answer in sorted(marks):  # sorted: the order has no say even where equality is not transitive
        same = (first for first in groups if reward.math_correct(f"\\boxed{{{first}}}", answer))
        groups.setdefault(next(same, answer), []).extend(marks[answer])
    most = max(map(len, groups.values()), default=0)
    winners = [sum(votes) / most for votes in groups.values() if len(votes) == most]
    return sum(winners) / len(winners) if winners else 0.0


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


def published_bootstrap(answers: list, correct: list[bool], k: int, draws: int = 1000) -> tuple[float, float]:
    """(best@k, maj@k) of the published scripts: k samples drawn WITH replacement, 1000 times, seed 42.

    best@k expects 1 - (1 - c/n)^k, below pass@k: 0.638 for 1 right of 32 and k = 32. maj@k: the most common
    text, the first seen of several; no answer votes like an answer.
    """
    random, best, majority = np.random.RandomState(42), 0.0, 0.0
    for _ in range(draws):
        drawn = random.choice(len(correct), size=k, replace=True)
        winner = Counter(answers[i] for i in drawn).most_common(1)[0][0]
        best += max(correct[i] for i in drawn)
        majority += next(correct[i] for i in drawn if answers[i] == winner)
    return best / draws, majority / draws


def summarize(rows: list[dict], samples: int, as_published: bool = False) -> dict:
    """The table of one condition: every problem with all its samples, none left out of a denominator."""
    by_problem = defaultdict(list)
    for row in sorted(rows, key=row_key):
        by_problem[row["problem"]].append(row)
    groups = list(by_problem.values())
    marks = [[row["correct"] for row in group] for group in groups]
    predictions = [[row["prediction"] for row in group] for group in groups]
    mean, low, high = mean_interval(marks)
    ks = [2**i for i in range(samples.bit_length()) if 2**i < samples] + [samples]
    calls = sum(row["calls"] for row in rows)

    def share(of) -> float:
        return sum(map(of, rows)) / len(rows)

    table = {"problems": len(groups), f"avg@{samples}": mean, "low": low, "high": high}
    table |= {f"pass@{k}": float(np.mean([pass_at_k(samples, sum(m), k) for m in marks])) for k in ks}
    if all(row["kind"] != "code" for row in rows):  # programs do not vote
        table[f"maj@{samples}"] = float(np.mean([majority_at_k(p, m) for p, m in zip(predictions, marks)]))
    table |= {
        "no_answer": share(lambda row: row["prediction"] is None),
        "truncated/length": share(lambda row: row["finish"] == "length"),
        "truncated/turns": share(lambda row: row["finish"] == "turns"),
        "tool/used": share(lambda row: row["calls"] > 0),
        "tool/calls": calls / len(rows),  # a sample
        "tool/success": sum(row["ran"] for row in rows) / calls if calls else None,  # of the calls
        "tokens/policy": share(lambda row: row["policy_tokens"]),
        "tokens/tool": share(lambda row: row["tool_tokens"]),
        "seconds": sum(row["seconds"] for row in rows),
    }
    for family in sorted({row["family"] for row in rows}):
        mine = [np.mean(m) for m, group in zip(marks, groups) if group[0]["family"] == family]
        table[f"avg/{family}"] = float(np.mean(mine))
    for k in ks[1:] if as_published else []:
        pairs = [published_bootstrap(p, m, k) for p, m in zip(predictions, marks)]
        table[f"published/best@{k}"], table[f"published/maj@{k}"] = map(float, np.mean(pairs, axis=0))
    return table


# ---- samples on disk ---------------------------------------------------------------------------------------


def row_key(row: dict) -> tuple:
    return not row["tool"], row["problem"], row["sample"]


def write(file: Path, text: str) -> None:
    """All or nothing: a kill leaves the old file."""
    file.with_suffix(".tmp").write_text(text)
    os.replace(file.with_suffix(".tmp"), file)


def read_rows(file: Path) -> list[dict]:
    """Rows of a samples file; a last line that a kill left half-written is dropped."""
    lines = file.read_bytes().split(b"\n") if file.exists() else [b""]
    return [json.loads(line) for line in lines[:-1]]


def merge(out: Path) -> list[dict]:
    """Every sample of the folder, of all ranks and from before a kill, into samples.jsonl: sorted, once."""
    rows = {row_key(row): row for file in sorted(out.glob("samples*.jsonl")) for row in read_rows(file)}
    write(out / "samples.jsonl", "".join(json.dumps(rows[key]) + "\n" for key in sorted(rows)))
    for file in out.glob("samples.rank*.jsonl"):
        file.unlink()
    return list(rows.values())


def open_folder(out: Path, conditions: dict) -> None:
    """Begin a folder, or go on in one; ValueError if it was begun under other conditions or is not ours."""
    file = out / "config.json"
    if not file.exists():
        if out.exists() and any(out.iterdir()):
            raise ValueError(f"{out} holds files but no config.json of an evaluation; give another --out")
        out.mkdir(parents=True, exist_ok=True)
        write(file, json.dumps(conditions, indent=1))
    there = json.loads(file.read_text())
    for key in {**there, **conditions}:
        if there.get(key) != conditions.get(key):
            raise ValueError(
                f"{out} was begun with {key} {there.get(key)!r}, and now it is {conditions.get(key)!r}; "
                "go on with the same conditions or give another --out"
            )
    merge(out)


# ---- the run -----------------------------------------------------------------------------------------------


def check(cfg: Config) -> None:
    for name in ("samples", "limit", "chunk", "max_rows", "max_new_tokens", "max_turns"):
        if getattr(cfg, name) is not None and getattr(cfg, name) < 1:
            raise ValueError(f"--{name} is {getattr(cfg, name)}; it must be at least 1")
    if cfg.temperature == 0 and cfg.samples > 1:
        raise ValueError(f"--temperature 0 would give {cfg.samples} times the same sample; add --samples 1")
    if cfg.dtype not in ("auto", "float32", "bfloat16"):
        raise ValueError(f"--dtype is {cfg.dtype}; choose auto, float32 or bfloat16")


def problems_for(cfg: Config, tool: bool) -> list[Problem]:
    if cfg.data == "tiny":
        return tiny.problems(split="test", n=cfg.limit or 200, seed=0)
    return load_problems(cfg.data, tool=tool, limit=cfg.limit)


def conditions_of(cfg: Config, problems: dict[bool, list[Problem]], model, device: str) -> dict:
    """What the numbers depend on: the settings, the content of problems and weights, versions, device."""

    def digest(content: bytes) -> str:
        return hashlib.sha256(content).hexdigest()[:16]

    conditions = {key: value for key, value in asdict(cfg).items() if key not in FREE}
    for tool, some in problems.items():
        content = json.dumps([asdict(p) for p in some], sort_keys=True).encode()
        conditions["problems"] = len(some)
        conditions[f"sha256_problems_{'tool' if tool else 'plain'}"] = digest(content)
    some = torch.cat([p.detach().flatten()[:64].float().cpu() for p in model.parameters()])
    conditions["sha256_weights"] = digest(some.numpy().tobytes())  # of 64 values of each tensor
    conditions["device"] = "cpu" if device == "cpu" else torch.cuda.get_device_name()
    conditions["python"] = sys.version.split()[0]
    return conditions | {name: importlib.metadata.version(name) for name in ("torch", "transformers")}


def grade(problem: Problem, t: Trajectory, tokenizer, tool: PythonTool) -> dict:
    """A row of samples.jsonl. Graded is the text of the policy's last turn, whatever ended it."""
    last = next((i for i in range(len(t.ids), t.prompt_len, -1) if not t.mask[i - 1]), t.prompt_len)
    response = tokenizer.decode(t.ids[last:], skip_special_tokens=True)
    extract = {"math": reward.extract_boxed, "choice": reward.extract_choice, "code": reward.extract_program}
    return {
        "problem": t.prompt_index,
        "sample": t.sample_index,
        "id": problem.id,
        "family": problem.family,
        "kind": problem.kind,
        "answer": problem.answer if problem.kind != "code" else None,
        "prediction": extract[problem.kind](response),
        "correct": reward.outcome(problem.kind, response, problem.answer, tool) == 1.0,
        "finish": t.finish,
        "calls": len(t.tool_results),
        "ran": sum(result.status == "ok" for result in t.tool_results),
        "policy_tokens": sum(t.mask),
        "tool_tokens": len(t.ids) - t.prompt_len - sum(t.mask),
        "text": tokenizer.decode(t.ids[t.prompt_len :]),
    }


def sample_missing(cfg: Config, model, tokenizer, problems, with_tool, rank, ranks, done, file: Path) -> None:
    """Sample this rank's problems that lack a sample; a chunk is graded and appended to the file at once."""
    keys = [(not with_tool, j) for j in range(cfg.samples)]
    missing = [i for i in range(rank, len(problems), ranks) if any((a, i, j) not in done for a, j in keys)]
    if not missing:
        return
    with PythonTool(cfg.tool_workers, cfg.tool_timeout, cfg.tool_memory, cfg.tool_chars) as tool:
        schema = {**tool.schema, "function": {**tool.schema["function"], "name": cfg.tool_name}}
        # the built-in problems stand as they are, for the built-in policy was trained on bare questions
        described = [schema] if with_tool and cfg.data != "tiny" else None
        prompts = {i: encode_prompt(tokenizer, problems[i].messages, described) for i in missing}
        longest = max(map(len, prompts.values()))
        context = getattr(model.config, "max_position_embeddings", None) or 2**20
        if longest + cfg.max_new_tokens > context:
            print(f"the context of {context} leaves {context - longest} tokens after the longest prompt, "
                  f"not {cfg.max_new_tokens}", flush=True)  # fmt: skip
        max_len = min(longest + cfg.max_new_tokens, context)
        sampler = Sampler(model, tokenizer, cfg.max_rows, max_len, cfg.cache_tokens)
        names = ("max_turns", "max_new_tokens", "temperature", "top_p", "top_k", "seed")
        law = {name: getattr(cfg, name) for name in names}
        began, right, ready = time.perf_counter(), 0, 0
        for at in range(0, len(missing), cfg.chunk):
            chunk, start = missing[at : at + cfg.chunk], time.perf_counter()
            asked, tools = [prompts[i] for i in chunk], {cfg.tool_name: tool} if with_tool else {}
            trajectories = run_agent(sampler, asked, tools, n=cfg.samples, indices=chunk, **law)
            with concurrent.futures.ThreadPoolExecutor() as threads:
                graded = threads.map(
                    lambda t: grade(problems[t.prompt_index], t, tokenizer, tool), trajectories
                )
                rows = list(graded)
            each = (time.perf_counter() - start) / len(rows)  # seconds
            rows = [{"tool": with_tool, **row, "seconds": each} for row in rows]
            with open(file, "a") as lines:
                lines.write("".join(json.dumps(row) + "\n" for row in rows if row_key(row) not in done))
            right, ready = right + sum(row["correct"] for row in rows), ready + len(chunk)
            left = (time.perf_counter() - began) / ready * (len(missing) - ready)
            print(f"rank {rank}, {'tool' if with_tool else 'no tool'}: {ready}/{len(missing)} problems, "
                  f"{right / ready / cfg.samples:.3f} right, {left:.0f} s left", flush=True)  # fmt: skip


def print_table(title: str, table: dict) -> None:
    print(f"\n{title}")
    for key, value in table.items():
        text = "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
        if key.startswith("avg@"):
            text += f"   95 % [{table['low']:.3f}, {table['high']:.3f}], clustered by problem"
        if key.startswith("maj@"):
            text += "   equal answers vote together, ties share, no answer never wins"
        if key not in ("low", "high"):
            print(f"  {key:20} {text}")


def main(argv: list[str] | None = None) -> None:
    cfg = parse_args(Config, argv)
    rank, ranks, device = init_process_group()
    try:
        check(cfg)
        problems = {tool: problems_for(cfg, tool) for tool in ([True, False] if cfg.both else [cfg.tool])}
        if cfg.dtype == "auto":
            cfg.dtype = "float32" if device == "cpu" else "bfloat16"
        model, tokenizer = load(cfg.model, getattr(torch, cfg.dtype), device)
        conditions = conditions_of(cfg, problems, model, device)
        out = Path(cfg.out or f"runs/eval-{Path(cfg.model).name}-{Path(cfg.data).stem}")
        if rank == 0:
            open_folder(out, conditions)
    except ValueError as error:
        fail(str(error))
    dist.barrier()
    done = {row_key(row) for row in read_rows(out / "samples.jsonl")}
    dist.barrier()
    file = out / (f"samples.rank{rank}.jsonl" if ranks > 1 else "samples.jsonl")
    for tool, some in problems.items():
        sample_missing(cfg, model, tokenizer, some, tool, rank, ranks, done, file)
    dist.barrier()
    if rank == 0:
        rows, summary = merge(out), {}
        for tool in problems:
            title = "with the tool" if tool else "without the tool"
            mine = [row for row in rows if row["tool"] == tool]
            summary[title] = summarize(mine, cfg.samples, cfg.as_published)
            print_table(f"{cfg.model} on {cfg.data}, {title}", summary[title])
        write(out / "summary.json", json.dumps({"conditions": conditions, **summary}, indent=1))
        print("\n" + "  ".join(f"{key}={value}" for key, value in conditions.items()))
        print(out / "summary.json")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
