"""A run on disk: its folder, its metrics and who else gets them, its checkpoints, how it goes on, its page.

    runs/NAME/config.json, metrics.jsonl, trajectories/step_000012.jsonl, tokenizer/
    runs/NAME/checkpoints/step_000012/model    Hugging Face format, for AutoModelForCausalLM and evaluate.py
    runs/NAME/checkpoints/step_000012/state    float32 weights, optimizer (torch's DCP format)

A checkpoint gets its name only when everything is in it, so a run killed at any moment continues from a whole
one. Seeds and data are functions of the step: no random state needs storing.
"""

import contextlib
import errno
import fcntl
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from hashlib import sha256
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from options import fail
from policy import Policy, save
from terminal import erase
from tracker import numbers, start_tracker


def open_run(out: Path, settings: dict, may_change: set[str]) -> None:
    """A new folder with config.json, or the same run again; anything else is refused, not written over. Other
    settings are accepted as long as nothing was made by the old ones."""
    file = out / "config.json"
    try:
        old = json.loads(file.read_text()).get("config") if file.is_file() else None
    except (ValueError, AttributeError):
        fail(f"{file} is not that of a run; give another --out")
    if old:
        changed = [k for k, v in settings.items() if k not in may_change and old.get(k) != v]
        made = ("cold_start", "metrics.jsonl", "checkpoints", "rollouts.jsonl")
        begun = any((out / name).exists() for name in made)
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
        for rest in out.glob("checkpoints/*.part"):  # of a run that was killed while it saved
            shutil.rmtree(rest)
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
    for _ in range(60):  # an NFS client may believe for a minute that a file is still not there
        if file.is_file():
            break
        time.sleep(1)
    else:  # each node would keep its own part of a checkpoint
        fail(f"--out {out} is not the folder that the first rank sees; give one on a disk of all nodes")


_locks: list = []


def digest(content) -> str:
    """A hash of what can be JSON. Among a run's settings it stands for data: other data is another run."""
    return sha256(json.dumps(content).encode()).hexdigest()


def weights_digest(model) -> str:
    """Of 64 values of each tensor."""
    return digest([weight.flatten()[:64].tolist() for weight in model.parameters()])


def make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--out {out} cannot be made ({error.strerror}); give another name")


def run_script(main, *arguments) -> None:
    """main(*arguments), where Ctrl-C, a number that is not finite and a full disk end the program with a
    line, without a trace, and a reader of our output that has gone without a word."""
    where = "from what is saved"
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may lack characters that a policy writes
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            main(*arguments)
        except Stop:
            step = _stop["save"]()
            where = f"after step {step}, which is saved" if step else where
            raise KeyboardInterrupt from None
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print(f"\nstopped; the same command continues {where}", file=sys.stderr)
        raise SystemExit(130) from None
    except FloatingPointError as error:  # a loss, a gradient or logits that are not finite
        fail(str(error))
    except BrokenPipeError:
        try:
            sys.stdout.flush()  # fails again if it is the reader of our output that has gone, as `head` does
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(141) from None
        raise
    except SystemExit:
        raise
    except BaseException as error:  # of a dozen types: each library wraps the system's error in its own
        trace = "".join(traceback.format_exception(error))
        causes = {os.strerror(number): "" for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)}
        causes["unexpected pos"] = "a write to the disk was cut short"  # all that torch says of it
        for words, cause in causes.items():
            if words in trace:
                text = "make room, and the same command continues after the last checkpoint, which is whole"
                fail(f"{cause or words.lower()}; {text}")
        raise


class Stop(BaseException):
    """Ctrl-C, SIGTERM or a lost terminal: raised at once in `breakable` code, on the other ranks when they
    meet. No Exception: who waits for a tool takes any of those for the tool's own."""


# when it was asked for (0: never); whether the code now running may be left
_stop = {"asked": 0.0, "breakable": False}


def listen(save) -> None:
    """From now on Ctrl-C, SIGTERM and SIGHUP raise Stop in `breakable` code; elsewhere only `told_to_stop`
    tells of them. run_script then calls save() -> the step saved. The second signal ends the program at once.

    A second signal within one second does not count: launchers pass on what the terminal has sent already.
    """

    screens = [fd for fd in (1, 2) if os.isatty(fd)]

    def hear(number, _):
        if number == signal.SIGHUP:  # the terminal is gone, and each write to it would raise
            for fd in screens:
                os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
        again, now = _stop["asked"], time.monotonic()
        if again and now - again > 1:
            os.write(2, erase())
            os._exit(128 + number)
        _stop["asked"] = again or now
        if not again and dist.get_rank() == 0:
            os.write(2, erase() + b"\nstopping: saves a checkpoint first; once more ends at once\n")
        if _stop["breakable"] and not again:
            raise Stop

    _stop["save"] = save
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, hear)


def told_to_stop() -> bool:
    """Whether any rank was; all of them ask together."""
    asked = torch.tensor(float(_stop["asked"] > 0))
    dist.all_reduce(asked, op=dist.ReduceOp.MAX)
    return bool(asked)


@contextlib.contextmanager
def breakable():
    """Around what may be left at any moment, for it changes nothing that is saved."""
    try:
        _stop["breakable"] = True
        if _stop["asked"]:
            raise Stop
        yield
    finally:
        _stop["breakable"] = False


def write_whole(file: Path, text: str) -> None:
    """Never half a file: written beside it, then renamed."""
    part = file.with_name(file.name + ".part")
    part.write_text(text)
    part.rename(file)


def write_rows(file: Path, rows) -> None:
    """JSON lines, whole or not at all."""
    write_whole(file, "".join(json.dumps(row) + "\n" for row in rows))


def read_rows(file: Path) -> list[dict]:
    """Of a file that grows line by line; a kill leaves half a line at its end. [] if there is none."""
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []


class Log:
    """metrics.jsonl: one row a step. Rows after the checkpoint that a run continues from are dropped.

    tracker: "", or one of TRACKERS, which gets the same rows and, when it is new to the run, the rows before.
    """

    def __init__(self, out: Path, last_step: int, tracker: str = "", settings: dict | None = None):
        self.file = out / "metrics.jsonl"
        self.rows = [row for row in read_rows(self.file) if row["step"] <= last_step]
        if dist.get_rank() == 0:
            write_rows(self.file, self.rows)
        self.track = None
        if tracker and dist.get_rank() == 0:
            self.track, self.finish, new = start_tracker(tracker, out, settings or {}, last_step)
            for row in self.rows if new else []:
                self.track(numbers(row), row["step"])

    def close(self) -> None:
        """Have the tracker write what it holds back; at the end of the process it does so by itself."""
        if self.track:
            self.finish()

    def write(self, row: dict) -> None:
        """Append a row; one of the same step as the last takes its place."""
        again = bool(self.rows) and self.rows[-1]["step"] == row["step"]
        known = self.rows[-1].keys() if again else {"step"}
        if again:
            self.rows[-1] = row
        else:
            self.rows.append(row)
        if dist.get_rank() > 0:
            return
        if self.track:
            self.track({k: v for k, v in numbers(row).items() if k not in known}, row["step"])
        if again:
            write_rows(self.file, self.rows)
        else:
            with self.file.open("a") as f:
                f.write(json.dumps(row) + "\n")


# ---- checkpoints -------------------------------------------------------------------------------------------


def latest(out: Path) -> tuple[int, Path | None]:
    """(step, folder) of the newest whole checkpoint."""
    found = sorted((out / "checkpoints").glob("step_" + "[0-9]" * 6))
    return (int(found[-1].name[5:]), found[-1]) if found else (0, None)


def checkpoint(
    out: Path, step: int, policy: Policy, optimizer, tokenizer, dtype: torch.dtype, keep: int = 2
) -> None:
    """All ranks call it. The last `keep` stay, in case this one turns out to be bad. A folder has its name
    only while it is whole, also when it is removed."""
    final = out / "checkpoints" / f"step_{step:06d}"
    part = final.with_name(final.name + ".part")
    if dist.get_rank() == 0:
        part.mkdir(parents=True)
    dist.barrier()
    weights, state = get_state_dict(policy, optimizer)
    dcp.save({"weights": weights, "optimizer": state}, checkpoint_id=part / "state")
    save(policy, tokenizer, part / "model", dtype)
    if dist.get_rank() == 0:
        part.rename(final)
        for old in sorted(final.parent.glob("step_" + "[0-9]" * 6))[:-keep]:
            shutil.rmtree(old.rename(old.with_name(old.name + ".part")))
    dist.barrier()


def restore(folder: Path, policy: Policy, optimizer) -> None:
    """Weights and optimizer state back into a policy of the same shape, on any number of ranks."""
    content = dict(zip(("weights", "optimizer"), get_state_dict(policy, optimizer)))
    dcp.load(content, checkpoint_id=folder / "state")
    both = {"model_state_dict": content["weights"], "optim_state_dict": content["optimizer"]}
    set_state_dict(policy, optimizer, **both)


# ---- the page ----------------------------------------------------------------------------------------------


def write_report(out: Path, wait: bool = True) -> bool:
    """Start report.py, which writes the run's page; whether it could. Without wait: beside the training, and
    not at all while the last one is still at it."""
    if not wait and _pages and _pages[-1].poll() is None:
        return False
    while _pages:
        _pages.pop().wait()
    command = [sys.executable, str(Path(__file__).with_name("report.py")), str(out)]
    quiet = {} if wait else {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    _pages.append(subprocess.Popen(command + ["--png"] * wait, **quiet))
    return not wait or _pages.pop().wait() == 0


_pages: list[subprocess.Popen] = []
