"""The tool-call format, and the Python tool: runs what a language model wrote, thousands of times an hour.

    with PythonTool() as tool:
        tool.run("x = 6\\nx * 7").output                          # "42"
        future = tool.submit("while True: pass", timeout_s=1)    # from any thread
        future.result().status                                   # "timeout"

This is the near side: it reads the calls out of the policy's text and hands them to worker processes. The far
side, sandbox.py, is what those processes do and how they are shut in. Left out: state between calls; Windows
(use WSL 2). To copy into another project: these two and isolation.py; Python 3.10, standard library only.
"""

import atexit
import json
import os
import queue
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field

from sandbox import receive, send

# --------------------------------------------------------------------------------------- the tool-call format


@dataclass
class ToolCall:
    name: str
    arguments: dict = field(default_factory=dict)
    error: str | None = None  # a sentence for the policy; the call must not be run


MAX_CALLS = 32  # of one turn; bounds the work on hostile text
TAG = re.compile(r"<think>|</think>|<tool_call>")
CLOSE = re.compile(r"\s*</tool_call>")
FORMAT = 'write <tool_call>\n{"name": "python", "arguments": {"code": "print(1)"}}\n</tool_call>'


def parse_tool_calls(text: str) -> list[ToolCall]:
    """The calls <tool_call>{"name": ..., "arguments": {...}}</tool_call> of one turn, in order.

    Drafts inside <think> are left out. The JSON is decoded from the opening tag on, so that a closing tag
    inside a string cuts nothing; raw line breaks inside strings are accepted, arguments as JSON text too.
    What cannot be run (invalid JSON, no closing tag, unknown shape) comes back with `error` set and without
    arguments. An opening tag that only prose follows is no call. Takes linear time; raises nothing.
    """
    calls, at = [], 0
    while tag := TAG.search(text, at):
        at = tag.end()
        if tag[0] == "<think>":
            end = text.find("</think>", at)
            at = len(text) if end < 0 else end + len("</think>")
        elif tag[0] == "</think>":
            calls.clear()  # the chat template had opened the thinking: all before this tag was a draft
        elif len(calls) == MAX_CALLS:
            calls.append(
                ToolCall("", {}, f"more than {MAX_CALLS} tool calls in one turn; the rest was not run")
            )
            break
        else:
            call, at = _decode_call(text, at)
            if call is not None:
                calls.append(call)
    return calls


def _decode_call(text: str, start: int) -> tuple[ToolCall | None, int]:
    """The call whose opening tag ends at start, and where to read on."""
    begin = re.compile(r"\s*").match(text, start).end()
    following = re.compile(r"</?tool_call>").search(text, start)
    closed = following is not None and following[0] == "</tool_call>"
    if not closed and begin < len(text) and text[begin] != "{":
        return None, start  # prose that mentions the tag
    try:
        value, end = json.JSONDecoder(strict=False).raw_decode(text, begin)
    except (ValueError, RecursionError) as error:
        if not closed:
            return ToolCall("", {}, f"the tool call is cut off: {FORMAT}"), start
        reason = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
        near = (
            text[error.pos : error.pos + 20]
            if isinstance(error, json.JSONDecodeError)
            else text[begin : begin + 20]
        )
        return ToolCall(
            "", {}, f"the tool call is not valid JSON ({reason}, near {near!r}): {FORMAT}"
        ), following.end()
    close = CLOSE.match(text, end)
    name = value.get("name") if isinstance(value, dict) else None
    arguments = value.get("arguments") if isinstance(value, dict) else None
    if isinstance(arguments, str):
        try:
            arguments = json.JSONDecoder(strict=False).decode(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not close:
        problem = "the tool call's JSON is not followed by </tool_call>"
    elif not isinstance(name, str) or not isinstance(arguments, dict):
        problem = 'a tool call needs "name", a string, and "arguments", an object'
    elif name == "python" and not isinstance(arguments.get("code"), str):
        problem = 'the python tool needs "code", a string, in "arguments"'
    else:
        return ToolCall(name, arguments), close.end()
    return ToolCall(
        name if isinstance(name, str) else "", {}, f"{problem}: {FORMAT}"
    ), close.end() if close else end


# --------------------------------------------------------------------------------------------------- the tool


@dataclass
class ToolResult:
    output: str  # what the policy sees: stdout, stderr with the traceback, a notice if the call was stopped
    status: str  # "ok"; "error": exception, non-zero exit; "timeout": wall or CPU; "killed": died by a signal
    seconds: float  # wall time
    stdout: str = ""  # as it is; like output at most max_chars and a notice


# The server of a call is the first whose word the code contains. A fork of the largest costs twice the least.
SERVERS = {"sympy": ("numpy", "sympy"), "numpy": ("numpy",), "": ()}
ALLOWED_ENV = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "PYTHONPATH")
FIXED_ENV = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1") | {
    "PYTHONINTMAXSTRDIGITS": "0",  # integers of any length can be printed
    "PYTHONHASHSEED": "0",  # the same program prints the same: a run can be repeated bit for bit
    "PYTHONUTF8": "1",
    "MPLBACKEND": "Agg",
    "USER": "user",
}


class PythonTool:
    """Runs Python programs in other processes, `workers` at a time; every call starts from a clean state.

    workers    calls at the same time; each starts when first needed (default: 4 + 2 a core, at most 64)
    timeout_s  wall seconds of a call
    memory_mb  address space of each process of a call
    max_chars  characters of output kept, head plus tail; a notice in between tells how many were dropped
    """

    version = "{}.{}".format(*sys.version_info)
    description = (
        f"Run a Python {version} program and return what it prints; the value of a last expression is shown "
        "too. numpy and sympy can be imported. Nothing is kept between calls. No network, input or plots; "
        "files only in the current folder, for the time of the call. Integers of any length can be printed."
    )
    code = {"type": "string", "description": "the program"}
    parameters = {"type": "object", "properties": {"code": code}, "required": ["code"]}
    schema = {
        "type": "function",
        "function": {"name": "python", "description": description, "parameters": parameters},
    }

    def __init__(
        self,
        workers: int | None = None,
        timeout_s: float = 30.0,
        memory_mb: int = 2048,
        max_chars: int = 8000,
    ) -> None:
        self.workers = min(64, 2 * (os.cpu_count() or 1) + 4) if workers is None else workers
        self.timeout_s, self.memory_mb, self.max_chars = timeout_s, memory_mb, max_chars
        for name in ("workers", "timeout_s", "memory_mb", "max_chars"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        self._box = tempfile.mkdtemp(prefix="python-tool-")
        self._pid, self._closed, self._lock = os.getpid(), False, threading.Lock()
        self._servers = {kind: _Server(modules, self._box) for kind, modules in SERVERS.items()}
        self._idle: dict[str, list[socket.socket]] = {kind: [] for kind in SERVERS}  # connections to workers
        self._busy: set[socket.socket] = set()
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._waiting = threading.Semaphore(0)  # threads without a call
        atexit.register(self.close)
        worker, missing = self._servers[
            ""
        ].worker()  # now, so that what is missing is said once, at the start
        self._idle[""].append(worker)
        if missing:
            print(
                f"tools: this system does not grant {', '.join(missing)}: calls are isolated less",
                file=sys.stderr,
            )

    def submit(
        self,
        code: str,
        *,
        stdin: str = "",
        echo: bool = True,
        timeout_s: float | None = None,
        cpu_s: float | None = None,
        max_chars: int | None = None,
    ) -> "Future[ToolResult]":
        """Run code in the background; never raises for what the code does.

        stdin      text the program can read
        echo       show the value of a last expression by repr, unless it is None
        timeout_s  wall seconds, counted from the moment a worker takes the call
        cpu_s      CPU seconds (whole ones, rounded up); more ends the call with status "timeout"
        raises     ValueError for code that is no string, RuntimeError after close()
        """
        if not isinstance(code, str):
            raise ValueError(f"code must be a string, got {type(code).__name__}")
        for name, value in (("timeout_s", timeout_s), ("cpu_s", cpu_s), ("max_chars", max_chars)):
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")
        job = {"code": code, "stdin": stdin, "echo": echo, "cpu_s": cpu_s, "memory_mb": self.memory_mb}
        job |= {"timeout_s": timeout_s or self.timeout_s, "max_chars": max_chars or self.max_chars}
        future: Future[ToolResult] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("this PythonTool is closed; make a new one")
            self._queue.put((future, job))
            if not self._waiting.acquire(blocking=False) and len(self._threads) < self.workers:
                self._threads.append(threading.Thread(target=self._work, name="python-tool", daemon=True))
                self._threads[-1].start()
        return future

    def run(self, code: str, **options) -> ToolResult:
        """submit(code, ...).result()"""
        return self.submit(code, **options).result()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            future, job = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._call(job))
                except BaseException as error:
                    future.set_exception(error)
            self._waiting.release()

    def _call(self, job: dict) -> ToolResult:
        kind, reply, start = next(word for word in SERVERS if word in job["code"]), None, time.monotonic()
        with self._lock:
            worker = self._idle[kind].pop() if self._idle[kind] else None
        if worker is None:
            worker = self._servers[kind].worker()[0]
        with self._lock:
            self._busy.add(worker)
        if not self._closed:
            try:
                send(worker, job)
                worker.settimeout(job["timeout_s"] + 10)  # the worker keeps the time; it may be stuck itself
                reply = receive(worker)
            except OSError:
                pass
        with self._lock:
            self._busy.discard(worker)
            if reply is None or self._closed:
                worker.close()  # the worker, if it lives, ends with all its processes
            else:
                self._idle[kind].append(worker)
        if reply is None:
            return ToolResult("[the process of this call was lost]", "killed", time.monotonic() - start)
        return ToolResult(**reply)

    def close(self) -> None:
        """End running calls (status "killed"), cancel waiting ones, leave no process and no file behind."""
        if os.getpid() != self._pid:  # a fork of the host; the workers are not its own
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                while True:
                    self._queue.get_nowait()[0].cancel()
            except queue.Empty:
                pass
            for worker in self._busy:
                worker.shutdown(socket.SHUT_RDWR)
            for worker in sum(self._idle.values(), []):
                worker.close()
            for _ in self._threads:
                self._queue.put(None)
        for thread in self._threads:
            thread.join(15)
        for server in self._servers.values():
            server.close()
        shutil.rmtree(self._box, ignore_errors=True)
        atexit.unregister(self.close)

    def __enter__(self) -> "PythonTool":
        return self

    def __exit__(self, *_) -> None:
        self.close()


FAR_SIDE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "sandbox.py")


class _Server:
    """The host's end of a server process, which starts at the first call for a worker."""

    def __init__(self, modules: tuple[str, ...], box: str) -> None:
        self.modules, self.box, self.lock = modules, box, threading.Lock()
        self.process: subprocess.Popen | None = None

    def worker(self) -> tuple[socket.socket, list[str]]:
        """A connection to a new worker, and what the system did not grant it."""
        for _ in range(2):  # a server that has died is started again
            ours, theirs = socket.socketpair()
            with self.lock, theirs:
                if self.process is None:
                    self.start()
                try:
                    socket.send_fds(self.control, [b"w"], [theirs.fileno()])
                    theirs.close()
                    ours.settimeout(60)
                    if (missing := receive(ours)) is not None:
                        return ours, missing
                except OSError:
                    pass
                ours.close()
                self.close()
        raise RuntimeError(f"the Python tool could not start {sys.executable} {FAR_SIDE}")

    def start(self) -> None:
        self.control, theirs = socket.socketpair()
        env = {name: os.environ[name] for name in ALLOWED_ENV if name in os.environ} | FIXED_ENV
        config = json.dumps([theirs.fileno(), os.getpid(), self.box, self.modules])
        self.process = subprocess.Popen(
            [sys.executable, FAR_SIDE, config],
            env=env,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()

    def close(self) -> None:
        if self.process is not None:
            self.control.close()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None
