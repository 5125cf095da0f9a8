"""The paper's observations on a laptop: each as arms of the laptop run, three seeds, one table (2510.11701).

    python bench/claims.py                       # every claim; two runs side by side, a few minutes each
    python bench/claims.py clip recipe           # these; --seeds 0 1 2 --steps 20 --out runs/claims
    python bench/claims.py --tables              # only the tables and figures of what has been run

An arm is the laptop run of grpo.py with other options or in another small world: another scripted teacher, or
other problems to train on. Half a million weights and five families of sums are not a language model: where
an effect of the paper does not show here, the table says so. A run that is complete is not repeated.
"""

import argparse
import fcntl
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # not bench/, whose kernels.py would hide kernels/

# ---- small worlds: other teachers; usual: that of tiny.py. They return (question, [(words, program)]) ------


def stitched(tiny, usual, rng):
    """A worked solution with one step replaced by a call, as in data stitched from chains of thought: nothing
    fails, nothing is repaired, and what follows from the call's output is left to the head."""
    _, question, assignment, expression, answer = tiny.draw(rng, test=False)
    step = {"a ** b % c": "a ** b", "a * b % c": "a * b", "bin(a ** b).count('1')": "a ** b"}
    step |= {"sum(map(int, str(a * b * c)))": "a * b * c"}
    program = f"{assignment}print({step.get(expression, 'b - a')})"
    return question, [(tiny.RUN, program), (f"So the answer is \\boxed{{{answer}}}.", "")]


def scarce(tiny, usual, rng):
    """The usual teacher, who in two of three conversations guesses instead of calling."""
    call = rng.random() < 1 / 3
    while True:
        question, turns = usual(rng)
        if (len(turns) > 1) == call:
            return question, turns


def rambling(tiny, usual, rng):
    """The usual teacher, who in half of the conversations talks on before the answer, up to 100 tokens."""
    question, turns = usual(rng)
    if rng.random() < 0.5:
        turns[-1] = ("Let me think about it once more. " * rng.randint(2, 11) + turns[-1][0], "")
    return question, turns


def deliberative(tiny, usual, rng):
    """Says what is to be computed, then calls once, mostly with the right program."""
    _, question, assignment, expression, _ = tiny.draw(rng, test=False)
    program = expression if rng.random() < 0.6 else expression.replace("**", "*") + ")"
    thought = f"First the numbers, then {expression}. {tiny.RUN}"
    return question, [(thought, f"{assignment}print({program})"), (tiny.ANSWER, "")]


def reactive(tiny, usual, rng):
    """Calls at once and often: trials that fail or compute a part, until one is right or none is left."""
    _, question, assignment, expression, _ = tiny.draw(rng, test=False)
    trials = [expression + ")", "a", "x + " + expression, "a * b"]
    programs = [rng.choice(trials) for _ in range(rng.randint(0, 2))]
    programs.append(expression if rng.random() < 0.6 else rng.choice(trials))
    return question, [*((tiny.RUN, f"{assignment}print({p})") for p in programs), (tiny.ANSWER, "")]


WORLDS = {w.__name__: w for w in (stitched, scarce, rambling, deliberative, reactive)}

# ---- the arms ----------------------------------------------------------------------------------------------

# claim: (what the paper saw, {arm: (world, problems to train on, changed settings)})
CLIP = dict(mini_batches=8, old_logp="trainer")
CLAIMS = {
    "cold start": (
        "Qwen3-4B on AIME 2025 after the cold start: 29.8 % by real end-to-end data, 3.7 % by stitched",
        {"real": ("", "", {}), "stitched": ("stitched", "", {})},
    ),
    "recipe": (
        "GRPO-TCR and GRPO-SCR above GRPO-T (68.1 to 40.9 on AIME 2025), which TCR reaches in a quarter of "
        "the steps; token mean above sequence mean by 4 points on 4B, equal on 7B",
        {
            "grpo-tcr": ("", "", {}),
            "grpo-t": ("", "", dict(clip_high=0.2, overlong_buffer=0, kl=1e-3)),
            "grpo-scr": ("", "", dict(ratio="sequence", loss_mean="sequence", clip_low=3e-4, clip_high=4e-4)),
        },
    ),
    "clip": (
        "a higher upper bound explores more and learns faster, up to a point: 0.315 beats 0.28 on 7B, "
        "0.35 ends lower on 4B",
        {str(bound): ("scarce", "", dict(CLIP, clip_high=bound)) for bound in (0.2, 0.28, 0.315, 0.35, 1e9)},
    ),
    "diversity": (
        "mixed problems pass 50 % after 150 steps, those of one source after 220, and keep entropy higher",
        {"five families": ("", "", {}), "one family": ("", "one", {})},
    ),
    "model-aware": (
        "problems that the policy sometimes solves lift a weak model off the ground, all of them do not (7B)",
        {"everything": ("scarce", "", {}), "sometimes right": ("scarce", "aware", {})},
    ),
    "overlong": (
        "a penalty that rises over the last tokens keeps answers inside the limit",
        {"shaping": ("rambling", "", dict(overlong_buffer=60)),
         "none": ("rambling", "", dict(overlong_buffer=0))},
    ),
    "modes": (
        "deliberative policies call less, over 70 % of their calls run, and end higher than reactive ones",
        {"deliberative": ("deliberative", "", {}), "reactive": ("reactive", "", {})},
    ),
}  # fmt: skip


def run_arm(out: Path, world: str, problems: str, settings: dict, seed: int, steps: int) -> None:
    """One run, in a process of its own: the cold start of its world, if none is there, then grpo.main."""
    import grpo
    import sft
    import tiny
    from options import parse_args

    if world:
        usual = tiny.script
        tiny.script = lambda rng: WORLDS[world](tiny, usual, rng)
    cold = out.parent / f"cold-{world or 'plain'}-{seed}"
    grpo.net.init_process_group()
    with (out.parent / f"{cold.name}.lock").open("w") as lock:  # runs of one world begin at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not cold.exists():
            sft.run(sft.Config(**sft.PRESETS["tiny"] | dict(out=str(cold), seed=seed)))
    if problems:
        everything = tiny.problems

        def some(split="test", n=256, seed=0):
            if split != "train":
                return everything(split, n, seed)
            if problems == "one":
                return [p for p in everything(split, 12 * n, seed) if p.family == "prodmod"][:n]
            return [pool[(i + seed * n) % len(pool)] for i in range(n)]

        pool = [] if problems == "one" else sometimes_right(cold, everything("train", 1024, seed=seed))
        tiny.problems = some
    config = parse_args(grpo.Config, [], presets=grpo.PRESETS)
    config = replace(
        config, model=str(cold), out=str(out), seed=seed, steps=steps, eval_every=4, show_every=0, **settings
    )
    grpo.main(config)


def sometimes_right(cold: Path, problems: list) -> list:
    """Those that the cold-started policy solves in some of 8 samples, not in none and not in all."""
    import grpo
    from episodes import Agents
    from options import parse_args
    from tools import PythonTool

    config = parse_args(grpo.Config, [], presets=grpo.PRESETS)
    grpo.net.set_threads(config.threads, 1)
    with PythonTool(4, config.tool_seconds, config.tool_memory, config.tool_chars) as tool:
        episodes = Agents(*grpo.net.load(str(cold)), tool, config).sample(problems, 8, seed=2**41)
    right = [sum(e["correct"] for e in episodes[8 * i : 8 * i + 8]) for i in range(len(problems))]
    return [p for p, n in zip(problems, right) if 0 < n < 8]


# ---- tables and figures ------------------------------------------------------------------------------------


def rows(out: Path, steps: int) -> list[dict]:
    file = out / "metrics.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [row for row in found if row["step"] <= steps]


def whole(found: list[dict], steps: int) -> bool:
    return bool(found) and found[-1]["step"] >= steps and "eval/correct" in found[-1]


def finished(claim: str, arm: str, out: Path, seeds: list[int], steps: int) -> list[list[dict]]:
    """The rows of each seed's run of an arm, of those that came to their end."""
    found = [rows(out / name(claim, arm, seed), steps) for seed in seeds]
    return [run for run in found if whole(run, steps)]


def table(claim: str, arms: dict, out: Path, seeds: list[int], steps: int) -> None:
    """One line an arm: means over the seeds, and the seeds' range in brackets."""
    print(f"\n### {claim}\n\nPaper: {CLAIMS[claim][0]}.\n")
    print("| arm | seeds | right before | after | half right at step | tool used, calls | calls that ran "
          "| tokens, cut off | mean entropy |\n" + "|---" * 9 + "|")  # fmt: skip
    for arm in arms:
        runs = finished(claim, arm, out, seeds, steps)
        if not runs:
            continue

        def spread(value, digits=2, runs=runs):
            found = [value(r) for r in runs]
            low, middle, high = (f"{f(found):.{digits}f}" for f in (min, mean, max))
            return f"{middle} ({low} to {high})" if low != high else middle

        def at(r, key):
            return [row[key] for row in r if key in row]

        ran = [r for r in runs if "tool/success" in r[-1]]  # missing where nothing was called

        half = [next((row["step"] for row in r if row.get("eval/correct", 0) >= 0.5), None) for r in runs]
        print(
            f"| {arm} | {len(runs)} | {spread(lambda r: at(r, 'eval/correct')[0])} "
            f"| **{spread(lambda r: at(r, 'eval/correct')[-1])}** "
            f"| {', '.join('never' if h is None else str(h) for h in half)} "
            f"| {spread(lambda r: r[-1]['tool/used'])}, {spread(lambda r: r[-1]['tool/calls'], 1)} "
            f"| {spread(lambda r: r[-1]['tool/success'], runs=ran) if ran else '–'} "
            f"| {spread(lambda r: r[-1]['length/policy_tokens'], 0)}, "
            f"{spread(lambda r: r[-1]['length/truncated'])} "
            f"| {spread(lambda r: mean(at(r, 'policy/entropy')), 3)} |"
        )


def figure(out: Path, seeds: list[int], file: Path, steps: int) -> None:
    """Right answers on unseen problems by step, one panel a claim: the mean, and each seed as a thin line."""
    from matplotlib.figure import Figure

    fig = Figure(figsize=(14, 6.4))
    axes = fig.subplots(2, 4, sharey=True)
    for ax, (claim, (_, arms)) in zip(axes.flat, CLAIMS.items()):
        for i, arm in enumerate(arms):
            runs = finished(claim, arm, out, seeds, steps)
            curves = [
                [(row["step"], row["eval/correct"]) for row in r if "eval/correct" in row] for r in runs
            ]
            if curves:
                x, y = [p[0] for p in curves[0]], list(zip(*[[p[1] for p in c] for c in curves]))
                ax.plot(
                    x, [mean(v) for v in y], color=f"C{i}", label="no bound" if arm == "1000000000.0" else arm
                )
                for curve in curves:
                    ax.plot(x, [p[1] for p in curve], color=f"C{i}", alpha=0.35, lw=0.8)
        ax.set_title(claim)
        ax.set_xlabel("step")
        ax.grid(alpha=0.3)
        if ax.lines:
            ax.legend(fontsize=8)
    axes[0, 0].set_ylabel("right on unseen problems")
    axes[1, 0].set_ylabel("right on unseen problems")
    for ax in axes.flat[len(CLAIMS) :]:
        ax.axis("off")
    fig.tight_layout()
    fig.savefig(file, dpi=80)
    print(f"\nfigure: {file}")


def name(claim: str, arm: str, seed: int) -> str:
    """Folder of a run; the plain laptop run is an arm of several claims, and run once."""
    world, problems, settings = CLAIMS[claim][1][arm]
    if not (world or problems or settings):
        return f"plain-{seed}"
    return f"{claim}-{arm}-{seed}".replace(" ", "-")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [[], *CLAIMS]  # [] is what argparse checks where none is given
    parser.add_argument(
        "names", nargs="*", choices=names, metavar="CLAIM", help=f"{', '.join(CLAIMS)}; none: all"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20, help="steps of an arm")
    parser.add_argument("--out", type=Path, default=Path("runs/claims"))
    parser.add_argument("--side-by-side", type=int, default=2, help="runs at the same time, one thread each")
    parser.add_argument("--tables", action="store_true", help="run nothing")
    parser.add_argument(
        "--arm", nargs=3, help=argparse.SUPPRESS
    )  # claim, arm, seed: one run, in this process
    args = parser.parse_args()
    if args.arm:
        claim, arm, seed = args.arm
        run_arm(args.out / name(claim, arm, int(seed)), *CLAIMS[claim][1][arm], int(seed), args.steps)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    claims = {c: arms for c, (_, arms) in CLAIMS.items() if c in (args.names or CLAIMS)}
    jobs = {name(c, arm, s): (c, arm, s) for s in args.seeds for c, arms in claims.items() for arm in arms}

    def run(folder: str) -> None:
        if whole(rows(args.out / folder, args.steps), args.steps):
            return
        arm = [str(x) for x in jobs[folder]]
        where = ["--out", str(args.out), "--steps", str(args.steps)]
        command = [sys.executable, __file__, *where, "--arm", *arm]
        with (args.out / f"{folder}.log").open("a") as log:
            code = subprocess.run(
                command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
            ).returncode
        print(f"{folder}: {'done' if code == 0 else f'exit code {code}, see {log.name}'}", flush=True)

    if not args.tables:
        # one seed after another: the first run of a world makes the cold start that the others share
        for seed in args.seeds:
            mine = [folder for folder, (_, _, s) in jobs.items() if s == seed]
            with ThreadPoolExecutor(args.side_by_side) as threads:
                list(threads.map(run, mine))
    for claim, arms in claims.items():
        table(claim, arms, args.out, args.seeds, args.steps)
    figure(args.out, args.seeds, args.out / "claims.png", args.steps)


if __name__ == "__main__":
    main()
