"""The Python tool: runs what a language model wrote, thousands of times an hour.

    with PythonTool() as tool:
        tool.run("x = 6\\nx * 7").output                          # "42"
        future = tool.submit("while True: pass", timeout_s=1)    # from any thread
        future.result().status                                   # "timeout"

This is the near side, which hands programs to worker processes; what those do and how they are shut in is the
far side, sandbox.py. Left out: state between calls; Windows (use WSL 2). To copy into another project: these
two files and tool_calls.py (the format of calls, and other tools); Python 3.10, standard library only.
"""

import json
import os
import shutil
import site
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import sandbox as far_side
from tool_calls import MAX_CALLS, ToolCall, ToolResult, parse_tool_calls  # noqa: F401

# The server of a call is the first whose word the code contains. A fork of the largest costs twice the least.
SERVERS = {"sympy": ("numpy", "sympy"), "numpy": ("numpy",), "": ()}
ALLOWED_ENV = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "PYTHONPATH")
FIXED_ENV = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
FIXED_ENV |= {"PYTHONUTF8": "1", "MPLBACKEND": "Agg", "USER": "user"}
FIXED_ENV |= {"PYTHONHASHSEED": "0", "PYTHONINTMAXSTRDIGITS": "0"}  # runs repeat bit for bit; long integers
# What bubblewrap shows of the file system, if it is there, beside the Python in use
SHOWN = "/usr /bin /sbin /lib /lib64 /nix /etc/ld.so.cache /etc/alternatives /etc/localtime".split()


class PythonTool:
    """Runs Python programs in other processes, `workers` at a time; every call starts from a clean state.

    workers    calls at the same time; each starts when first needed (default: 4 + 2 a core, at most 64)
    timeout_s  wall seconds of a call
    memory_mb  address space of each process of a call
    max_chars  characters of output kept, head plus tail; a notice in between tells how many were dropped
    sandbox    "namespaces" (sandbox.py), or "bwrap": the same inside bubblewrap, where programs read no files
               but those of the system and of Python
    name       what the policy calls it by; models trained elsewhere may know another, as code_interpreter
    """

    about = (
        "Run a Python {}.{} program and return what it prints; the value of a last expression is shown "
        "too. numpy and sympy can be imported. Nothing is kept between calls. No network, input or plots; "
        "files only in the current folder, for the time of the call. Integers of any length can be printed."
    ).format(*sys.version_info)
    code = {"type": "string", "description": "the program"}
    parameters = {"type": "object", "properties": {"code": code}, "required": ["code"]}

    @classmethod
    def described(cls, name: str = "python") -> dict:
        """What the policy reads of it."""
        function = dict(name=name, description=cls.about, parameters=cls.parameters)
        return dict(type="function", function=function)

    def __init__(
        self, workers: int | None = None, timeout_s: float = 30, memory_mb: int = 2048, max_chars: int = 8000,
        sandbox: str = "namespaces", name: str = "python",
    ) -> None:  # fmt: skip
        workers = min(64, 2 * (os.cpu_count() or 1) + 4) if workers is None else workers
        _check_positive(workers=workers, timeout_s=timeout_s, memory_mb=memory_mb, max_chars=max_chars)
        self.timeout_s, self.memory_mb, self.max_chars = timeout_s, memory_mb, max_chars
        self.name, self.schema = name, self.described(name)
        wrapper = bubblewrap(sandbox)
        folder = "/tmp" if wrapper else tempfile.gettempdir()
        self._box = os.path.join(folder, f"python-tool-{os.urandom(8).hex()}")
        self._servers = {word: _Server(modules, self._box, wrapper) for word, modules in SERVERS.items()}
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
            far_side.send(worker, job)
            reply = far_side.receive(worker)
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
        with suppress(OSError):  # a server that was killed has left it
            os.rmdir(self._box)

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


def bubblewrap(sandbox: str) -> list[str]:
    """What the command of a server begins with. ValueError: no such sandbox, or it is not installed."""
    if sandbox not in ("namespaces", "bwrap"):
        raise ValueError(f"sandbox is {sandbox!r}; take namespaces or bwrap")
    if sandbox == "namespaces":
        return []
    if not shutil.which("bwrap"):
        raise ValueError("sandbox bwrap needs bubblewrap: apt install bubblewrap, or take namespaces")
    shown = {*SHOWN, sys.prefix, sys.base_prefix, far_side.__file__, site.getusersitepackages()}
    command = "bwrap --bind /proc /proc --dev /dev --tmpfs /tmp".split()
    return command + [w for path in sorted(shown) if os.path.exists(path) for w in ("--ro-bind", path, path)]


class _Server:
    """The host's end of a server process, which starts at the first call for a worker."""

    def __init__(self, modules: tuple[str, ...], box: str, wrapper: list[str]) -> None:
        self.modules, self.box, self.wrapper, self.lock = modules, box, wrapper, threading.Lock()
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
                self._start()
            ours, theirs = socket.socketpair()
            with theirs:
                socket.send_fds(self.control, [b"w"], [theirs.fileno()])
        ours.settimeout(60)
        self.missing = far_side.receive(ours)
        if self.missing is None:
            raise ConnectionError(f"the Python tool could not start: {' '.join(self.process.args)}")
        self.connections.add(ours)
        return ours

    def _start(self) -> None:
        self.control, theirs = socket.socketpair()
        fds = [theirs.detach()]
        with suppress(AttributeError, OSError):  # Linux: how the server sees that this process has ended
            fds.append(os.pidfd_open(os.getpid()))
        program = [sys.executable, far_side.__file__, json.dumps([fds, self.box, self.modules])]
        env = {name: os.environ[name] for name in ALLOWED_ENV if name in os.environ} | FIXED_ENV
        self.process = subprocess.Popen(
            self.wrapper + program, env=env, cwd="/", start_new_session=True, pass_fds=fds,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        for fd in fds:
            os.close(fd)

    def close(self) -> None:
        """End the server, its workers and what they run; the last that a server does is remove its folder."""
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
