"""Evaluate a policy: avg@k with its interval, unbiased pass@k, maj@k; with the Python tool, without, or both.

    python evaluate.py --model M --data aime2024 --samples 32         # also --no-tool, --both, --limit 10
    torchrun --nproc_per_node 8 evaluate.py --model M --data gsm8k    # the same numbers from eight processes

--data: aime2024 aime2025 gpqa livecodebench gsm8k math500, tiny (the built-in held-out set), owner/name on
the hub, or a .jsonl / .parquet file. Defaults: the published protocol (32 samples, top-p 0.6, 16 turns).
After a kill the same command goes on. Random numbers belong to (seed, problem, sample): neither chunks nor
ranks change a sample (in float32; with bfloat16 another batch may round a close call differently).
Left out: judging by a model, prompts with worked examples, the published grader (exact text near the end).
"""

import json
import math
import sys
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import math_equal
import reward
import tiny
from chat import encode_prompt
from data import Problem, load_problems
from episodes import mean_interval, watched
from options import check_values, fail, parse_args
from policy import compute_dtype, init_process_group, load, share_of_cores
from rollout import Sampler, Trajectory, run_agent
from run import digest, make_folder, read_rows, run_script, weights_digest, write_rows, write_whole
from terminal import clock
from tools import PythonTool, bubblewrap


@dataclass
class Config:
    model: str  # hub name, folder, or .gguf file
    data: str  # named set, hub data set, .jsonl or .parquet file, or tiny
    out: str = ""  # folder of the results; default runs/eval-MODEL-DATA-HOW
    samples: int = 32  # samples a problem
    limit: int | None = None  # only so many problems, the first
    tool: bool = True  # the policy may call the Python tool
    both: bool = False  # with the tool and then without, from the same weights
    temperature: float = 1.0  # 0 = the most likely token, with samples 1
    top_p: float = 0.6  # share of the probability that is sampled from
    max_new_tokens: int = 20480  # tokens after the prompt, those of tool results included
    max_turns: int = 16  # turns of the policy; a call in the last one is not run
    seed: int = 0  # of the samples
    dtype: str = ""  # of compute: float32 or bfloat16; empty: float32 on CPU, bfloat16 on GPU
    tool_name: str = "python"  # what the model calls the tool by; code_interpreter for the paper's models
    tool_seconds: float = 30.0  # wall clock of a tool call
    tool_memory: int = 2048  # MB of each process of a tool call
    tool_chars: int = 256  # characters of a tool's output that the policy sees
    tool_workers: int | None = None  # programs at once on a rank; default: its share of the cores, at least 2
    sandbox: str = "namespaces"  # of the tool; "bwrap": the same inside bubblewrap, which hides your files
    chunk: int = 16  # problems sampled together, then written
    max_rows: int = 64  # trajectories that decode together on a rank
    cache_tokens: int | None = None  # tokens of a rank's KV cache; none: what max_rows need and memory allows
    stall: float = 300.0  # seconds without a token or a tool's answer, after which a rank ends the job
    as_published: bool = False  # also best@k and maj@k as the published scripts bootstrap them


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that k of n samples, drawn without replacement, hold a right one when c are right:
    1 - C(n-c,k) / C(n,k), unbiased (arXiv 2107.03374, eq. 1). ValueError unless 0 <= c <= n, 1 <= k <= n."""
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {n} samples, {c} right: needs 1 <= k <= {n} and 0 <= right <= {n}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def majority_at_k(answers: list[str | None], correct: list[bool]) -> float:
    """Score of the answer that most of the k samples give.

    Answers that same_answer calls equal vote together and score the mean of their voters' marks. Ties share,
    and votes are sorted, so the order of samples has no say. None never wins over an answer; all None is 0.
    """
    if len(answers) != len(correct):
        raise ValueError(f"{len(answers)} answers but {len(correct)} marks")
    groups = {}  # spelling -> marks of its voters
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "is no mathematics" is said of golds, and these are not
        for answer, mark in sorted((a, m) for a, m in zip(answers, correct) if a is not None):
            same = (spelling for spelling in groups if math_equal.same_answer(spelling, answer))
            groups.setdefault(next(same, answer), []).append(mark)
    most = max(map(len, groups.values()), default=0)
    winners = [sum(votes) / most for votes in groups.values() if len(votes) == most]
    return sum(winners) / len(winners) if winners else 0.0


def published_bootstrap(answers: list, correct: list[bool], k: int) -> tuple[float, float]:
    """(best@k, maj@k) of the published scripts: k samples drawn WITH replacement, 1000 times, seed 42.

    best@k expects 1 - (1 - c/n)^k, below pass@k. maj@k: the first of the most common texts, "none" is one.
    """
    random, best, majority = np.random.RandomState(42), 0.0, 0.0
    for _ in range(1000):
        drawn = random.choice(len(correct), size=k, replace=True)
        winner = Counter(answers[i] for i in drawn).most_common(1)[0][0]
        best += max(correct[i] for i in drawn)
        majority += next(correct[i] for i in drawn if answers[i] == winner)
    return best / 1000, majority / 1000


def summarize(rows: list[dict], samples: int, as_published: bool = False) -> dict:
    """The table of one condition: every problem with all its samples, none left out of a denominator."""
    rows = sorted(rows, key=lambda row: (row["problem"], row["sample"]))
    names = "family kind correct finish calls ran policy_tokens tool_tokens seconds".split()
    of = {name: np.array([row[name] for row in rows]) for name in names}
    marks = of["correct"].reshape(-1, samples).tolist()
    said = [[row["prediction"] for row in rows[i : i + samples]] for i in range(0, len(rows), samples)]
    powers = {2**i for i in range(samples.bit_length())}
    ks = sorted(powers | {samples} | ({5} if samples >= 5 else set()))  # 5: as LiveCodeBench reports
    table = {"problems": len(marks)} | dict(zip((f"avg@{samples}", "low", "high"), mean_interval(marks)))
    table |= {f"pass@{k}": np.mean([pass_at_k(samples, sum(m), k) for m in marks]) for k in ks}
    if "code" not in of["kind"]:  # programs do not vote
        table[f"maj@{samples}"] = np.mean([majority_at_k(a, m) for a, m in zip(said, marks)])
    table |= {
        "no_answer": np.mean([row["prediction"] is None for row in rows]),
        "truncated/length": np.mean(of["finish"] == "length"),
        "truncated/turns": np.mean(of["finish"] == "turns"),
        "tool/used": np.mean(of["calls"] > 0),
        "tool/calls": np.mean(of["calls"]),  # a sample
        "tool/success": of["ran"].sum() / of["calls"].sum() if any(of["calls"]) else None,  # of the calls
        "tokens/policy": np.mean(of["policy_tokens"]),  # a sample
        "tokens/tool": np.mean(of["tool_tokens"]),
        "seconds": np.sum(of["seconds"]),
    }
    for family in sorted(set(of["family"])):
        table[f"avg/{family}"] = np.mean(of["correct"][of["family"] == family])
    for k in ks[1:] if as_published else []:
        pairs = [published_bootstrap(a, m, k) for a, m in zip(said, marks)]
        table[f"published/best@{k}"], table[f"published/maj@{k}"] = np.mean(pairs, axis=0)
    return table


def print_table(title: str, table: dict) -> None:
    notes = {"avg@": f"   95 % [{table['low']:.3f}, {table['high']:.3f}], clustered by problem",
             "maj@": "   equal answers vote together, ties share, no answer never wins"}  # fmt: skip
    print(f"\n{title}")
    for key in (key for key in table if key not in ("low", "high")):
        text = f"{table[key]:.3f}" if isinstance(table[key], float) else str(table[key] or "-")
        print(f"  {key:20} {text}{notes.get(key[:4], '')}")


def merge(out: Path) -> list[dict]:
    """Every sample of the folder, of all ranks and from before a kill, into samples.jsonl: sorted, once."""
    found = [row for file in sorted(out.glob("samples*.jsonl")) for row in read_rows(file)]
    # of two rows the one that was there first stays
    unique = {(not row["tool"], row["problem"], row["sample"]): row for row in reversed(found)}
    rows = [unique[key] for key in sorted(unique)]
    write_rows(out / "samples.jsonl", rows)
    for file in out.glob("samples.rank*.jsonl"):
        file.unlink()
    return rows


def open_folder(out: Path, cfg: Config, problems: dict[bool, list[Problem]], model, device: str) -> dict:
    """Begin a folder, or go on in one; ValueError if it was begun under other conditions, which are returned:
    all that the numbers depend on, the content of problems and weights included."""
    # these change no sample
    free = "out stall chunk max_rows cache_tokens tool_workers sandbox as_published".split()
    content = {}
    for tool, some in problems.items():
        content["problems_tool" if tool else "problems_plain"] = [asdict(p) for p in some]
    conditions = {
        **{name: value for name, value in vars(cfg).items() if name not in free},
        "sha256_weights": weights_digest(model)[:16],
        **{f"sha256_{k}": digest(v)[:16] for k, v in content.items()},
        **{name: str(sys.modules[name].__version__) for name in ("torch", "transformers")},
        "problems": len(some),
        "device": "cpu" if device == "cpu" else torch.cuda.get_device_name(),
        "python": sys.version.split()[0],
    }
    file = out / "config.json"
    begun = json.loads(file.read_text()) if file.exists() else conditions
    if "sha256_weights" not in begun or (not file.exists() and out.exists() and any(out.iterdir())):
        raise ValueError(f"{out} holds files but no config.json of an evaluation; give another --out")
    if not any(read_rows(samples) for samples in out.glob("samples*.jsonl")):
        begun = conditions  # no sample was made under the others
    for key in (k for k in begun | conditions if begun.get(k) != conditions.get(k)):
        was, now = begun.get(key), conditions.get(key)
        raise ValueError(f"{out} was begun with {key} {was!r}, and now it is {now!r}; give another --out")
    out.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(conditions, indent=1))
    return conditions


def grade(problem: Problem, t: Trajectory, tokenizer, tool: PythonTool) -> dict:
    """A row of samples.jsonl."""
    response = t.answer(tokenizer)
    extract = {"math": reward.final_box, "choice": reward.extract_choice, "code": reward.extract_program}
    return {
        "problem": t.prompt_index, "sample": t.sample_index, "id": problem.id, "family": problem.family,
        "kind": problem.kind, "answer": problem.answer if problem.kind != "code" else None,
        "prediction": extract[problem.kind](response),
        "correct": reward.outcome(problem.kind, response, problem.answer, tool),
        "finish": t.finish,
        "calls": len(t.tool_results), "ran": sum(result.status == "ok" for result in t.tool_results),
        "policy_tokens": sum(t.mask), "tool_tokens": len(t.ids) - t.prompt_len - sum(t.mask),
        "text": tokenizer.decode(t.ids[t.prompt_len :]),
    }  # fmt: skip


def sample(cfg: Config, model, tokenizer, problems, with_tool: bool, missing: list[int], file: Path) -> None:
    """Sample the missing problems; a chunk of them is graded and appended to the file at once."""
    math_equal.counts.clear()
    # no more programs than cores: waiting for one, a program would come to its limit of time
    workers = cfg.tool_workers or max(2, share_of_cores(dist.get_world_size()))
    limits = (workers, cfg.tool_seconds, cfg.tool_memory, cfg.tool_chars, cfg.sandbox, cfg.tool_name)
    with PythonTool(*limits) as tool, ThreadPoolExecutor() as threads:
        described = [tool.schema] if with_tool and cfg.data != "tiny" else None  # tiny: bare questions
        prompts = {i: encode_prompt(tokenizer, problems[i].messages, described) for i in missing}
        longest, context = max(map(len, prompts.values())), model.config.max_position_embeddings
        if longest >= context:
            fail(f"the longest prompt has {longest} tokens, the context of {cfg.model} only {context}")
        if longest + cfg.max_new_tokens > context:
            print(f"the context of {context} leaves {context - longest} tokens after the longest prompt, "
                  f"not {cfg.max_new_tokens}", flush=True)  # fmt: skip
        most = min(longest + cfg.max_new_tokens, context)
        sampler = Sampler(model, tokenizer, cfg.max_rows, most, cfg.cache_tokens)
        law = (cfg.samples, cfg.max_turns, cfg.max_new_tokens, cfg.temperature, cfg.top_p)
        tools, began, right = {tool.name: tool} if with_tool else {}, time.perf_counter(), 0
        for at in range(0, len(missing), cfg.chunk):
            chunk, start = missing[at : at + cfg.chunk], time.perf_counter()
            with watched(sampler, max(cfg.stall, cfg.tool_seconds + 60)):
                found = run_agent(
                    sampler, [prompts[i] for i in chunk], tools, *law, seed=cfg.seed, indices=chunk
                )
            rows = list(threads.map(lambda t: grade(problems[t.prompt_index], t, tokenizer, tool), found))
            seconds = (time.perf_counter() - start) / len(rows)
            rows = [{"tool": with_tool, **row, "seconds": seconds} for row in rows]
            with open(file, "a") as lines:
                lines.writelines(json.dumps(row) + "\n" for row in rows)
            right, ready = right + sum(row["correct"] for row in rows), at + len(chunk)
            left = clock((time.perf_counter() - began) / ready * (len(missing) - ready))
            print(f"{file.stem}, {'tool' if with_tool else 'no tool'}: {ready}/{len(missing)} problems, "
                  f"{right / ready / cfg.samples:.3f} right, {left} left", flush=True)  # fmt: skip
        math_equal.print_counts(file.stem)


def main(argv: list[str] | None = None) -> None:
    cfg = parse_args(Config, argv)
    rank, ranks, device = init_process_group()
    whole = [name for name, value in vars(cfg).items() if type(value) is int and name != "seed"]
    kinds = {"dtype": ("", "float32", "bfloat16")}
    check_values(cfg, " ".join([*whole, "tool_seconds", "top_p", "stall"]), "temperature", kinds)
    try:
        if cfg.top_p > 1:
            raise ValueError(f"--top_p {cfg.top_p}: take a share, at most 1")
        if cfg.both and not cfg.tool:
            raise ValueError("--both and --no-tool contradict each other; leave one out")
        if cfg.temperature == 0 and cfg.samples > 1:
            raise ValueError(f"--temperature 0 would give {cfg.samples} times the same sample; --samples 1?")
        cfg.dtype = str(compute_dtype(cfg.dtype, device)).removeprefix("torch.")
        bubblewrap(cfg.sandbox)
        problems = {}
        for tool in [True, False] if cfg.both else [cfg.tool]:
            built_in = tiny.problems("test", cfg.limit or 200) if cfg.data == "tiny" else None
            problems[tool] = built_in or load_problems(cfg.data, tool, cfg.limit)
        model, tokenizer = load(cfg.model, getattr(torch, cfg.dtype), device)
        name = "-".join(
            p for p in Path(cfg.model).parts[-4:] if p not in ("/", "runs", "checkpoints", "model")
        )
        how = "both" if cfg.both else "tool" if cfg.tool else "plain"
        out = Path(cfg.out or f"runs/eval-{name}-{Path(cfg.data).stem}-{how}")
        if out.is_file():
            raise ValueError(f"--out {out} is a file; give a folder")
        if rank == 0:
            make_folder(out)
            conditions = open_folder(out, cfg, problems, model, device)
            merge(out)
    except ValueError as error:
        fail(str(error))
    dist.barrier()
    with open(out / "samples.jsonl") as lines:
        done = Counter((row["tool"], row["problem"]) for row in map(json.loads, lines))
    for tool, some in problems.items():
        missing = [i for i in range(rank, len(some), ranks) if done[tool, i] < cfg.samples]
        try:
            if missing:
                sample(cfg, model, tokenizer, some, tool, missing, out / f"samples.rank{rank}.jsonl")
        except ValueError as error:  # no chat template, a cache that is too small
            fail(str(error))
    dist.barrier()
    if rank == 0:
        rows, summary = merge(out), {"conditions": conditions}
        for tool in problems:
            title = "with the tool" if tool else "without the tool"
            summary[title] = summarize([r for r in rows if r["tool"] == tool], cfg.samples, cfg.as_published)
            print_table(f"{cfg.model} on {cfg.data}, {title}", summary[title])
        write_whole(out / "summary.json", json.dumps(summary, indent=1))
        print("", *(f"{key}={value} " for key, value in conditions.items()), f"\n{out / 'summary.json'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    run_script(main)
