"""What a call of the Python tool costs, beside a new Python for each call, in the same run.

python bench/tools.py            # about a minute
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from tools import PythonTool

# calls of ours; a tenth of it of subprocess
PROGRAMS = {"print(1)": 300, "import numpy, sympy; print(1)": 100}
# One that does not catch ends with an error if it comes to the limit of processes before its time is up: the
# count of errors would depend on the load.
FORK_BOMB = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"

# The least that a process for each call costs: fork, compile, run, exit; no limits, no isolation, no output
# read, in a Python that has little memory to share.
FLOOR = """
import ast, gc, os, time
def call():
    if not (pid := os.fork()):
        exec(compile(ast.parse("print(1)"), "", "exec"), {})
        os._exit(0)
    os.waitpid(pid, 0)
[call() for _ in range(50)], gc.collect(), gc.freeze()
start = time.perf_counter()
[call() for _ in range(500)]
print((time.perf_counter() - start) * 2)
"""


def cpu_s(pids: list[int]) -> float:
    """CPU seconds of these processes and of their children that have ended."""
    ticks = 0
    for pid in pids:
        with open(f"/proc/{pid}/stat") as file:
            ticks += sum(map(int, file.read().rsplit(")", 1)[1].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def below(pid: int) -> list[int]:
    """The process and all below it."""
    found = [pid]
    for pid in found:
        try:
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children") as file:
                    found += map(int, file.read().split())
        except OSError:
            pass
    return found


def new_python(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)


def timed(call, count: int) -> list[float]:
    """Milliseconds of each of count calls, one after the other."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - start))
    return sorted(times)


def per_second(call, count: int, at_once: int) -> float:
    """Calls a second when at_once threads make them."""
    start = time.perf_counter()
    threads = [
        threading.Thread(target=lambda: [call() for _ in range(count // at_once)]) for _ in range(at_once)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return count // at_once * at_once / (time.perf_counter() - start)


def main() -> None:
    start = time.perf_counter()
    tool = PythonTool(workers=8)
    first = time.perf_counter()
    tool.run("print(1)")
    done = time.perf_counter()
    print(f"ready after {1000 * (first - start):.0f} ms, first call in {1000 * (done - first):.1f} ms")
    start = time.perf_counter()
    tool.run("import numpy, sympy; print(1)")
    print(f"first call with numpy and sympy {1000 * (time.perf_counter() - start):.0f} ms")

    print("\n| program | runner | median ms | 95 % ms | calls/s, one at a time | calls/s, 8 at once |")
    print("|---|---|---:|---:|---:|---:|")
    for code, count in PROGRAMS.items():
        rates = []
        for runner, call, n in (
            ("subprocess.run", lambda c=code: new_python(c), max(10, count // 10)),
            ("PythonTool", lambda c=code: tool.run(c), count),
        ):
            per_second(call, 8, 8)  # start what starts when first needed
            times = timed(call, n)
            rates.append((1000 / statistics.mean(times), per_second(call, 8 * max(2, n // 8), 8)))
            print(
                f"| `{code}` | {runner} | {statistics.median(times):.2f} | {times[int(0.95 * n)]:.2f} "
                f"| {rates[-1][0]:.0f} | {rates[-1][1]:.0f} |",
                flush=True,
            )
        print(
            f"| | **ratio** | | | **{rates[1][0] / rates[0][0]:.1f}** | **{rates[1][1] / rates[0][1]:.1f}** |"
        )

    floor = subprocess.run([sys.executable, "-c", FLOOR], capture_output=True, check=True, text=True).stdout
    print(f"a bare fork that compiles, runs and exits: {float(floor.split()[-1]):.2f} ms")

    for code, count in PROGRAMS.items():
        mine, theirs = time.process_time(), cpu_s(below(os.getpid())[1:])
        for _ in range(count):
            tool.run(code)
        mine, theirs = time.process_time() - mine, cpu_s(below(os.getpid())[1:]) - theirs
        print(
            f"CPU a call of `{code}`: host {1000 * mine / count:.2f} ms, tool {1000 * theirs / count:.2f} ms"
        )

    start = time.perf_counter()
    futures = [tool.submit("import time; time.sleep(1)") for _ in range(8)]
    [future.result() for future in futures]
    print(f"8 calls that sleep 1 s: {time.perf_counter() - start:.2f} s")

    bad = ("while True: pass", "import os; os.kill(os.getpid(), 9)", FORK_BOMB)
    descriptors = len(os.listdir("/proc/self/fd"))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    futures = [tool.submit(bad[i // 3 % 3] if i % 3 == 0 else "print(1)", timeout_s=0.2) for i in range(1000)]
    statuses = [future.result().status for future in futures]
    took = time.perf_counter() - start
    processes = below(os.getpid())
    states = [open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0] for pid in processes]
    print(
        f"1,000 calls, a third of which hang, die or fork for ever: {took:.1f} s, "
        f"{json.dumps({s: statuses.count(s) for s in sorted(set(statuses))})}; "
        f"descriptors {len(os.listdir('/proc/self/fd')) - descriptors:+d}, "
        f"peak memory {(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024:+.1f} MB, "
        f"zombies {states.count('Z')}, processes {len(processes) - 1} (servers and workers)"
    )
    start = time.perf_counter()
    tool.close()
    print(
        f"close: {1000 * (time.perf_counter() - start):.0f} ms, processes left {len(below(os.getpid())) - 1}"
    )


if __name__ == "__main__":
    main()
