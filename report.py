"""One HTML page of a run: its curves, its trajectories token by token, and what the paper saw.

    python report.py runs/NAME                writes runs/NAME/report.html
    python report.py runs/NAME runs/OTHER     the same, with the curves of several runs laid over each other
    python report.py runs/NAME --png          also writes runs/NAME/curves.png (needs matplotlib)
    python report.py --follow runs/NAME       live view of a running run in the terminal

The page opens from disk and asks the network for nothing. To stay under 5 MB it holds all metrics.jsonl but a
choice of trajectories: five steps, and in each the groups whose rewards differ most. What a model or a tool
wrote is data: it enters the page as JSON, the document as text nodes, and no script but the page's may run.
Leaves out: statistics over seeds and samples (evaluate.py). To copy it: take report_page.html and terminal.py
along, write a run's files as grpo.py does; it needs tokenizers, and tool_calls.py to find the code of a call.
"""

import argparse
import base64
import fnmatch
import hashlib
import html
import json
import math
import os
import sys
import time
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from tokenizers import Tokenizer

from terminal import FOLLOWED, live, obeys, view
from tool_calls import parse_tool_calls

# fmt: off
PANELS = [  # title, unit, keys of metrics.jsonl (* stands for any ending), what they are; the first eight make curves.png
    ("Right answers", "share", "eval/correct reward/correct", "Share of problems answered right: held out, with the 95 % interval, and in the training batch."),
    ("Right answers by family", "share", "eval/correct/*", "Share of held-out problems answered right, by family."),
    ("Tool used", "share", "tool/used eval/tool_used", "Share of trajectories with a tool call."),
    ("Calls that ran", "share", "tool/success tool/repaired", "Share of calls that ran without error; of trajectories where one that ran follows one that failed."),
    ("Length", "", "length/policy_tokens length/tool_tokens", "Mean tokens of a trajectory after the prompt, by who wrote them."),
    ("Entropy", "", "policy/entropy", "Mean entropy (nats) of the next token, over policy tokens."),
    ("Gradient norm", "", "policy/grad_norm", "Norm of the gradient before clipping."),
    ("Clip fractions", "", "policy/clip_high policy/clip_low policy/dual", "Share of policy tokens whose gradient a bound of the loss takes away."),
    ("Batch by family", "share", "correct/*", "Share of the training batch answered right, by family."),
    ("Reward", "", "reward/mean reward/tool reward/overlong", "Mean reward of a trajectory, and its shaping parts."),
    ("Tool calls", "", "tool/calls", "Mean number of tool calls in a trajectory."),
    ("Calls that ran, held out", "share", "eval/tool_success eval/tool_repaired", "The same as in training, on held-out problems."),
    ("Truncated", "share", "length/truncated", "Share of trajectories stopped by a limit of length or turns."),
    ("Loss", "", "policy/loss", "Mean clipped loss of a policy token; it need not fall."),
    ("Distance to other policies", "", "policy/kl_old policy/kl_ref", "Mean KL estimate of a policy token: to the policy that sampled, and to the one that training began with."),
    ("Sampler/trainer gap", "", "sampler/gap_max sampler/gap_mean", "Difference of a token's log-prob between sampler and trainer under the same weights."),
    ("Groups without signal", "share", "group/zero_variance", "Share of groups whose rewards are all equal."),
    ("Groups replaced", "", "group/resampled", "Number of groups of equal rewards for which other problems were sampled (--resample)."),
    ("Time of a step", "", "time/step time/rollout time/reward time/train", "Seconds of a step and its parts."),
    ("Time of the rollout", "", "time/prefill time/decode time/sampling time/tool_wait time/idle_slots", "Seconds of the rollout's parts: prompts and tool results read, tokens computed and drawn, waiting for tools; and of the first two, what free places in the batch took."),
    ("Tool seconds", "", "tool/seconds", "Mean seconds that a tool call takes."),
    ("Speed", "", "speed/tokens_per_s", "Tokens of trajectories, the tool's included, in a second of rollout."),
]
# fmt: on
BAND = {"eval/correct": ["eval/low", "eval/high"]}
TOKENS_IN_PAGE = 80_000  # about 3 MB


def is_number(x: object) -> bool:
    return isinstance(x, (int, float)) and math.isfinite(x)


def say(what: str) -> None:
    print(f"report.py: {what}", file=sys.stderr)


def read_jsonl(path: Path) -> list[dict]:
    """The objects of a file of lines; says which are broken, but for a last one still being written."""
    rows, lines = [], path.read_bytes().split(b"\n") if path.is_file() else []
    for i, line in enumerate(lines, 1):
        try:  # NaN is no JSON, browsers refuse it
            rows.append(dict(json.loads(line, parse_constant=lambda _: None)))
        except (ValueError, TypeError):
            if line.strip() and i < len(lines):
                say(f"line {i} of {path} is broken and left out")
    return rows


def read_run(folder: str) -> dict:
    """{name, folder, config, rows}; rows: one dict of finite numbers a step, in the order of steps."""
    path, steps, config = Path(folder), {}, {}
    if not (path / "metrics.jsonl").is_file() and not (path / "config.json").is_file():
        say(f"{folder} is not a run: it holds neither metrics.jsonl nor config.json")
        raise SystemExit(2)
    try:
        config = dict(json.loads((path / "config.json").read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        say(f"steps and settings of {folder} are not known, for config.json cannot be read ({error})")
    config |= config.pop("config", {})  # grpo.py keeps its fields apart from versions and command
    for row in read_jsonl(path / "metrics.jsonl"):
        if is_number(row.get("step")):  # a resumed run repeats steps: the later line counts
            steps.setdefault(int(row["step"]), {}).update({k: v for k, v in row.items() if is_number(v)})
    rows = [steps[s] for s in sorted(steps)]
    return {"name": path.resolve().name, "folder": path, "config": config, "rows": rows}


def panels(runs: list[dict]) -> list[dict]:
    """The panels that have data; a key that no panel knows gets its own at the end."""
    logged = sorted({k for run in runs for row in run["rows"] for k in row} - {"step", *BAND["eval/correct"]})
    known = {k for panel in PANELS for x in panel[2].split() for k in fnmatch.filter(logged, x)}
    other = [(k, "", k, "Logged by this run; this page has no word on it.") for k in logged if k not in known]
    out = []
    for title, unit, patterns, text in PANELS + other:
        if keys := [k for x in patterns.split() for k in fnmatch.filter(logged, x)]:
            out.append({"title": title, "unit": unit, "text": text, "keys": keys})
    return out


def observations(rows: list[dict]) -> list[tuple]:
    """(what, arXiv 2510.11701 on it, our rule, this run's numbers or None, shown: True, False or None) each.

    a → b are means over the first and the last fifth of the rows that have the keys (at least one row).
    """

    def ends(*keys: str, value=lambda x: x) -> tuple[float, float] | None:
        v = [value(*(r[k] for k in keys)) for r in rows if all(k in r for k in keys)]
        n = max(1, len(v) // 5)
        return (sum(v[:n]) / n, sum(v[-n:]) / n) if len(v) > 1 else None

    def percent(pair: tuple[float, float]) -> str:
        return f"{100 * pair[0]:.3g} % → {100 * pair[1]:.3g} %"

    keys = ("eval/correct", "eval/low", "eval/high")
    right = [[100 * r[k] for k in keys] for r in rows if all(k in r for k in keys)]
    right = [right[0], right[-1]] if len(right) > 1 else None
    used, ran, entropy = ends("tool/used"), ends("tool/success"), ends("policy/entropy")
    calls = ends("tool/calls", "tool/used", value=lambda calls, used: calls / used if used else 0.0)
    turn = ends("length/policy_tokens", "tool/calls", value=lambda tokens, calls: tokens / (calls + 1))
    high, low = ends("policy/clip_high"), ends("policy/clip_low")
    # fmt: off
    return [
        ("Right answers rise", "A 4B model goes from 33 to 71 % on AIME 2024, from 30 to 68 % on 2025.", "the first and the last 95 % interval on held-out problems do not touch",
         right and "held out " + " → ".join("{:.3g} % ({:.3g} to {:.3g})".format(*r) for r in right), right and right[1][1] > right[0][2]),
        ("The tool stays in use", "A model made for long thoughts stops calling its tool during training.", "the share of trajectories with a call ends at no less than half of its beginning",
         used and f"trajectories with a call {percent(used)}", used and 0 < used[0] / 2 <= used[1]),
        ("Most calls run", "In deliberative policies, the better ones, more than 70 % of calls run.", "more than 70 % run at the end",
         ran and f"calls that ran {percent(ran)}", ran and ran[1] > 0.7),
        ("Fewer and better calls", "Deliberative policies call less often, with more success.", "calls of a trajectory that calls at all fall, and the share that runs rises",
         calls and ran and f"calls of one {calls[0]:.2f} → {calls[1]:.2f}, ran {percent(ran)}", calls and ran and calls[1] < calls[0] and ran[1] > ran[0]),
        ("More thought in each round", "Deliberative policies write more before they call.", "policy tokens a turn rise",
         turn and f"policy tokens a turn {turn[0]:.1f} → {turn[1]:.1f}", turn and turn[1] > turn[0]),
        ("Entropy stays in a band", "A tight clip with KL lets entropy collapse, a wide one overshoots.", "it ends between a quarter of and four times its beginning",
         entropy and f"entropy {entropy[0]:.3g} → {entropy[1]:.3g} nats", entropy and entropy[0] / 4 <= entropy[1] <= 4 * entropy[0]),
        ("Clip-higher acts", "An upper bound of 0.315 brings a 7B model in 60 steps where 0.28 takes 100.", "a policy token in a thousand is clipped at the upper bound, at the beginning or the end",
         high and low and f"clipped at the upper bound {percent(high)}, at the lower {percent(low)}", high and low and max(high) >= 1e-3),
    ]
    # fmt: on


def pieces(ids: list[int], decode, cache: dict[int, str]) -> list[str]:
    """The text of each token; a character spread over tokens stands at the last, the others get ''."""
    texts, held = [], []
    for i in ids:
        text = cache[i] = cache[i] if i in cache else decode([i])
        if held or "\ufffd" in text:
            held.append(i)
            text = decode(held)
            if text.endswith("\ufffd") and len(held) < 4:  # no character has more than four bytes
                text = ""
            else:
                held = []
        texts.append(text)
    return texts


def trajectory(row: dict, tokens) -> dict:
    """A trajectory for the page: segments by who wrote them, tool calls, and the numbers of policy tokens.

    tokens(ids) -> (their places in the page's table of tokens, text)
    """
    ids, mask, start = row["ids"], row["mask"], row["prompt_len"]
    results, codes, segments = list(row.get("tool_results") or []), [], []
    parts = groupby(zip(mask[start:], ids[start:], strict=True), key=itemgetter(0))
    parts = [("policy" if m else "tool", [i for _, i in part]) for m, part in parts]
    # the last one takes results that the policy never saw
    for by, part in [("prompt", ids[:start]), *parts, ("tool", [])]:
        numbers, text = tokens(part)
        calls = []
        if by == "policy":
            codes = [c.arguments.get("code") or c.error for c in parse_tool_calls(text)]
        elif by == "tool":  # one result for each call of the turn before
            n = max(1, len(codes)) if part else len(results)
            calls, results = [dict(r, code=c) for r, c in zip(results[:n], codes + [None] * n)], results[n:]
        if part or calls or by == "prompt":
            segments.append({"by": by, "tokens": numbers, "calls": calls})

    def policy(values: list | None, digits: int = 4) -> list | None:
        if not values or len(values) != len(ids):
            return None
        return [float(f"{v:.{digits}g}") if is_number(v) else None for v, m in zip(values, mask) if m]

    both = zip(row.get("old_logprobs") or [], row["logprobs"])
    gap = [a - b if is_number(a) and is_number(b) else None for a, b in both]
    keep = ("sample_index", "correct", "reward", "reward_parts", "advantage", "finish")
    numbers = {k: policy(row.get(k)) for k in ("entropy", "ratio")}
    numbers |= {"logp": policy(row["logprobs"]), "gap": policy(gap, 2)}
    return {k: row.get(k) for k in keep} | numbers | {"segments": segments}


def chosen_trajectories(run: dict) -> dict:
    """{groups: [{step, family, answer, rows}], pieces: [(id, text)]}; up to TOKENS_IN_PAGE tokens.

    Of a group the four best and four worst or, where these do not fit, the best and the worst; best first.
    """
    found, candidates, table, cache, left = [], [], {}, {}, TOKENS_IN_PAGE
    file, tokenizer = run["folder"] / "tokenizer" / "tokenizer.json", None
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing more special
        say(f"tokens are shown as numbers, for {file} cannot be read ({error})")

    def decode(ids: list[int]) -> str:
        text = tokenizer.decode(ids, skip_special_tokens=False) if tokenizer else ""
        if text[:1] != " " and tokenizer and (tokenizer.id_to_token(ids[0]) or "").startswith("▁"):
            text = " " + text  # a decoder of the Llama 2 kind drops the space of a first word
        return text or "".join(f"⟨{i}⟩" for i in ids)

    def tokens(ids: list[int]) -> tuple[list[int], str]:
        texts = pieces(ids, decode, cache)
        return [table.setdefault(piece, len(table)) for piece in zip(ids, texts)], "".join(texts)

    paths = sorted((run["folder"] / "trajectories").glob("step_" + "[0-9]" * 6 + ".jsonl"))
    evenly = {round(i * (len(paths) - 1) / 4) for i in range(5)}  # the first, the last, and three between
    for path in (path for i, path in enumerate(paths) if i in evenly):
        rows, groups = read_jsonl(path), {}
        for row in rows:
            if is_number(row.get("reward")) and isinstance(row.get("ids"), list):
                groups.setdefault(str(row.get("prompt_index")), []).append(row)
        if lost := len(rows) - sum(map(len, groups.values())):
            say(f"{lost} trajectories of {path} lack ids or a reward and are left out")
        ranked = [sorted(g, key=lambda r: -r["reward"]) for g in groups.values()]
        ranked.sort(key=lambda g: g[-1]["reward"] - g[0]["reward"])
        candidates += [(rank, int(path.stem[5:]), g) for rank, g in enumerate(ranked[:4])]
    candidates.sort(key=itemgetter(0))  # each step's first group before any second
    for rank, step, group in candidates:
        group = group if len(group) <= 8 else group[:4] + group[-4:]
        if sum(len(r["ids"]) for r in group) > left:
            group = group[:1] + group[1:][-1:]
        if (size := sum(len(r["ids"]) for r in group)) > left:
            continue
        try:
            shown = {"step": step, "family": group[0].get("family"), "answer": group[0].get("answer")}
            found.append((step, rank, shown | {"rows": [trajectory(r, tokens) for r in group]}))
            left -= size
        except Exception as error:  # whatever is wrong in the file, the page does without this group
            say(f"a group of step {step} is left out ({error!r})")
    return {"groups": [g for *_, g in sorted(found, key=itemgetter(0, 1))], "pieces": list(table)}


def write_page(runs: list[dict]) -> Path:
    """Writes report.html in the first run's folder, whole or not at all, and returns its path."""
    config, data = runs[0]["config"], chosen_trajectories(runs[0])
    data |= {"panels": panels(runs), "band": BAND, "paper": observations(runs[0]["rows"]), "runs": []}
    for run in runs:
        rows = [{k: float(f"{v:.5g}") for k, v in row.items()} for row in run["rows"]]
        data["runs"].append({"name": run["name"], "rows": rows})
    bounds = [config.get("clip_low"), config.get("clip_high")]
    data["clip"] = bounds if all(map(is_number, bounds)) else [0.2, 0.28]
    data |= {"dual": config.get("dual_clip") or 0, "sequence": config.get("ratio") == "sequence"}
    done = max((r["step"] for r in runs[0]["rows"]), default=0)
    about = {"step": f"{done} of {config.get('steps', '?')}"}
    about |= {k: config.get(k) for k in ("preset", "model", "seed")}
    about |= {"command": " ".join(map(str, config.get("command") or []))}
    data["about"] = " · ".join(f"{k} {v}" for k, v in about.items() if v not in (None, ""))
    text = json.dumps(data, separators=(",", ":"))  # ASCII: line separators and lone surrogates are escaped
    for c in "<>&":  # no text may end the script element or open a comment
        text = text.replace(c, f"\\u{ord(c):04x}")
    head, tail = Path(__file__).with_name("report_page.html").read_text(encoding="utf-8").split("@DATA")
    script = tail.split("<script>")[1].split("</script>")[0]  # the page's policy names it by its hash
    sha = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    head = head.replace("@SHA", sha).replace("@NAME", html.escape(runs[0]["name"]))
    path = runs[0]["folder"] / "report.html"
    path.with_suffix(".part").write_text(head + text + tail, encoding="utf-8", errors="replace")
    os.replace(path.with_suffix(".part"), path)
    return path


def write_png(runs: list[dict]) -> Path:
    """Writes curves.png, the first eight of PANELS, in the first run's folder and returns its path."""
    from matplotlib import style
    from matplotlib.figure import Figure

    found, many = {panel["title"]: panel for panel in panels(runs)}, len(runs) > 1
    with style.context(["tableau-colorblind10", {"axes.spines.top": False, "axes.spines.right": False}]):
        figure = Figure(figsize=(13.5, 5.8), layout="constrained", dpi=150)
        for axis, (title, unit, *_) in zip(figure.subplots(2, 4).flat, PANELS):
            keys = found.get(title, {"keys": []})["keys"]
            for i, run in enumerate(runs):
                for j, key in enumerate(keys):
                    rows = [r for r in run["rows"] if key in r]
                    x, colour, dash = [r["step"] for r in rows], f"C{i if many else j}", "-:"[many and j % 2]
                    label = f"{run['name']} {key}" if many else key
                    axis.plot(x, [r[key] for r in rows], dash, color=colour, label=label, marker=".")
                    if key in BAND and all(k in r for r in rows for k in BAND[key]):
                        low, high = ([r[k] for r in rows] for k in BAND[key])
                        axis.fill_between(x, low, high, color=colour, alpha=0.18, lw=0)
            axis.set_title(title, loc="left", fontsize=10, fontweight="bold")
            axis.set_ylim(-0.02 if unit else 0, 1.02 if unit else None)
            axis.tick_params(labelsize=8)
            axis.grid(alpha=0.25)
            if keys:
                axis.legend(frameon=False, fontsize=7.5, labelspacing=0.3)
            else:
                axis.text(0.5, 0.5, "not logged", transform=axis.transAxes, ha="center")
        figure.supxlabel("training step", fontsize=9)
        figure.savefig(path := runs[0]["folder"] / "curves.png")
    return path


def follow(folder: str) -> None:
    """Shows a run while it is written, until it ends: a line a step, and on a terminal the live view below."""

    def reads():
        ended = False
        while not ended:
            run = read_run(folder)
            steps = run["config"].get("steps")
            steps = steps if is_number(steps) else None
            yield run["rows"], steps
            ended = run["rows"] and steps and run["rows"][-1]["step"] >= steps
            time.sleep(0 if ended else 1)

    printed = -1
    for seen in live(reads(), lambda item, _, columns: view(*item, columns)):
        for row in [r for r in seen[0] if r["step"] > printed]:
            printed, numbers = row["step"], [f"{t} {row[k]:.3f}" for k, t in FOLLOWED.items() if k in row]
            print(f"step {printed}", *numbers, sep="  ", flush=True)
    if obeys():
        print(*view(*seen, 80), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="One HTML page of a run.")
    parser.add_argument("runs", nargs="+", metavar="runs/NAME", help="runs; the first gets the page")
    parser.add_argument("--png", action="store_true", help="also write curves.png")
    parser.add_argument("--follow", action="store_true", help="only show the first run live in the terminal")
    args = parser.parse_args()
    try:
        if args.follow:
            return follow(args.runs[0])
        runs = [read_run(folder) for folder in args.runs]
        for write in [write_page, write_png][: 1 + args.png]:
            print(f"wrote {write(runs)}")
    except (OSError, ImportError) as error:
        raise SystemExit(f"report.py: {error}") from None
    except KeyboardInterrupt:
        return


if __name__ == "__main__":
    main()
