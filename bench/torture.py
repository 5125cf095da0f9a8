"""Hostile programs, and what must come back from each: a table for the Python tool, others to compare.

    python bench/torture.py                         # our tool
    python bench/torture.py --runner subprocess     # plain subprocess.run with a time limit
    python bench/torture.py --runner smolagents     # its LocalPythonExecutor (pip install smolagents)
    python bench/torture.py --runner langchain      # PythonREPL (pip install langchain-experimental)

A row passes when the call returned in time (its limit plus 2 s) with the status and the text expected, when
no process and no file of it is left, and when the tool answered a plain `print(1)` right after it. Linux.
The other runners get each program in namespaces of its own, for some bring them down, and not those in
NOT_ELSEWHERE, which bring down the machine when nothing confines them: a fork bomb that root starts outlives
its time limit by minutes.
"""

import argparse
import glob
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import suppress

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# One name for all processes of this run, and for the file that a program which got out would write.
RUN = next(
    (p for p in os.environ.get("PYTHONPATH", "").split(":") if "/torture" in p), f"/tmp/torture-{os.getpid()}"
)
MARK = f"{RUN}-escaped"
DETACH = (
    "import os, sys, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
    f"        time.sleep(1.5)\n        open({MARK!r}, 'w').write('x')\n        time.sleep(60)\n"
    "    os._exit(0)\n"
)
LIBC = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
HOST = {"HF_TOKEN": "hf_secret", "AWS_SECRET_ACCESS_KEY": "aws_secret"}  # in the host's environment
TAG = {"PYTHONPATH": RUN}  # passed on to every process, so that those left behind can be told

# name: (program, time limit in seconds, statuses allowed, text that the output must hold)
PROGRAMS = {
    "fork bomb": ("import os\nwhile True:\n    os.fork()", 2, "error timeout", ""),
    "fork bomb that catches": (
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        1.5,
        "timeout",
        "timed out",
    ),
    "fork bomb, each in its own session": (
        "import os\nwhile True:\n    try:\n        os.fork()\n        os.setsid()\n    except OSError: pass",
        1.5,
        "timeout",
        "timed out",
    ),
    "memory bomb, one block": ("a = bytearray(8 << 30)", 5, "error", "MemoryError"),
    "memory bomb, piece by piece": ("a = []\nwhile True: a.append(' ' * 10**8)", 10, "error", "MemoryError"),
    "memory that no limit counts": (
        LIBC + "for i in range(9): f = os.memfd_create('m'); os.write(f, bytes(1 << 27))",
        5,
        "error",
        "PermissionError",
    ),
    "endless output": ("while True: print('0123456789')", 1.5, "timeout", "characters left out"),
    "endless output without a line break": (
        "import sys\nwhile True: sys.stdout.write('x' * 9999)",
        1.5,
        "timeout",
        "characters left out",
    ),
    "endless output on stderr": (
        "import sys\nwhile True: print('x' * 99, file=sys.stderr)",
        1.5,
        "timeout",
        "left out",
    ),
    "endless loop": ("while True: pass", 1, "timeout", "timed out"),
    "endless loop with a bare except": (
        "while True:\n    try:\n        while True: pass\n    except: pass",
        1,
        "timeout",
        "timed out",
    ),
    "ignores every signal": (
        "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nprint('deaf', flush=True)\nwhile True: pass",
        1,
        "timeout",
        "deaf",
    ),
    "endless loop inside C": ("print(len(str(9**9**9)))", 1, "timeout error", ""),
    "regular expression that explodes": (
        "import re\nre.match('(a+)+$', 'a' * 64 + 'b')",
        1,
        "timeout",
        "timed out",
    ),
    "stops itself (SIGSTOP)": (
        "import os, signal\nprint('before', flush=True)\nos.kill(os.getpid(), signal.SIGSTOP)",
        1,
        "timeout",
        "before",
    ),
    "sleeping subprocess holds the pipe": (
        "import subprocess\nsubprocess.Popen(['sleep', '60'])\nprint('hi')",
        3,
        "ok",
        "hi",
    ),
    "shell job in the background": ("import os\nos.system('sleep 60 &')\nprint('hi')", 3, "ok", "hi"),
    "grandchild in its own session, call ends": (DETACH + "print('hi')", 3, "ok", "hi"),
    "grandchild in its own session, call times out": (DETACH + "while True: pass", 1, "timeout", "timed out"),
    "thread that never ends": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(100,)).start()\nprint('a')",
        1,
        "timeout",
        "a",
    ),
    "ten thousand threads": (
        "import threading, time\nfor i in range(10000):\n"
        "    threading.Thread(target=time.sleep, args=(100,), daemon=True).start()",
        5,
        "error",
        "can't start new thread",
    ),
    "kills its parent": (
        "import os, time\ntry: os.kill(os.getppid(), 9)\nexcept OSError: pass\ntime.sleep(1)\nprint('alive')",
        3,
        "ok",
        "alive",
    ),
    "kills everything (kill -1)": (
        "import os, time\ntry: os.kill(-1, 9)\nexcept OSError: pass\nprint('alive')",
        3,
        "ok",
        "alive",
    ),
    "interrupts its parent": ("import os\ntry: os.kill(os.getppid(), 2)\nexcept OSError: pass", 3, "ok", ""),
    "limits its parent's descriptors": (
        "import os, resource as r\nr.prlimit(os.getppid(), r.RLIMIT_NOFILE, (12, 12))",
        3,
        "error",
        "PermissionError",
    ),
    "kills itself": ("import os\nos.kill(os.getpid(), 9)", 3, "killed", "signal 9"),
    "segmentation fault": ("import ctypes\nctypes.string_at(0)", 3, "killed", "signal 11"),
    "abort": ("import os\nos.abort()", 3, "killed", "signal 6"),
    "os._exit": ("import os\nprint('a', flush=True)\nos._exit(7)", 3, "error", "exit code 7"),
    "sys.exit with a code": ("print(1)\nimport sys\nsys.exit(3)", 3, "error", "exit code 3"),
    "sys.exit with a text": ("import sys\nsys.exit('boom')", 3, "error", "boom"),
    "replaces itself (exec)": ("import os\nos.execv('/bin/echo', ['echo', 'hi'])", 3, "ok", "hi"),
    "closes stdout": ("import sys\nprint('a')\nsys.stdout.close()", 3, "ok", "a"),
    "closes every descriptor": ("import os\nos.closerange(0, 100)", 3, "ok", ""),
    "opens every descriptor": (
        "f = []\nwhile True: f.append(open('/dev/null'))",
        3,
        "error",
        "Too many open files",
    ),
    "NUL byte in the code": ("print('a\0b')", 3, "error", "null bytes"),
    "lone surrogate in the code": ("print('\ud800')", 3, "error", "surrogates not allowed"),
    "prints a lone surrogate": ("print(chr(0xd800))", 3, "error", "UnicodeEncodeError"),
    "binary output": ("import sys\nsys.stdout.buffer.write(bytes(range(256)))", 3, "ok", "ABC"),
    "half a megabyte of code": ("x = 0\n" + "x += 1\n" * 75000 + "x", 20, "ok", "75000"),
    "a hundred thousand brackets": ("(" * 100_000, 5, "error killed", ""),
    "a hundred thousand minus signs": ("-" * 100_000 + "1", 5, "error killed", ""),
    "runaway recursion": ("def f(n): return f(n + 1)\nf(0)", 5, "error", "RecursionError"),
    "runaway recursion, limit lifted": (
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1)\nf(0)",
        4,
        "error killed timeout",
        "",
    ),
    "exception with a huge text": ("raise ValueError('x' * 10**7)", 5, "error", "characters left out"),
    "exception that cannot be printed": (
        "class E(Exception):\n    def __str__(self): raise RuntimeError\nraise E",
        3,
        "error",
        "E",
    ),
    "value that cannot be shown": (
        "class C:\n    def __repr__(self): 1 / 0\nC()",
        3,
        "error",
        "ZeroDivision",
    ),
    "raises in atexit": ("import atexit\natexit.register(lambda: 1 / 0)\nprint('a')", 3, "ok error", "a"),
    "forgets its modules": ("import sys\nsys.modules.clear()\nprint('a')", 3, "ok error", "a"),
    "waits for input": ("input('n? ')", 3, "error", "EOFError"),
    "reads the parent's environment": (
        "import os\nprint(open(f'/proc/{os.getppid()}/environ').read())",
        3,
        "error",
        "PermissionError",
    ),
    "reads every environment in /proc": (
        "import glob\nfor p in glob.glob('/proc/[0-9]*/environ'):\n    try: print(open(p).read())\n"
        "    except OSError: pass\nprint('done')",
        3,
        "ok",
        "done",
    ),
    "reads its own environment": ("import os\nprint(dict(os.environ))", 3, "ok", "PATH"),
    "traces its parent": (LIBC + "print(libc.ptrace(16, os.getppid(), 0, 0))", 3, "ok", "-1"),
    "reads its parent's memory": (
        "import os\nopen(f'/proc/{os.getppid()}/mem', 'rb').read(1)",
        3,
        "error",
        "PermissionError",
    ),
    "writes outside": (f"open({MARK!r}, 'w').write('x')", 3, "error", "Error"),
    "writes into the Python installation": (
        "import os\nopen(os.__file__ + 'x', 'w').write('x')",
        3,
        "error",
        "Error",
    ),
    "writes a kernel setting": (
        "open('/proc/sys/vm/swappiness', 'r+').write('60')",
        3,
        "error",
        "Error",
    ),
    "opens raw devices": (
        "import glob\nfor p in glob.glob('/dev/[sv]d?') + ['/dev/mem']:\n"
        "    try: open(p, 'r+b'); print('open')\n    except OSError: pass\nprint('done')",
        3,
        "ok",
        "done",
    ),
    "fills the disk with one file": (
        "f = open('big', 'wb')\nwhile True: f.write(bytes(1 << 20))",
        10,
        "error",
        "Error",
    ),
    "fills the disk with many files": (
        "i = 0\nwhile True:\n    open(str(i), 'wb').write(bytes(10**7))\n    i += 1",
        10,
        "error",
        "No space left",
    ),
    "a hundred thousand empty files": (
        "for i in range(10**5): open(str(i), 'w').close()",
        10,
        "error",
        "No space left",
    ),
    "folders two thousand deep": (
        "import os\nfor i in range(2000): os.mkdir('d'); os.chdir('d')\nprint('a')",
        5,
        "ok",
        "a",
    ),
    "locks its own folder": ("import os\nopen('f', 'w')\nos.chmod('.', 0)\nprint('a')", 3, "ok", "a"),
    "loopback": (
        "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:9', timeout=2)",
        3,
        "error",
        "URLError",
    ),
    "internet": (
        "import socket\nsocket.create_connection(('1.1.1.1', 53), timeout=2)",
        3,
        "error",
        "Error",
    ),
    "name look-up": ("import socket\nsocket.getaddrinfo('example.com', 80)", 3, "error", "error"),
    "socket of a local service": (
        "import socket, glob\nfor p in glob.glob('/run/**/*.sock*', recursive=True) + ['/run/none']:\n"
        "    socket.socket(socket.AF_UNIX).connect(p)",
        3,
        "error",
        "Error",
    ),
    "socket by the 32-bit table of calls": (  # 359 is socket there; its code: mov eax, 359 ... int 0x80, ret
        "import ctypes, mmap\nm = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=7)\n"
        "m.write(bytes.fromhex('53b867010000bb01000000b90100000031d2cd805bc3'))\n"
        "f = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()\n"
        "assert f < 0, f",
        3,
        "ok killed",
        "",
    ),
    "datagram to a local socket": (
        "import socket as s\ns.socketpair(s.AF_UNIX, s.SOCK_DGRAM)[0].sendto(b'<13>hi', '/dev/log')",
        3,
        "error",
        "PermissionError",
    ),
    "shared memory that outlives the call": (
        LIBC + "print(libc.shmget(0x1234, 1 << 20, 0o1666))",
        3,
        "ok",
        "-1",
    ),
    "namespaces of its own": (LIBC + "print(libc.unshare(0x10000000))", 3, "ok", "-1"),
    "mounts": (LIBC + "print(libc.mount(b'none', b'/', None, 32, None))", 3, "ok", "-1"),
    "ignores the CPU limit": (
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
        1,
        "timeout",
        "timed out",
    ),
}

SIGNALS = {
    "kills its parent",
    "kills everything (kill -1)",
    "interrupts its parent",
}  # real without limits on them
NOT_ELSEWHERE = {name for name in PROGRAMS if "fork bomb" in name or "fills the disk" in name} | {
    "ten thousand threads",
    *SIGNALS,
    "limits its parent's descriptors",
    "datagram to a local socket",
    "a hundred thousand empty files",
    "writes into the Python installation",
    "writes a kernel setting",
    "opens raw devices",
    "loopback",  # this and the rest: cut off by these namespaces already
    "internet",
    "name look-up",
    "socket of a local service",
}


def processes() -> dict[int, str]:
    """Process id and state of each process that carries our mark in the environment it was started with."""
    found = {}
    for path in glob.glob("/proc/[0-9]*"):
        try:
            with open(f"{path}/environ", "rb") as environ, open(f"{path}/stat", "rb") as stat:
                if RUN.encode() in environ.read():
                    found[int(path[6:])] = stat.read().rsplit(b")", 1)[1].split()[0].decode()
        except OSError:
            pass
    return found


def not_confined(tool) -> bool:
    """Whether a program of this tool could signal any process of the user."""
    return any("signals" in missing for missing in tool._servers[""].missing)


def left_behind(before: set[int]) -> str:
    """What of a call is still there: new processes (given three seconds to go), or the file outside."""
    for _ in range(60):
        if not (new := set(processes()) - before):
            break
        time.sleep(0.05)
    if os.path.exists(MARK):
        os.unlink(MARK)
        return "a file written outside"
    return f"{len(new)} processes left" if new else ""


def verdict(name: str, status: str, output: str, seconds: float) -> str:
    """Empty when all is as it must be, else what is wrong."""
    _, limit_s, statuses, text = PROGRAMS[name]
    if seconds > limit_s + 2:
        return f"took {seconds:.1f} s"
    if status not in statuses.split():
        return f"status {status}"
    if any(secret in output for secret in HOST.values()):
        return "the host's secrets shown"
    if text not in output:
        return f"{text!r} not shown"
    return "" if len(output) <= 8100 else f"{len(output)} characters of output"


def in_subprocess(code: str, limit_s: float) -> tuple[str, str]:
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        return "timeout", f"{(error.stdout or b'').decode(errors='replace')} timed out"
    status = "ok" if done.returncode == 0 else "killed" if done.returncode < 0 else "error"
    return status, done.stdout + done.stderr + f"signal {-done.returncode} exit code {done.returncode}"


def in_smolagents(code: str, limit_s: float) -> tuple[str, str]:
    from smolagents.local_python_executor import LocalPythonExecutor

    executor = LocalPythonExecutor(
        additional_authorized_imports=["*"], timeout_seconds=max(1, round(limit_s))
    )
    executor.send_tools({})
    try:
        result = executor(code)
        return "ok", f"{result.logs}{result.output}"
    except Exception as error:
        late = "Timeout" in type(error).__name__
        return (
            "timeout" if late else "error",
            f"{executor.state.get('_print_outputs', '')}{error}" + " timed out" * late,
        )


def in_langchain(code: str, limit_s: float) -> tuple[str, str]:
    from langchain_experimental.utilities import PythonREPL

    output = PythonREPL().run(code, timeout=limit_s)
    if output == "Execution timed out":
        return "timeout", "timed out"
    return "error" if re.match(r"\w+\(", output) else "ok", output  # an exception comes back as its repr


OTHERS = {"subprocess": in_subprocess, "smolagents": in_smolagents, "langchain": in_langchain}


def one_elsewhere(runner: str, name: str) -> str:
    """One program under another runner, in namespaces of its own with 3 GB of memory; what is wrong.

    smolagents is given leave to import everything; as it comes, it refuses `import os` and most of this list.
    """
    limit_s = PROGRAMS[name][1]
    command = f"ulimit -v 3000000 -f 100000; {sys.executable} {os.path.abspath(__file__)} --runner {runner}"
    before = set(processes())
    folder = tempfile.mkdtemp()
    host = subprocess.Popen(
        [
            "unshare",
            "-Urpfmni",
            "--mount-proc",
            "--kill-child",
            "bash",
            "-c",
            f'{command} --one "{name}"; exit',
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=folder,
        start_new_session=True,  # some programs kill their process group
        env=os.environ | HOST | TAG,
    )
    try:
        out, _ = host.communicate(timeout=limit_s + 8)
    except subprocess.TimeoutExpired:
        host.kill()
        host.communicate()
        return "the host hangs"
    finally:
        left_behind(before)
        subprocess.run(["rm", "-rf", folder])
    if not out.strip().startswith("{"):
        return "the host died"
    reply = json.loads(out)
    return verdict(name, reply["status"], reply["output"], reply["seconds"]) or reply["left"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runner", default="tool", choices=["tool", *OTHERS])
    parser.add_argument("--one", help="internal: run this program here and print what came back as JSON")
    args = parser.parse_args()
    if args.one:
        for module in ("smolagents.local_python_executor", "langchain_experimental.utilities"):
            with suppress(ImportError):
                importlib.import_module(module)  # not in the time of the call
        start, before = time.monotonic(), set(processes())
        try:
            status, output = OTHERS[args.runner](*PROGRAMS[args.one][:2])
        except Exception as error:
            status, output = "host raised", repr(error)
        seconds = time.monotonic() - start
        left = left_behind(before)
        print(json.dumps({"status": status, "output": output, "seconds": seconds, "left": left}))
        return
    passed = 0
    print("| program | returned | seconds | wrong |\n|---|---|---:|---|")
    if args.runner == "tool":
        from tools import PythonTool

        os.environ.update(HOST | TAG)
        with PythonTool(workers=1, memory_mb=1024) as tool:
            for name, (code, limit_s, _, _) in PROGRAMS.items():
                if name in SIGNALS and not_confined(tool):
                    continue
                before, start = set(processes()), time.monotonic()
                result = tool.run(code, timeout_s=limit_s)
                seconds = time.monotonic() - start  # until the tool has cleaned up
                wrong = verdict(name, result.status, result.output, seconds) or left_behind(before)
                if tool.run("print(1)").output != "1":
                    wrong += " the next call fails"
                passed += not wrong
                print(f"| {name} | {result.status} | {seconds:.2f} | {wrong} |", flush=True)
    else:
        for name in PROGRAMS:
            start = time.monotonic()
            wrong = "not run" if name in NOT_ELSEWHERE else one_elsewhere(args.runner, name)
            passed += not wrong
            print(f"| {name} | | {time.monotonic() - start:.2f} | {wrong} |", flush=True)
    run = len(PROGRAMS) - (len(NOT_ELSEWHERE) if args.runner != "tool" else 0)
    print(f"\n{passed} of {run} as they must be")


if __name__ == "__main__":
    main()
