"""A run on disk and in the terminal: its folder, its checkpoints, how it goes on, how a trajectory is shown.

    runs/NAME/config.json, metrics.jsonl, trajectories/step_000012.jsonl, tokenizer/
    runs/NAME/checkpoints/step_000012/model    Hugging Face format, for AutoModelForCausalLM and evaluate.py
    runs/NAME/checkpoints/step_000012/state    float32 weights, optimizer (torch's DCP format)

A checkpoint gets its name only when everything is in it, so a run killed at any moment continues from a whole
one. Seeds and data are functions of the step: no random state needs storing.
"""

import fcntl
import json
import os
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from data import fail
from policy import Policy, save


def open_run(out: Path, settings: dict, may_change: set[str]) -> None:
    """A new folder with config.json, or the same run again; anything else is refused, not written over."""
    file = out / "config.json"
    old = json.loads(file.read_text()).get("config") if file.is_file() else None
    if old:
        changed = [k for k, v in settings.items() if k not in may_change and old.get(k) != v]
        begun = any((out / name).exists() for name in ("cold_start", "metrics.jsonl", "checkpoints"))
        if changed and begun:
            differ = ", ".join(f"{k} {old.get(k)!r}, now {settings[k]!r}" for k in changed)
            fail(f"{out} holds a run with other settings ({differ}); give another --out, or delete it")
    else:
        here = list(out.iterdir()) if out.is_dir() else [out] if out.exists() else []
        started = {"trajectories", "lock", "config.json.part"}  # what a run killed at its start leaves
        if any(path.name not in started for path in here):
            fail(f"--out {out} exists and is not a run of this program; give another name")
    dist.barrier()
    if dist.get_rank() == 0:
        make_folder(out)
        _locks.append((out / "lock").open("w"))  # held until this process ends, however it ends
        try:
            fcntl.flock(_locks[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            fail(f"another process is writing {out}; wait for it, or give another --out")
        (out / "trajectories").mkdir(exist_ok=True)
        versions = {name: sys.modules[name].__version__ for name in ("torch", "transformers", "numpy")}
        content = {
            "config": settings,
            "versions": versions,
            "command": sys.argv,
            "ranks": dist.get_world_size(),
        }
        write_whole(file, json.dumps(content, indent=2) + "\n")
    dist.barrier()


_locks: list = []


def make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--out {out} cannot be made ({error.strerror}); give another name")


def run_script(main, *arguments) -> None:
    """main(*arguments), where Ctrl-C and a closed pipe end the program with a line and not with a trace."""
    try:
        main(*arguments)
    except KeyboardInterrupt:
        print("\nstopped; the same command continues after the last checkpoint", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None


def write_whole(file: Path, text: str) -> None:
    """Never half a file: written beside it, then renamed."""
    part = file.with_name(file.name + ".part")
    part.write_text(text)
    part.rename(file)


class Log:
    """metrics.jsonl: one row a step. Rows after the checkpoint that a run continues from are dropped."""

    def __init__(self, out: Path, last_step: int):
        self.file, self.rows = out / "metrics.jsonl", []
        if self.file.exists():
            lines = self.file.read_text().split("\n")[
                :-1
            ]  # what comes after the last line's end was cut off by the kill
            self.rows = [row for row in map(json.loads, lines) if row["step"] <= last_step]
        if dist.get_rank() == 0:
            write_whole(self.file, "".join(json.dumps(row) + "\n" for row in self.rows))

    def write(self, row: dict) -> None:
        self.rows.append(row)
        if dist.get_rank() == 0:
            with self.file.open("a") as f:
                f.write(json.dumps(row) + "\n")


# ---- checkpoints -------------------------------------------------------------------------------------------


def latest(out: Path) -> tuple[int, Path | None]:
    """(step, folder) of the newest whole checkpoint."""
    found = sorted((out / "checkpoints").glob("step_" + "[0-9]" * 6))
    return (int(found[-1].name[5:]), found[-1]) if found else (0, None)


def checkpoint(out: Path, step: int, policy: Policy, optimizer, tokenizer, dtype: torch.dtype) -> None:
    """All ranks call it. The checkpoint before is kept, in case this one turns out to be bad."""
    final = out / "checkpoints" / f"step_{step:06d}"
    part = final.with_name(final.name + ".part")
    if dist.get_rank() == 0:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    dist.barrier()
    weights, state = get_state_dict(policy, optimizer)
    dcp.save({"weights": weights, "optimizer": state}, checkpoint_id=part / "state")
    save(policy, tokenizer, part / "model", dtype)
    if dist.get_rank() == 0:
        part.rename(final)
        for old in sorted(final.parent.glob("step_" + "[0-9]" * 6))[:-2]:
            shutil.rmtree(old)
    dist.barrier()


def restore(folder: Path, policy: Policy, optimizer) -> None:
    """Weights and optimizer state back into a policy of the same shape, on any number of ranks."""
    weights, state = get_state_dict(policy, optimizer)
    content = {"weights": weights, "optimizer": state}
    dcp.load(content, checkpoint_id=folder / "state")
    set_state_dict(
        policy, optimizer, model_state_dict=content["weights"], optim_state_dict=content["optimizer"]
    )


# ---- the terminal ------------------------------------------------------------------------------------------

COLOURS = {"prompt": "2", "policy": "32", "tool": "36", "right": "1;32", "wrong": "1;31"}


def paint(kind: str, text: str) -> str:
    """Colour on a terminal, bars around the tool's text elsewhere. Control codes are shown, not obeyed."""
    text = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
        return f"\033[{COLOURS[kind]}m{text}\033[0m"
    return f"|{text}|" if kind == "tool" else text


def show(episode: dict, tokenizer, title: str) -> None:
    """One trajectory: prompt grey, the policy's tokens green, the tool's blue, the reward's parts."""
    ids, mask, at = episode["ids"], episode["mask"], episode["prompt_len"]
    text = paint("prompt", tokenizer.decode(ids[:at]))
    while at < len(ids):
        end = at + 1
        while end < len(ids) and mask[end] == mask[at]:
            end += 1
        text += paint("policy" if mask[at] else "tool", tokenizer.decode(ids[at:end]))
        at = end
    verdict = "right" if episode["correct"] else "wrong"
    parts = ", ".join(f"{k} {v:+.2f}" for k, v in episode["reward_parts"].items() if v)
    print(
        f"\n---- {title} ----\n{text}\n"
        f"---- {paint(verdict, verdict)}; reward {episode['reward']:+.2f} = {parts}\n"
    )


def clock(seconds: float) -> str:
    minutes = int(seconds) // 60
    return (
        f"{minutes // 60}:{minutes % 60:02d}:{int(seconds) % 60:02d}"
        if minutes >= 60
        else f"{minutes}:{int(seconds) % 60:02d}"
    )
