"""Whether two math answers are the same, asked from any thread, with a time and a memory limit.

    same_answer(r"\\frac{1}{2}", "0.5")     True         (gold answer first)

Plain numbers are compared here, in microseconds. What is left goes to one long-lived process of this file,
which runs math_equal.equal. sympy never ends on some answers (9^9^9^9): past the limit the process is
killed, the answer counts as wrong, and the next question starts a new process (half a second). No signals in
the caller.

Left out: several workers (most answers never get here; a question that waits for another's time-out waits 3
s). To copy it elsewhere: with math_equal.py and `pip install math-verify`. Needs Linux or macOS.
"""

import atexit
import functools
import json
import os
import select
import subprocess
import sys
import threading
import warnings
from collections import Counter

from math_equal import UnparsableGold, clean, equal, number, numbers_equal

SECONDS = 3.0  # wall time of one comparison
MEMORY = 512 << 20  # bytes of address space of the process (it starts with 60 MB)
LONGEST = 2000  # characters; a longer answer only equals its own text
counts = Counter()  # comparisons that ended as "unparsable_gold", "timeout" or "died"


def same_answer(gold: str, answer: str) -> bool:
    """Whether two answers (text or LaTeX) are the same.

    A gold that is no mathematics equals only its own words; each miss against it is counted in `counts`, and
    the first one of each gold warns. RuntimeError if the process cannot start (math-verify is not
    installed).
    """
    if gold == answer or max(len(gold), len(answer)) > LONGEST:
        return gold == answer != ""
    numbers = number(clean(gold)), number(clean(answer))
    if None not in numbers:
        return numbers_equal(*numbers)
    try:
        verdict = _ask_once(gold, answer)
    except TimeoutError:
        return False
    if verdict == "unparsable_gold":
        counts["unparsable_gold"] += 1
        _warn_of(gold)
    return verdict == "equal"


@functools.cache
def _warn_of(gold: str) -> None:
    warnings.warn(f"gold answer {gold!r} is no mathematics: only the same words are rewarded", stacklevel=4)


@functools.lru_cache(maxsize=4096)
def _ask_once(gold: str, answer: str) -> str:
    return _process.ask(gold, answer)  # the samples of a group repeat each other; a time-out is not kept


class _Process:
    """A line of JSON in, a word out. Started on first need, and again after it was killed."""

    def __init__(self) -> None:
        self.lock, self.child = threading.Lock(), None

    def ask(self, gold: str, answer: str) -> str:
        with self.lock:
            if self.child is None:
                self.start()
            try:
                self.child.stdin.write(json.dumps([gold, answer]).encode() + b"\n")
                self.child.stdin.flush()
                reply = self.line(SECONDS)
            except BrokenPipeError:
                reply = b""
            if reply:
                return reply.decode().strip()
            counts["timeout" if reply is None else "died"] += 1
            self.stop()
        raise TimeoutError

    def start(self) -> None:
        # a fresh interpreter, not a fork: this process may hold CUDA and threads
        command = [sys.executable, os.path.abspath(__file__), str(os.getpid())]
        pipe = subprocess.PIPE
        self.child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        reply = self.line(120)
        if reply != b"ready\n":
            self.stop()
            raise RuntimeError(f"cannot grade math: the process says {reply!r}; is math-verify installed?")

    def line(self, seconds: float) -> bytes | None:
        waiting = select.poll()  # select.select fails from file number 1024 on
        waiting.register(self.child.stdout, select.POLLIN)
        return self.child.stdout.readline() if waiting.poll(1000 * seconds) else None

    def stop(self) -> None:
        if self.child is not None:
            self.child.kill()
            self.child.communicate()
            self.child = None


_process = _Process()
atexit.register(lambda: _process.stop())


def _after_fork() -> None:  # a forked child must neither read nor kill what belongs to its parent
    global _process
    _process = _Process()


os.register_at_fork(after_in_child=_after_fork)


def _serve(parent: int) -> None:
    """The process: ends when its parent does, by the CPU limit even in the middle of a computation."""
    import logging
    import resource

    replies, sys.stdout = sys.stdout, sys.stderr
    logging.disable()
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    except (ValueError, OSError):
        pass  # macOS has no such limit; the time limit stays
    try:
        equal(r"\frac{x}{2}+\sqrt{3}", r"\sqrt{3}+0.5x")  # loads and warms math-verify
    except ImportError as error:
        print(error, file=replies, flush=True)
        return
    print("ready", file=replies, flush=True)
    while os.getppid() == parent:
        if not select.select([sys.stdin], [], [], 5.0)[0]:
            continue
        question = sys.stdin.buffer.readline()
        if not question:
            return
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime + SECONDS + 2)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        try:
            verdict = "equal" if equal(*json.loads(question)) else "different"
        except UnparsableGold:
            verdict = "unparsable_gold"
        except Exception:  # sympy raises nearly everything on odd input
            verdict = "different"
        print(verdict, file=replies, flush=True)


if __name__ == "__main__":
    _serve(parent=int(sys.argv[1]))
