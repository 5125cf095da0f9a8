"""The usual trackers: python grpo.py --tracker wandb, tensorboard or trackio.

They get the rows of metrics.jsonl, by the same names, the step as their step. Imported only when asked for.
"""

import importlib
import secrets
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from options import fail

TRACKERS = ("wandb", "tensorboard", "trackio")  # names of their packages too


def tracker_fault(name: str) -> str:
    """What is wrong with --tracker name, "" if nothing is: said before hours of work, not after them."""
    if name and name not in TRACKERS:
        return f"--tracker {name}: take {', '.join(TRACKERS)}, or leave it out"
    if name and not getattr(find_spec(name), "origin", None):  # a mere folder of that name has none
        return f"--tracker {name} is not installed; pip install {name}"
    return ""


def start_tracker(name: str, out: Path, settings: dict, last_step: int) -> tuple[Callable, Callable, bool]:
    """(log(numbers, step), finish(), whether it is new to the run) of a tracker. It is sent numbers and
    settings, no text, no files.

    A run that continues goes on in the same run of the tracker. Steps after last_step come again: tensorboard
    drops the old ones, wandb keeps them, trackio shows both. What the tracker writes here lies in out/NAME.
    """
    folder, more = out / name, {}
    folder.mkdir(exist_ok=True)
    file = folder / "key"  # there as soon as the tracker has begun
    new = not file.exists()
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(folder, purge_step=last_step + 1)
        file.touch()

        def log(found: dict, step: int) -> None:
            for key, value in found.items():
                writer.add_scalar(key, value, step)
            writer.flush()

        return log, writer.close, new
    tracker = importlib.import_module(name)
    # tells this run from others whose folder had the same name
    key = secrets.token_hex(4) if new else file.read_text()
    if name == "wandb":  # it would copy the terminal, with what the model writes
        more = {"id": key, "dir": str(folder), "settings": tracker.Settings(console="off")}
    try:
        tracker.init(
            project="agentic-rl", name=f"{out.resolve().name}-{key}", config=settings, resume="allow", **more
        )
    except Exception as error:  # no login, no network: each library has its own types
        fail(f"--tracker {name} does not start ({error}); put that right or leave it out: the run continues")
    file.write_text(key)
    return tracker.log, tracker.finish, new


def numbers(row: dict) -> dict[str, float]:
    return {k: float(v) for k, v in row.items() if k != "step" and isinstance(v, (int, float))}
