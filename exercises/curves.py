"""The picture of each exercise: the core with its fault beside the core without, same seed, same command.

    python exercises/curves.py [NAME]       about half an hour on one core for all, 2 to 5 minutes for one

Copies of the core and their runs stand in runs/exercises/curves/ and are used again; delete that folder after
a change of the core.
"""

import hashlib
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from matplotlib.figure import Figure
from start import CORE, HERE, NAMES, chosen, copy_core

WORK = CORE / "runs" / "exercises" / "curves"
COLD = "sft.py --preset tiny --seed 0 --out cold"
RUN = "grpo.py --model ./cold --seed 0 --eval_every 0 --show_every 0 --out OUT "
LONG, ROWS = RUN + "--steps 8", RUN + "--steps 3 --tokens_per_row "
TAUGHT = (
    f"sft.py --preset tiny --seed 0 --teacher 4000 --out short && {RUN.replace('cold', 'short')}--steps 2"
)
SHY = TAUGHT.replace("4000", "4000 --tokens_per_row 100").replace("short", "rows")
LONG_TURNS = "--steps 12 --max_turns 8 --max_new_tokens 400 --batch 128 --mini_batches 8"
WEAK = TAUGHT.replace("4000", "2500").replace("short", "weak").replace("--steps 2", LONG_TURNS)
TESTED = (
    "evaluate.py --model ./cold --data tiny --limit 64 --samples 8 --top_p 1 --max_new_tokens 150 --out OUT"
)
# what is run, with and without the fault (several commands: each is a line), and what is plotted
CURVES = {
    "head-start": ([LONG], ["reward/correct", "sampler/gap_mean"]),
    "false-memory": ([RUN + "--steps 6"], ["sampler/gap_mean", "reward/correct"]),
    "flat-line": ([LONG], ["policy/grad_norm", "reward/correct"]),
    "foreign-words": ([LONG], ["length/tool_tokens", "sampler/gap_mean"]),
    "kept-pushing": ([RUN + "--steps 10 --mini_batches 16"], ["policy/entropy", "reward/correct"]),
    "long-goodbye": ([TAUGHT.replace("steps 2", "steps 6")], ["length/truncated", "length/policy_tokens"]),
    "many-calls": ([WEAK], ["tool/calls", "tool/success", "reward/correct"]),
    "negative-distance": ([RUN + "--kl 0.001 --kl_estimator k1 --steps 5"], ["policy/kl_ref"]),
    "never-ends": ([TAUGHT], ["length/truncated", "tool/used"]),
    "shy-student": ([SHY], ["tool/used", "length/policy_tokens"]),
    "two-machines": ([ROWS + "16384", ROWS + "200"], ["policy/loss", "policy/grad_norm"]),
    "unfair-credit": ([LONG], ["sum of a group's advantages, step 1", "reward/correct"]),
    "unlucky-pass": ([TESTED], ["pass@k, 64 problems, 8 samples"]),
}


def copy_of_core(name: str | None) -> Path:
    """A copy with the fault (None: without one), and the cold start that all share."""
    folder = WORK / (name or "right")
    if not folder.exists():
        copy_core(folder, name)
    if not (folder / "cold").exists():
        if name:
            (folder / "cold").symlink_to(copy_of_core(None) / "cold")
        else:
            run(folder, COLD)
    return folder


def run(folder: Path, command: str) -> None:
    print(f"{folder.name}: {command}", flush=True)
    with open(folder / "log.txt", "a") as log:
        subprocess.run([sys.executable, *command.split()], cwd=folder, stdout=log, stderr=log, check=True)


def points(name: str | None, command: str, key: str) -> tuple[str, list, list]:
    """(name of x, x, y) of what is plotted; the command is run in the copy with that fault (None: none)."""
    folder = copy_of_core(name)
    out = folder / "runs" / hashlib.sha256(command.encode()).hexdigest()[:8]  # the same run is made once
    if not (out / "done").exists():
        for part in command.replace("OUT", str(out)).split(" && "):
            made = part.startswith("sft.py") and (folder / part.split()[-1]).exists()
            if not made:
                run(folder, part)
        (out / "done").touch()
    if key.startswith("pass@k"):
        table = json.loads((out / "summary.json").read_text())["with the tool"]
        return "k", *zip(*((int(k[5:]), v) for k, v in table.items() if k.startswith("pass@")))
    if key.startswith("sum of"):
        sums = defaultdict(float)
        for line in open(out / "trajectories" / "step_000001.jsonl"):
            episode = json.loads(line)
            sums[episode["prompt_index"]] += episode["advantage"]
        return "group", range(len(sums)), sorted(sums.values())
    rows = [json.loads(line) for line in open(out / "metrics.jsonl")]
    return "step", [row["step"] for row in rows], [row[key] for row in rows]


def picture(name: str) -> None:
    commands, keys = CURVES[name]
    figure = Figure(figsize=(3.6 * len(keys), 2.6), dpi=80, layout="constrained")
    for axes, key in zip(figure.subplots(1, len(keys), squeeze=False)[0], keys):
        for fault, label, colour in [(None, "right", "tab:blue"), (name, "wrong", "tab:red")]:
            for command, style in zip(commands, ["o-", "s--"]):
                option = f" {command.split()[-1]}" * (len(commands) > 1)
                axis, x, y = points(fault, command, key)
                axes.plot(x, y, style, color=colour, label=label + option, markersize=3)
        axes.set(title=key, xlabel=axis, yscale="log" if key == "sampler/gap_mean" else "linear")
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    figure.savefig(HERE / name / "curve.png")
    print(HERE / name / "curve.png")


if __name__ == "__main__":
    for each in [chosen(sys.argv[1])] if sys.argv[1:] else NAMES:
        picture(each)
