"""What a run measures: every number's definition, its curves, and the paper's observations beside it.

A step of training is one JSON object in runs/NAME/metrics.jsonl; PANELS says what its numbers are, for this
file's curves.png, for the page (report.py) and for whoever reads the file. Leaves out: statistics over seeds
and samples (evaluate.py). To copy into another project: this file; curves.png needs matplotlib.
"""

import fnmatch
import json
import math
import sys
from pathlib import Path

# fmt: off
PANELS = [  # title, unit, keys of metrics.jsonl (* stands for any ending), what they are; the first eight make curves.png
    ("Right answers", "share", "eval/correct reward/correct", "Share of problems answered right: held out, with the 95 % interval, and in the training batch."),
    ("Right answers by family", "share", "eval/correct/*", "Share of held-out problems answered right, by family."),
    ("Tool used", "share", "tool/used eval/tool_used", "Share of trajectories with a tool call."),
    ("Calls that ran", "share", "tool/success tool/repaired", "Share of calls that ran without error; of trajectories where one that ran follows one that failed."),
    ("Length", "", "length/policy_tokens length/tool_tokens", "Mean tokens of a trajectory after the prompt, by who wrote them."),
    ("Entropy", "", "policy/entropy", "Mean entropy (nats) of the next token, over policy tokens."),
    ("Gradient norm", "", "policy/grad_norm grad_norm", "Norm of the gradient before clipping."),
    ("Clip fractions", "", "policy/clip_high policy/clip_low policy/dual", "Share of policy tokens whose gradient a bound of the loss takes away."),
    ("Batch by family", "share", "correct/*", "Share of the training batch answered right, by family."),
    ("Reward", "", "reward/mean reward/tool reward/overlong", "Mean reward of a trajectory, and its shaping parts."),
    ("Tool calls", "", "tool/calls", "Mean number of tool calls in a trajectory."),
    ("Calls that ran, held out", "share", "eval/tool_success eval/tool_repaired", "The same as in training, on held-out problems."),
    ("Truncated", "share", "length/truncated", "Share of trajectories stopped by a limit of length or turns."),
    ("Loss", "", "policy/loss", "The loss minimised, terms for KL and entropy included; it need not fall."),
    ("Cold start: loss", "", "loss", "Cross-entropy of the batch's policy tokens, nats a token."),
    ("Cold start: learning rate", "", "lr", "Learning rate of the step."),
    ("Cold start: tokens", "", "tokens", "Tokens of the batch, prompts and tool results included."),
    ("Distance to other policies", "", "policy/kl_old policy/kl_ref", "Mean KL estimate of a policy token: to the old policy of the ratio, and to the one that training began with."),
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


def is_number(x: object) -> bool:
    return isinstance(x, (int, float)) and math.isfinite(x)


def say(what: str) -> None:
    print(f"{Path(sys.argv[0]).name}: {what}", file=sys.stderr)


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
    out = []
    for title, unit, patterns, text in PANELS:
        if keys := [k for x in patterns.split() for k in fnmatch.filter(logged, x)]:
            out.append({"title": title, "unit": unit, "text": text, "keys": keys})
    known = {k for panel in out for k in panel["keys"]}
    text = "Logged by this run; this page has no word on it."
    return out + [{"title": k, "unit": "", "text": text, "keys": [k]} for k in logged if k not in known]


def observations(rows: list[dict]) -> list[tuple]:
    """(what, arXiv 2510.11701 on it, our rule, this run's numbers or None, shown: True, False or None) each.

    a → b are means over the first and the last fifth of the rows that have the keys (at least one row); of right
    answers the first and the last evaluation.
    """

    def ends(*keys: str, value=lambda x: x, rows=rows) -> tuple[float, float] | None:
        v = [value(*(r[k] for k in keys)) for r in rows if all(k in r for k in keys)]
        n = max(1, len(v) // 5)
        return (sum(v[:n]) / n, sum(v[-n:]) / n) if len(v) > 1 else None

    def percent(pair: tuple[float, float]) -> str:
        return f"{100 * pair[0]:.3g} % → {100 * pair[1]:.3g} %"

    keys = ("eval/correct", "eval/low", "eval/high")
    right = [[100 * r[k] for k in keys] for r in rows if all(k in r for k in keys)]
    right = [right[0], right[-1]] if len(right) > 1 else None
    used, ran, entropy = ends("tool/used"), ends("tool/success"), ends("policy/entropy")
    calls = [
        {**r, "each": r["tool/calls"] / r["tool/used"]}
        for r in rows
        if r.get("tool/used") and "tool/calls" in r
    ]
    calls = ends("each", rows=calls)
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
                    x, colour = [r["step"] for r in rows], f"C{i if many else j}"
                    dash = ["-", ":", "--", "-."][many * j % 4]
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
