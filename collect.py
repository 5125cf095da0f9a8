"""Problems of the right difficulty, and tool-use trajectories to start from, out of a policy's own rollouts.

    python collect.py filter  --model M --data D --out DIR    # DIR/problems/, for grpo.py
    python collect.py collect --model M --data D --out DIR    # DIR/conversations.jsonl, for sft.py
    python collect.py stitch  --data openai/gsm8k:main:train --out DIR

filter and collect roll out --samples episodes of each problem with the real tool and keep them in
DIR/rollouts.jsonl: a run that was stopped goes on there, and one command does not sample what the other has.
--model is the policy itself, or a teacher. Both are from arXiv 2510.11701: problems that are neither too easy
nor too hard for the policy that trains on them, and cold starts on real end-to-end trajectories. stitch makes
the counterpart that it found worse: the worked solutions of GSM8K, each calculation of which, <<48/2=24>>, is
replaced by a call that is really run.

Left out: ranking trajectories by a reward model, resampling one policy's set to the histogram of another's.
"""

import json
import math
import re
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, fields, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import torch.distributed as dist

import math_equal
import policy as net
import tiny
from chat import encode_prompt
from config import Config as RunConfig
from data import Problem, load_rows
from episodes import Agents, fitting
from options import check_values, fail, parse_args
from run import digest, make_folder, open_run, read_rows, run_script, weights_digest, write_rows, write_whole
from sampling import random_key
from terminal import clock
from tool_calls import mismatch, parse_tool_calls
from tools import PythonTool


@dataclass
class Config:
    data: str  # problems: hub name, .jsonl, .parquet, a folder, a set that data.py knows, or tiny
    out: str  # folder of what is made; an interrupted run in it is continued
    model: str = ""  # hub name, folder or .gguf file of the policy that rolls out, or of a teacher
    limit: int | None = None  # only so many problems, the first
    samples: int = 8  # episodes a problem
    keep: int = 2  # collect: at most so many conversations a problem
    easy: float = 0.75  # filter: pass rates from here to below 1 are easy
    hard: float = 0.25  # filter: pass rates above 0 to here are hard; those between are medium
    seed: int = 0  # of the episodes
    chunk: int = 64  # problems sampled together, then written
    max_prompt: int = 2560  # tokens of a prompt; problems with a longer one are left out
    max_new_tokens: int = 20480  # tokens after the prompt, the tool's text included
    max_turns: int = 16  # turns of the policy; a call in the last one is not run
    temperature: float = 1.0  # of sampling
    describe_tool: bool = True  # the prompt describes the tool
    tool_name: str = "python"  # what the model calls the tool by; code_interpreter for the paper's models
    tool_seconds: float = 30.0  # wall clock of a tool call
    tool_memory: int = 2048  # MB of each process of a tool call
    tool_chars: int = 256  # characters of a tool's output that the policy sees
    max_rows: int = 128  # trajectories that decode together on a rank
    cache_tokens: int | None = None  # tokens of a rank's KV cache; none: what max_rows need and memory allows
    dtype: str = ""  # of compute: float32 or bfloat16; empty: float32 on CPU, bfloat16 on GPU
    stall: float = 300.0  # seconds without a token or a tool's answer, after which a rank ends the job
    threads: int = 0  # CPU threads of torch; 0: all cores, shared among the ranks


# ---- rollouts ----------------------------------------------------------------------------------------------


def conversation(episode: dict, problem: Problem, tokenizer, tool_name: str = "python") -> dict | None:
    """A right episode as messages, for training; None for one that had better not be imitated: a call that
    could not be run, text behind a call, no call that ran, an end by length. Programs that raise and are
    repaired stay: so recovery is learned."""
    results = episode["tool_results"]
    if not episode["correct"] or episode["finish"] != "stop" or all(r["status"] != "ok" for r in results):
        return None
    messages, outputs, programs = list(problem.messages), [r["output"] for r in results], []
    written = zip(episode["ids"][episode["prompt_len"] :], episode["mask"][episode["prompt_len"] :])
    for policy, turn in groupby(written, key=itemgetter(1)):
        if not policy:
            continue
        text = tokenizer.decode([token for token, _ in turn][:-1])  # without the token that ends the turn
        if "</think>" in text and "<think>" not in text:
            text = "<think>\n" + text  # the prompt had opened it
        calls = parse_tool_calls(text)
        thought, end, answer = text.rpartition("</think>")
        wrong = [c.error or mismatch(c.name, c.arguments, PythonTool.parameters) for c in calls]
        if any(wrong) or any(call.name != tool_name for call in calls):
            return None
        if re.search(r"</tool_call>(?!\s*(<tool_call>|\Z))", answer):
            return None
        message = {"role": "assistant", "content": text}
        if calls:
            message["content"] = (thought + end + answer.partition("<tool_call>")[0]).rstrip()
            said = [{"name": call.name, "arguments": call.arguments} for call in calls]
            message["tool_calls"] = [{"type": "function", "function": call} for call in said]
            programs += said
        messages.append(message)
        messages += [{"role": "tool", "content": outputs.pop(0), "name": call.name} for call in calls]
    return {"messages": messages, "programs": json.dumps(programs)}


def roll_out(config: Config, rows, out: Path) -> tuple[list, list[dict]]:
    """(rows with a prompt that is not too long, what was rolled out on each), the latter a line each of
    out/rollouts.jsonl: {"problem": number, "id", "sha256", "correct": [of each episode], "calls": how many,
    "ran": of these, "conversations"}."""
    rank, ranks, device = net.init_process_group()
    workers = max(2, net.set_threads(config.threads, ranks))
    model, tokenizer = net.load(config.model, net.compute_dtype(config.dtype, device), device)
    may_change = {"out", "limit", "keep", "easy", "hard", "max_rows", "cache_tokens", "stall", "threads"}
    open_run(out, {**asdict(config), "sha256_weights": weights_digest(model)}, may_change)
    schema = [PythonTool.described(config.tool_name)] if config.describe_tool else None
    fit = fitting(rows, [len(encode_prompt(tokenizer, r[1].messages, schema)) for r in rows], config, model)
    file = out / "rollouts.jsonl"
    lines = read_rows(file)
    stored = {row["problem"]: row for row in lines}
    digests = [digest(asdict(problem)) for _, problem in fit]
    for i, (_, problem) in enumerate(fit):
        if i in stored and stored[i]["sha256"] != digests[i]:
            fail(f"{file} is of another --data: its problem {i} is not {problem.id}; give another --out")
    dist.barrier()
    if rank == 0:
        write_rows(file, lines)
    chunks = [range(at, min(at + config.chunk, len(fit))) for at in range(0, len(fit), config.chunk)]
    missing = [chunk for chunk in chunks if not stored.keys() >= set(chunk)]
    names = {field.name for field in fields(RunConfig)}
    settings = {k: v for k, v in asdict(config).items() if k in names}
    settings["stall"] = max(config.stall, config.tool_seconds + 60)
    settings = RunConfig(**settings, overlong_buffer=0)
    began = time.perf_counter()
    limits = (workers, config.tool_seconds, config.tool_memory, config.tool_chars)
    with PythonTool(*limits, name=config.tool_name) as tool:
        agents = Agents(model, tokenizer, tool, settings)
        for done, chunk in enumerate(missing, 1):  # sampled whole or not at all: its first makes its seed
            problems = [fit[i][1] for i in chunk]
            found = [[] for _ in chunk]
            for episode in agents.sample(problems, config.samples, random_key(config.seed, chunk[0])):
                found[episode["prompt_index"]].append(episode)
            for i, problem, episodes in zip(chunk, problems, found):
                ran = [result["status"] == "ok" for e in episodes for result in e["tool_results"]]
                said = [conversation(e, problem, tokenizer, config.tool_name) for e in episodes]
                stored[i] = {"problem": i, "id": problem.id, "sha256": digests[i]}
                stored[i] |= {"correct": [e["correct"] for e in episodes], "calls": len(ran), "ran": sum(ran)}
                stored[i]["conversations"] = list(filter(None, said))
            if rank == 0:
                with file.open("a") as f:
                    f.writelines(json.dumps(stored[i]) + "\n" for i in chunk)
                left = clock((time.perf_counter() - began) / done * (len(missing) - done))
                right = sum(sum(stored[i]["correct"]) for i in chunk) / len(chunk) / config.samples
                print(f"{done}/{len(missing)} chunks of problems, {right:.3f} right, {left} left", flush=True)
    math_equal.print_counts(f"rank {rank}")
    return fit, [stored[i] for i in range(len(fit))]


def filter_problems(config: Config, rows, rolled: list[dict], out: Path) -> None:
    """Write the rows that some but not all episodes solve, by pass rate, with columns pass_rate, difficulty.

        easy: rate >= 0.75   medium: between   hard: rate <= 0.25         (arXiv 2510.11701, section 4)

    Groups of which all or none are right have advantage 0: nothing can be learned from them.
    """
    kept = {"easy": [], "medium": [], "hard": []}
    rates = [sum(row["correct"]) / len(row["correct"]) for row in rolled]
    for (row, problem), rate in zip(rows, rates):
        if 0 < rate < 1:
            difficulty = "easy" if rate >= config.easy else "hard" if rate <= config.hard else "medium"
            row = {"id": problem.id, "family": problem.family, **row}
            kept[difficulty].append({**row, "pass_rate": rate, "difficulty": difficulty})
    (out / "problems").mkdir(exist_ok=True)
    for difficulty, some in kept.items():
        write_rows(out / "problems" / f"{difficulty}.jsonl", some)
    bins = Counter(sum(row["correct"]) for row in rolled)
    histogram = {f"{n}/{config.samples}": bins[n] for n in range(config.samples + 1)}
    table = {"problems": len(rows), **{k: len(v) for k, v in kept.items()}, "right episodes": histogram}
    write_whole(out / "histogram.json", json.dumps(table, indent=1) + "\n")
    for name, n in histogram.items():
        print(f"{name:>6} right {n:6d} {'#' * round(50 * n / max(histogram.values()))}")
    print(", ".join(f"{len(v)} {k}" for k, v in kept.items()), f"in {out / 'problems'}")


def collect(config: Config, rows, rolled: list[dict], out: Path) -> None:
    """Write right episodes as conversations: no two of a problem with the same programs, at most `keep`."""
    tools = [PythonTool.described(config.tool_name)] if config.describe_tool else None
    found, right, usable = [], 0, 0
    for row, (_, problem) in zip(rolled, rows):
        different = {c["programs"]: c["messages"] for c in reversed(row["conversations"])}
        right, usable = right + sum(row["correct"]), usable + len(row["conversations"])
        for messages in list(reversed(different.values()))[: config.keep]:
            found.append({"messages": messages, "tools": tools, "id": problem.id, "family": problem.family})
    write_rows(out / "conversations.jsonl", found)
    calls, ran = (sum(row[key] for row in rolled) for key in ("calls", "ran"))
    episodes = len(rolled) * config.samples
    print(f"{episodes} episodes, {calls} calls, {ran} ran; {right} right, {usable} of these "
          f"fit to be imitated; {len(found)} conversations in {out / 'conversations.jsonl'}")  # fmt: skip


# ---- stitched: worked solutions with calls in the place of their calculations ------------------------------

CALCULATION = re.compile(r"<<([^<>=]+)=([^<>]*)>>")


def stitch(rows, tool: PythonTool) -> tuple[list[dict], Counter]:
    """(conversations, why others were left out: how many) of rows whose answer is a solution as GSM8K has it:
    "Natalia sold 48/2 = <<48/2=24>>24 clips in May. [...]\\n#### 72"."""
    found, left_out, plans = [], Counter(), []
    for row, problem in rows:
        text, *rest = CALCULATION.split(str(row.get("answer")).rsplit("####", 1)[0])
        expressions, values, texts = rest[::3], rest[1::3], [text, *rest[2::3]]
        if not expressions:
            left_out["no calculation"] += 1
        elif not all(re.fullmatch(r"[\d\s.+*/()-]+", e) for e in expressions):
            left_out["not plain arithmetic"] += 1
        else:
            programs = [f"print({e.strip()})" for e in expressions]
            plans.append((problem, programs, values, texts, [tool.submit(p) for p in programs]))
    for problem, programs, values, texts, futures in plans:
        results = [future.result() for future in futures]
        try:
            shown = [float(result.output) for result in results]
            said = [float(value.replace(",", "")) for value in values]
            right = all(math.isclose(a, b, rel_tol=0.01) for a, b in zip(shown, said))
        except ValueError:
            right = False
        if not right:
            left_out["Python finds another value"] += 1
            continue
        messages = list(problem.messages)
        for text, program, result in zip(texts, programs, results):
            content = text.strip().rstrip("$= ")
            call = {"type": "function", "function": {"name": tool.name, "arguments": {"code": program}}}
            messages.append({"role": "assistant", "content": content, "tool_calls": [call]})
            messages.append({"role": "tool", "content": result.output, "name": tool.name})
        last = f"{texts[-1].strip()}\nThe answer is \\boxed{{{problem.answer}}}."
        messages.append({"role": "assistant", "content": last.strip()})
        found.append({"messages": messages, "tools": [tool.schema], "id": problem.id})
    return found, left_out


def main(argv: list[str]) -> None:
    what, *argv = argv or [""]
    what = what.lstrip("-")
    if what not in ("filter", "collect", "stitch", "help"):
        fail("say first what to make: filter, collect or stitch; --help shows the options")
    c = parse_args(Config, ["--help"] if what == "help" else argv)
    counts = "samples keep chunk max_prompt max_new_tokens max_turns temperature max_rows tool_seconds "
    counts += "tool_memory tool_chars stall"
    counts += "".join(f" {k}" for k in ("limit", "cache_tokens") if getattr(c, k) is not None)
    check_values(c, counts, "threads", {"dtype": ("", "float32", "bfloat16")})
    if not 0 <= c.hard < c.easy <= 1:
        fail(f"--hard {c.hard} --easy {c.easy}: take shares of right episodes, the first below the second")
    if not c.model and what != "stitch":
        fail(f"--model says who rolls out: python collect.py {what} --model M --data D --out DIR")
    try:
        if c.data == "tiny":  # bare questions, as the built-in model knows them
            c = replace(c, describe_tool=False)
            rows = [({"problem": p.messages[0]["content"], "answer": p.answer, "as_is": True}, p)
                    for p in tiny.problems("train", c.limit or 256, c.seed)]  # fmt: skip
        else:
            rows = load_rows(c.data, limit=c.limit)
    except ValueError as error:
        fail(str(error))
    out = Path(c.out)
    if what == "stitch":
        if (file := out / "conversations.jsonl").exists():
            fail(f"{file} exists already; give another --out, or delete it")
        make_folder(out)
        with PythonTool(None, c.tool_seconds, c.tool_memory, c.tool_chars, name=c.tool_name) as tool:
            found, left_out = stitch(rows, tool)
        write_rows(file, found)
        print(f"{len(found)} conversations in {file}", end="")
        print("".join(f", {n} left out ({why})" for why, n in left_out.items()))
        return
    try:
        fit, rolled = roll_out(c, rows, out)
    except ValueError as error:
        fail(str(error))
    if dist.get_rank() == 0:
        (filter_problems if what == "filter" else collect)(c, fit, rolled, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_script(main, sys.argv[1:])
