"""The far side of the Python tool (tools.py): the processes that run a program, and how they are shut in.

    host ──▶ server ──fork──▶ worker ──fork──▶ child        (this file, started as a program, is the server)

A server has imported what programs need, and forks workers, which fork a child for each call: a millisecond,
where starting Python takes 20. A worker takes one call at a time. When the child ends or its time is up, the
worker kills every process that the call started and empties the call's folder. On Linux a worker is process 1
of its own namespaces (isolation.py), so that the kernel knows all that belongs to a call; where these are not
granted, Landlock and /proc stand in for them.

A fork costs what pages it touches, and each import adds some (threading alone 0.3 ms a call): this file
imports little. Left out: a limit on the memory of all processes of a call together.
"""

import ast
import atexit
import gc
import json
import math
import os
import random
import re
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback
import types

from isolation import (
    CAPSET,
    LIBC,
    LINUX,
    SUBREAPER,
    empty,
    enter_namespaces,
    refuse_system_calls,
    restrict_by_landlock,
)

NAME = "<tool>"  # the program's file name in tracebacks


def send(connection: socket.socket, message) -> None:
    data = json.dumps(message).encode()  # ASCII: a lone surrogate travels as its escape
    connection.sendall(struct.pack("!I", len(data)) + data)


def receive(connection: socket.socket):
    """The next message; None at the end of the stream."""
    data, size = bytearray(), 4
    while len(data) < size:
        if not (part := connection.recv(min(size - len(data), 1 << 20))):
            return None
        data += part
        if len(data) == size == 4:
            size += struct.unpack("!I", data)[0]
    return json.loads(data[4:])


# ------------------------------------------------------------------------------------------ server and worker


def serve(control_fd: int, host_pid: int, box: str, modules: list[str]) -> None:
    """The server: forks a worker for each connection it is sent; ends, with them, when the host does."""
    sys.path.pop(0)  # the folder of this file: a program must not import from it by accident
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    for name in modules:
        try:
            __import__(name)
        except ImportError:
            pass
    if "numpy" in modules and "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    control, host, namespaces = socket.socket(fileno=control_fd), -1, False
    watch = select.poll()
    watch.register(control, select.POLLIN)
    if LINUX:
        try:  # tells of the host's death even while a fork of it holds its sockets open
            host = os.pidfd_open(host_pid)
            watch.register(host, select.POLLIN)
        except OSError:
            pass  # Linux before 5.3: the sockets must do
        LIBC.prctl(*SUBREAPER)
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # out of memory, the kernel is to end calls before the training
        answer, answer_end = os.pipe()
        if os.fork() == 0:
            try:
                enter_namespaces(box)
                os.write(answer_end, b"granted")
            finally:
                os._exit(0)
        os.close(answer_end)
        namespaces = os.read(answer, 7) == b"granted"
    exec(compile(ast.parse("pass"), NAME, "exec"))  # the compiler gets ready once, not in every child
    gc.collect()
    gc.freeze()  # children share these pages until they write to them
    while control_fd in dict(watch.poll()):
        data, fds, *_ = socket.recv_fds(control, 1, 1)
        if not data:
            break
        if os.fork() == 0:
            try:
                work(fds[0], host, box, namespaces)
            finally:
                os._exit(1)
        os.close(fds[0])
    kill_all(namespaces=False)
    if os.getppid() != host_pid:  # a living host does this itself
        os.execlp("rm", "rm", "-rf", box)


def work(connection_fd: int, host: int, box: str, namespaces: bool) -> None:
    """The worker: runs the calls from the connection, one by one, until it closes or the host dies."""
    connection, inherited = socket.socket(fileno=connection_fd), sorted({connection_fd, host} - {-1})
    for low, high in zip([2, *inherited], [*inherited, 256]):
        os.closerange(low + 1, high)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    missing = [] if namespaces else ["namespaces"]
    if namespaces:
        enter_namespaces(box)
    else:
        box = os.path.join(box, str(os.getpid()))
        os.mkdir(box)
        if not (LINUX and LIBC.prctl(*SUBREAPER) == 0 and LIBC.syscall(444, None, 0, 1) > 0):
            missing.append("Landlock")
    if not (LINUX and refuse_system_calls()):
        missing.append("seccomp")
    os.environ.update(HOME=box, TMPDIR=box)
    wake, wake_end = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(wake_end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)  # so that poll() returns when a child ends
    send(connection, missing)
    watch = select.poll()
    for fd in inherited:
        watch.register(fd, select.POLLIN)
    fresh = os.stat(box).st_ctime_ns
    while set(dict(watch.poll())) == {connection_fd} and (job := receive(connection)) is not None:
        reply = call(job, box, namespaces, wake, inherited)
        if os.stat(box).st_ctime_ns != fresh:  # the call made or removed a file
            empty(box, namespaces)
            fresh = os.stat(box).st_ctime_ns
        if reply is None:
            break
        send(connection, reply)
    if not namespaces:
        empty(box, namespaces)
        os.rmdir(box)
    os._exit(0)


def call(job: dict, box: str, namespaces: bool, wake: int, inherited: list[int]) -> dict | None:
    """Run one call in a child; the fields of its ToolResult, or None when the host has gone meanwhile."""
    if job["stdin"]:
        path = os.path.join(box, "stdin")
        with open(path, "w", encoding="utf-8", errors="replace", newline="") as file:
            file.write(job["stdin"])
        stdin = os.open(path, os.O_RDONLY)
        os.unlink(path)
    else:
        stdin = os.open(os.devnull, os.O_RDONLY)
    pipes = os.pipe(), os.pipe()  # stdout, stderr
    start = time.monotonic()
    if (pid := os.fork()) == 0:
        try:
            become_program(job, box, namespaces, (stdin, pipes[0][1], pipes[1][1]))
        finally:
            os._exit(70)
    for fd in (stdin, pipes[0][1], pipes[1][1]):
        os.close(fd)
    out, err = streams = [
        Stream(fd, 4 * job["max_chars"]) for fd, _ in pipes
    ]  # a character has at most 4 bytes
    quiet, watch = select.poll(), select.poll()
    for fd in (wake, *inherited):
        quiet.register(fd, select.POLLIN)
        watch.register(fd, select.POLLIN)
    for stream in streams:
        watch.register(stream.fd, select.POLLIN)
    ended, gone, crowded = None, False, False
    crowd = math.inf if namespaces or not LINUX else len(os.listdir("/proc")) + 500
    while (
        ended is None
        and not gone
        and not crowded
        and (left := start + job["timeout_s"] - time.monotonic()) > 0
    ):
        # First some milliseconds blind to output: most calls end meanwhile, a chatty one wakes us less often.
        wait = min(left * 1000, 1e9 if namespaces else 200)
        events = dict(quiet.poll(min(wait, 3))) or dict(watch.poll(wait))
        gone = any(fd in events for fd in inherited)
        if wake in events:
            os.read(wake, 4096)
        for stream in streams:
            if stream.open and not stream.read():
                watch.unregister(stream.fd)  # closed by the program, which may well run on
        ended = reap(pid)
        crowded = (
            crowd < math.inf and len(os.listdir("/proc")) > crowd
        )  # a fork bomb, which nothing else limits
    killed = kill_all(namespaces, pid)
    reply = {"seconds": time.monotonic() - start}
    for stream in streams:
        stream.read()
        os.close(stream.fd)
    timed_out = ended is None and not crowded
    return None if gone else reply | describe(job, out, err, ended or killed, timed_out)


def reap(pid: int, flags: int = os.WNOHANG) -> tuple | None:
    """Collect children that have ended (flags 0: wait for all); status and use of pid, if among them."""
    found = None
    try:
        while (ended := os.wait4(-1, flags))[0]:
            found = ended[1:] if ended[0] == pid else found
    except ChildProcessError:
        pass
    return found


def kill_all(namespaces: bool, pid: int = 0) -> tuple | None:
    """Kill every process of the call whose child is pid, wherever it has hidden; what reap() tells of pid."""
    if namespaces:  # all of this process namespace but us, in one step of the kernel: no fork escapes
        kill(-1)
        return reap(pid, 0)
    found = None
    while (
        True
    ):  # the child's process group; then our children, round by round, for orphans become our children
        for target in (-pid, pid) if pid else ():
            kill(target)
        try:
            with open("/proc/thread-self/children") as file:
                for child in file.read().split():
                    kill(int(child))
        except OSError:
            pass  # macOS: the process group must do
        try:
            ended = os.wait4(-1, 0)
        except ChildProcessError:
            return found
        if ended[0] == pid:
            found, pid = ended[1:], 0


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


class Stream:
    """The first and the last `keep` bytes of what comes out of a pipe."""

    CONTINUATION = bytes(range(0x80, 0xC0))  # the bytes of UTF-8 that begin no character

    def __init__(self, fd: int, keep: int) -> None:
        os.set_blocking(fd, False)
        self.fd, self.keep, self.open, self.head, self.tail = fd, keep, True, bytearray(), bytearray()
        self.lost = 0  # characters neither in head nor in tail

    def read(self) -> bool:
        """Take what is there, at most a megabyte; False at the end of the stream."""
        for _ in range(16):
            try:
                data = os.read(self.fd, 1 << 16)
            except BlockingIOError:
                break
            if not data:
                self.open = False
                break
            room = self.keep - len(self.head)
            self.head += data[:room]
            self.tail += data[room:]
            if (cut := len(self.tail) - self.keep) > self.keep + (1 << 16):
                self.lost += len(self.tail[:cut].translate(None, self.CONTINUATION))
                del self.tail[:cut]
        return self.open

    def text(self) -> str:
        return (self.head + self.tail).decode("utf-8", "replace")


def describe(job: dict, out: Stream, err: Stream, ended: tuple, timed_out: bool) -> dict:
    """output, status and stdout of a ToolResult."""
    code, cpu_s = os.waitstatus_to_exitcode(ended[0]), ended[1].ru_utime + ended[1].ru_stime
    status, notice = "ok" if code == 0 else "error", f"[exit code {code}]" if code > 1 else ""
    if timed_out:
        status, notice = "timeout", f"[timed out after {job['timeout_s']:g} s]"
    elif code == -signal.SIGXCPU or code == -signal.SIGKILL and job["cpu_s"] and cpu_s >= job["cpu_s"]:
        status, notice = "timeout", f"[stopped after {cpu_s:.0f} s of CPU time]"
    elif code < 0:
        status, notice = "killed", f"[killed by signal {-code} ({signal.strsignal(-code)})]"
    stdout, stderr = out.text(), err.text()
    line = "\n" if stdout and stderr and not stdout.endswith("\n") else ""
    output = cut(stdout + line + stderr, out.lost + err.lost, job["max_chars"]).rstrip("\n")
    output += "\n" * bool(output and notice) + notice
    return {"output": output, "status": status, "stdout": cut(stdout, out.lost, job["max_chars"])}


def cut(text: str, lost: int, most: int) -> str:
    """Head and tail of text, `most` characters together; `lost` more are missing already, in the middle."""
    if (dropped := len(text) + lost - most) <= 0:
        return text
    head = most // 2
    return f"{text[:head]}\n[... {dropped} characters left out ...]\n{text[head + len(text) - most :]}"


# ------------------------------------------------------------------------------------------------ the program


def become_program(job: dict, box: str, namespaces: bool, streams: tuple[int, int, int]) -> None:
    """In the child: take the streams, take on the limits, run the program, exit with its code."""
    os.setsid()
    for fd, source in enumerate(streams):
        os.dup2(source, fd)
    os.closerange(3, 256)
    signal.set_wakeup_fd(-1)
    os.chdir(box)
    memory, cpu_s = int(job["memory_mb"] * 2**20), math.ceil(job["cpu_s"] or 2 * job["timeout_s"] + 1)
    for limit, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 256 << 20),
        (resource.RLIMIT_CORE, 0),
    ):
        try:
            resource.setrlimit(limit, (value, value))
        except (ValueError, OSError):
            pass  # macOS does not limit address space
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))  # SIGXCPU, then SIGKILL
    if namespaces:
        resource.setrlimit(resource.RLIMIT_NPROC, (64, 64))  # elsewhere it would count all that the user runs
    elif LINUX:
        LIBC.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: die with the worker
        restrict_by_landlock(box)
    if LINUX:
        CAPSET(struct.pack("Ii", 0x20080522, 0), bytes(24))  # no capabilities
    random.seed(0)  # with hash seed and numpy's seed: the same program prints the same
    os._exit(execute(job["code"], job["echo"]))


def execute(code: str, echo: bool) -> int:
    """Run code as __main__; the exit code that Python would give."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = [""]
    sys.stdout.reconfigure(line_buffering=echo)  # so that a call that is stopped has shown its lines
    status = 0
    try:
        code = clean(code)
        tree = ast.parse(code, NAME)
        last = tree.body.pop() if echo and tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, NAME, "exec"), main.__dict__)
        last = last and eval(compile(ast.Expression(last.value), NAME, "eval"), main.__dict__)
        if last is not None:
            print(repr(last))
    except BaseException as error:
        status = report(error, code)
    try:  # as at the end of any program: wait for threads, then run what is registered with atexit
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
    except BaseException as error:
        status = status or report(error, code)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:
            pass  # closed by the program
    return status


def clean(code: str) -> str:
    """Without the Markdown fence around it and without its common indentation: habits of language models."""
    if "```" in code and (fenced := FENCE.fullmatch(code)):
        code = fenced[1]
    if code.lstrip("\r\n")[:1] in tuple(" \t#") and (first := INDENTED.search(code)):
        code = re.sub(f"^{first[1]}", "", code, flags=re.MULTILINE)
    return code


FENCE = re.compile(r"\s*```[\w+-]*[ \t]*\r?\n(.*?)\r?\n?[ \t]*```\s*", re.DOTALL)
INDENTED = re.compile(r"^([ \t]*)[^\s#]", re.MULTILINE)  # the first line that is neither empty nor a comment


def report(error: BaseException, code: str) -> int:
    """Print the traceback, the program's own lines only; the exit code."""
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return (error.code or 0) & 0xFF
    try:
        if isinstance(error, SystemExit):
            print(error.code, file=sys.stderr)
            return 1
        traceback.linecache.cache[NAME] = (len(code), None, code.splitlines(keepends=True), NAME)
        text = part = traceback.TracebackException.from_exception(error)
        while part is not None:
            part.stack = traceback.StackSummary.from_list(
                [frame for frame in part.stack if frame.filename == NAME]
            )
            part = part.__cause__ or part.__context__
        print("".join(text.format()), end="", file=sys.stderr)
    except BaseException as second:
        os.write(2, f"{type(error).__name__} (and {type(second).__name__} while printing it)\n".encode())
    return 1


if __name__ == "__main__":
    serve(*json.loads(sys.argv[1]))
