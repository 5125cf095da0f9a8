"""The tool-call format, and the Python tool: runs what a language model wrote, thousands of times an hour.

    with PythonTool() as tool:
        tool.run("x = 6\\nx * 7").output                          # "42"
        future = tool.submit("while True: pass", timeout_s=1)    # from any thread
        future.result().status                                   # "timeout"

This is the near side: it reads the calls out of the policy's text and hands them to worker processes; what
those do and how they are shut in is the far side, sandbox.py. Left out: state between calls; Windows (use
WSL 2). To copy into another project: these two files; Python 3.10, standard library only.
"""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import sandbox

# --------------------------------------------------------------------------------------- the tool-call format


@dataclass
class ToolCall:
    name: str
    arguments: dict = field(default_factory=dict)
    error: str | None = None  # a sentence for the policy; the call must not be run


MAX_CALLS = 32  # of one turn; bounds the work on hostile text
TAG = re.compile(r"<think>.*?(?:</think>|\Z)|(</think>)|(<tool_call>)\s*", re.DOTALL)
NEXT, CLOSE = re.compile("</?tool_call>"), re.compile(r"\s*</tool_call>")
DECODER = json.JSONDecoder(strict=False)
FORMAT = 'write <tool_call>\n{"name": "python", "arguments": {"code": "print(1)"}}\n</tool_call>'


def parse_tool_calls(text: str) -> list[ToolCall]:
    """The calls <tool_call>{"name": ..., "arguments": {...}}</tool_call> of one turn, in order.

    Drafts inside <think> are left out. The JSON is decoded from the opening tag on: a closing tag inside a
    string cuts nothing. Strings may hold raw line breaks, arguments may be JSON text. What cannot be run has
    `error` set and no arguments; a tag that only prose follows is no call. Linear time; raises nothing.
    """
    calls, at = [], 0
    while tag := TAG.search(text, at):
        at = tag.end()
        if tag[1]:
            calls.clear()  # the chat template had opened the thinking: all before this tag was a draft
        elif tag[2] and len(calls) == MAX_CALLS:
            return [*calls, ToolCall("", {}, f"more than {MAX_CALLS} calls in a turn; the rest was not run")]
        elif tag[2]:
            call, at = _decode_call(text, at)
            calls += [call] if call else []
    return calls


def _decode_call(text: str, start: int) -> tuple[ToolCall | None, int]:
    """The call whose JSON begins at start (None: prose that mentions the tag), and where to read on."""
    tag = NEXT.search(text, start)
    closed = tag is not None and tag[0] == "</tool_call>"
    if not closed and text[start : start + 1] not in ("", "{"):
        return None, start
    source, end = text, tag.end() if closed else start
    try:
        value, end = DECODER.raw_decode(text, start)
        if isinstance(value, dict) and isinstance(value.get("arguments"), str):
            source = value["arguments"]
            value["arguments"] = DECODER.decode(source)
        close = CLOSE.match(text, end)
        end = close.end() if close else end
        match value:
            case {"name": str(name), "arguments": dict(arguments)} if close:
                if name != "python" or isinstance(arguments.get("code"), str):
                    return ToolCall(name, arguments), end
        shape = 'needs "name", a string, and "arguments", an object; for python with "code", a string'
        problem = shape if close else "has no </tool_call> after its JSON"
    except (ValueError, RecursionError) as error:
        reason, at = getattr(error, "msg", type(error).__name__), getattr(error, "pos", start)
        problem = f"is not valid JSON ({reason}, near {source[at : at + 20]!r})" if closed else "is cut off"
    return ToolCall("", {}, f"the tool call {problem}: {FORMAT}"), end


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
FIXED_ENV = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
FIXED_ENV |= {"PYTHONUTF8": "1", "MPLBACKEND": "Agg", "USER": "user"}
FIXED_ENV |= {"PYTHONHASHSEED": "0", "PYTHONINTMAXSTRDIGITS": "0"}  # runs repeat bit for bit; long integers


class PythonTool:
    """Runs Python programs in other processes, `workers` at a time; every call starts from a clean state.

    workers    calls at the same time; each starts when first needed (default: 4 + 2 a core, at most 64)
    timeout_s  wall seconds of a call
    memory_mb  address space of each process of a call
    max_chars  characters of output kept, head plus tail; a notice in between tells how many were dropped
    """

    about = (
        "Run a Python {}.{} program and return what it prints; the value of a last expression is shown "
        "too. numpy and sympy can be imported. Nothing is kept between calls. No network, input or plots; "
        "files only in the current folder, for the time of the call. Integers of any length can be printed."
    ).format(*sys.version_info)
    code = {"type": "string", "description": "the program"}
    parameters = {"type": "object", "properties": {"code": code}, "required": ["code"]}
    schema = dict(type="function", function=dict(name="python", description=about, parameters=parameters))

    def __init__(
        self, workers: int | None = None, timeout_s: float = 30, memory_mb: int = 2048, max_chars: int = 8000
    ) -> None:
        workers = min(64, 2 * (os.cpu_count() or 1) + 4) if workers is None else workers
        _check_positive(workers=workers, timeout_s=timeout_s, memory_mb=memory_mb, max_chars=max_chars)
        self.timeout_s, self.memory_mb, self.max_chars = timeout_s, memory_mb, max_chars
        box = tempfile.mkdtemp(prefix="python-tool-")
        self._servers = {kind: _Server(modules, box) for kind, modules in SERVERS.items()}
        self._pid, self._closed, self._threads = os.getpid(), False, ThreadPoolExecutor(workers, "tool")
        OPEN.add(self)
        server = self._servers[""]
        server.idle.append(server.worker())  # now, so that what is missing is said once, at the start
        if missing := ", ".join(server.missing):
            print(f"tools: this system does not grant {missing}: calls are isolated less", file=sys.stderr)

    def submit(self, code: str, *, stdin: str = "", echo: bool = True, timeout_s: float | None = None,
               cpu_s: float | None = None, max_chars: int | None = None) -> "Future[ToolResult]":  # fmt: skip
        """Run code in the background; never raises for what the code does.

        stdin      text the program can read
        echo       show the value of a last expression by repr, unless it is None
        timeout_s  wall seconds, counted from the moment a worker takes the call
        cpu_s      CPU seconds (whole ones, rounded up); more ends the call with status "timeout"
        raises     ValueError for code that is no string, RuntimeError after close()
        """
        if not isinstance(code, str):
            raise ValueError(f"code must be a string, got {type(code).__name__}")
        _check_positive(timeout_s=timeout_s, cpu_s=cpu_s, max_chars=max_chars)
        if self._closed:
            raise RuntimeError("this PythonTool is closed; make a new one")
        job = {"code": code, "stdin": stdin, "echo": echo, "cpu_s": cpu_s, "memory_mb": self.memory_mb}
        job |= {"timeout_s": timeout_s or self.timeout_s, "max_chars": max_chars or self.max_chars}
        return self._threads.submit(self._call, job)

    def run(self, code: str, **options) -> ToolResult:
        """submit(code, ...).result()"""
        return self.submit(code, **options).result()

    def _call(self, job: dict) -> ToolResult:
        start, worker, reply = time.monotonic(), None, None
        server = next(server for word, server in self._servers.items() if word in job["code"])
        with suppress(OSError):
            worker = server.worker()
            worker.settimeout(job["timeout_s"] + 10)  # the worker keeps the time; it may be stuck itself
            sandbox.send(worker, job)
            reply = sandbox.receive(worker)
        if reply:
            server.idle.append(worker)
            return ToolResult(**reply)
        if worker:
            server.connections.discard(worker)
            worker.close()
        return ToolResult("[the process of this call was lost]", "killed", time.monotonic() - start)

    def close(self) -> None:
        """End running calls (status "killed"), cancel waiting ones, leave no process and no file behind."""
        if self._closed or os.getpid() != self._pid:  # in a fork of the host, the workers are not its own
            return
        self._closed = True
        OPEN.discard(self)
        self._threads.shutdown(wait=False, cancel_futures=True)
        for server in self._servers.values():
            server.close()
        self._threads.shutdown()
        for connection in [c for server in self._servers.values() for c in server.connections]:
            connection.close()

    def __enter__(self) -> "PythonTool":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _check_positive(**options) -> None:
    for name, value in options.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")


# atexit's functions run after the threads, and with them all calls, have ended: too late. concurrent.futures
# registers its own end in the same place.
OPEN: set[PythonTool] = set()
threading._register_atexit(lambda: [tool.close() for tool in list(OPEN)])


class _Server:
    """The host's end of a server process, which starts at the first call for a worker."""

    def __init__(self, modules: tuple[str, ...], box: str) -> None:
        self.modules, self.box, self.lock = modules, box, threading.Lock()
        self.process, self.closed = None, False
        self.connections, self.idle = set(), []  # sockets; a worker ends when its own is closed

    def worker(self) -> socket.socket:
        """A connection to an idle worker, or to a new one; self.missing: what the system did not grant it."""
        with self.lock:
            if self.idle:
                return self.idle.pop()
            if self.closed:
                raise ConnectionError("closed")
            if self.process is None or self.process.poll() is not None:  # one that has died is started again
                self.control, theirs = socket.socketpair()
                env = {name: os.environ[name] for name in ALLOWED_ENV if name in os.environ} | FIXED_ENV
                config = json.dumps([theirs.fileno(), os.getpid(), self.box, self.modules])
                with theirs:
                    self.process = subprocess.Popen(
                        [sys.executable, sandbox.__file__, config], env=env, cwd="/", start_new_session=True,
                        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                    )  # fmt: skip
            ours, theirs = socket.socketpair()
            with theirs:
                socket.send_fds(self.control, [b"w"], [theirs.fileno()])
        ours.settimeout(60)
        self.missing = sandbox.receive(ours)
        if self.missing is None:
            raise ConnectionError(f"the Python tool could not start {sys.executable} {sandbox.__file__}")
        self.connections.add(ours)
        return ours

    def close(self) -> None:
        """End the server, its workers and what they run; the last that a server does is remove the folder."""
        with self.lock:
            self.closed = True
            for connection in list(self.connections):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            if self.process is not None:
                self.control.close()
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(10)
                self.process.kill()  # if it is stuck
                self.process.wait()
