"""Kill a run at random moments, give its command again each time, and compare with an undisturbed run.

    python bench/resume.py --kills 20
    python bench/resume.py --kills 10 --ranks 2 --seed 1

The run is a small one of grpo.py with the real tool, a checkpoint after every step. A kill is SIGKILL for the
whole job or, with several ranks, now and then for one rank only. Compared bit for bit: every number of
metrics.jsonl and of every trajectory but those that a clock said, and every file of the last checkpoints.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # the comparison is one process
ROOT = Path(__file__).resolve().parent.parent
OPTIONS = """--model cold --batch 32 --group 4 --eval_problems 16 --eval_every 3 --save_every 1 --show_every 0
--threads 1 --tool_seconds 60 --deterministic"""


def command(ranks: int, steps: int, out: str) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] * (ranks > 1)
    return [sys.executable, *launcher, str(ROOT / "grpo.py"), *OPTIONS.split(), "--steps", str(steps),
            "--out", out]  # fmt: skip


def ranks_of(job: int) -> list[int]:
    """The processes whose parent is `job`: under torchrun its ranks."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == job:
                found.append(int(stat.parent.name))
        except OSError:  # it has just ended
            pass
    return found


def alive(pid: int) -> bool:
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())  # a zombie has none
    except OSError:
        return False


def kill(job: subprocess.Popen, only: int | None) -> str:
    """SIGKILL for the job's processes, or for one of its ranks if that has begun (torchrun then ends the
    others); whom it hit."""
    ranks = ranks_of(job.pid)
    if only is None or only >= len(ranks):
        only = None
        job.kill()
    for pid in ranks if only is None else [ranks[only]]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    job.wait()
    while any(map(alive, ranks)):
        time.sleep(0.05)
    return "the job" if only is None else "one rank"


def without_clocks(found):
    if isinstance(found, dict):
        return {k: without_clocks(v) for k, v in found.items() if not re.search("^time/|^speed/|seconds$", k)}
    return [without_clocks(item) for item in found] if isinstance(found, list) else found


def content(out: Path) -> dict:
    """{file: what is in it}, without what must differ: clocks, the command, the marks that torch's archives
    carry of the moment in which they were made."""
    found = {}
    for file in [out / "metrics.jsonl", *out.glob("trajectories/*")]:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        found[str(file.relative_to(out))] = [json.dumps(without_clocks(line)) for line in lines]
    for file in [*out.glob("tokenizer/*"), *out.glob("checkpoints/*/model/*")]:
        found[str(file.relative_to(out))] = file.read_bytes()
    for folder in out.glob("checkpoints/*/state"):
        kinds = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        shapes = {key: kind for key, kind in kinds.items() if hasattr(kind, "size")}
        tensors = {key: torch.empty(k.size, dtype=k.properties.dtype) for key, k in shapes.items()}
        tensors |= dict.fromkeys(kinds.keys() - shapes.keys())
        dcp.load(tensors, checkpoint_id=folder, no_dist=True)
        for key, value in tensors.items():
            bits = value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value)
            found[f"{folder.relative_to(out)}: {key}"] = bits
    return found


def compare(one: Path, other: Path) -> None:
    right, found = content(one), content(other)
    differ = [name for name in right.keys() | found.keys() if right.get(name) != found.get(name)]
    if differ:
        raise SystemExit(f"NOT the same: {', '.join(sorted(differ)[:10])}")
    left = [str(p) for p in other.rglob("*.part*")]
    if left:
        raise SystemExit(f"left over: {', '.join(left)}")
    print(f"the same, bit for bit: {len(right)} files and tensors", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--kills", type=int, default=20, help="number of kills")
    parser.add_argument("--ranks", type=int, default=1, help="processes of the run")
    parser.add_argument("--steps", type=int, default=6, help="training steps of the run")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        straight, killed, said = folder / "straight", folder / "killed", folder / "said.txt"

        def start(line: list[str]) -> subprocess.Popen:
            with said.open("w") as file:
                return subprocess.Popen(line, cwd=folder, env=env, stdout=file, stderr=file)

        def end(job: subprocess.Popen) -> None:
            if job.wait() and "is complete" not in said.read_text():  # killed after its last checkpoint
                raise SystemExit(said.read_text()[-3000:])

        cold = "--preset tiny --teacher 300 --threads 1 --out cold"
        end(start([sys.executable, str(ROOT / "sft.py"), *cold.split()]))
        began = time.monotonic()
        end(start(command(args.ranks, args.steps, "straight")))
        length = time.monotonic() - began
        print(f"undisturbed: {args.steps} steps, {args.ranks} rank(s), {length:.1f} s", flush=True)
        kills = saving = whole = 0
        while kills < args.kills:
            job = start(command(args.ranks, args.steps, "killed"))
            if rng.random() < 0.5:  # at any moment
                moment = time.monotonic() + rng.uniform(0, length)
                while job.poll() is None and time.monotonic() < moment:
                    time.sleep(0.001)
            else:  # in one of the next checkpoints
                for _ in range(rng.randint(1, 2)):
                    while job.poll() is None and not list(killed.glob("checkpoints/*.part")):
                        time.sleep(0.001)
                    time.sleep(rng.uniform(0, 0.06 * args.ranks))
            if job.poll() is None:
                only = rng.choice([None, None, *range(args.ranks)]) if args.ranks > 1 else None
                whom = kill(job, only)
                kills += 1
                part = bool(list(killed.glob("checkpoints/*.part")))
                saving += part
                found = ["no checkpoint", *sorted(p.name for p in killed.glob("checkpoints/step_??????"))]
                print(f"kill {kills}: {whom}, {found[-1]}{', while saving' * part}", flush=True)
            else:  # it came to its end before: compared, and from the start again
                end(job)
                compare(straight, killed)
                shutil.rmtree(killed)
                whole += 1
        end(start(command(args.ranks, args.steps, "killed")))
        compare(straight, killed)
        print(f"{kills} kills, {saving} of them while a checkpoint was written; {whole + 1} whole run(s)")


if __name__ == "__main__":
    main()
