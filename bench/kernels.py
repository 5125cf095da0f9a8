"""Speed and memory of kernels/, and a check that the Triton kernels compile well where there is no GPU.

    python bench/kernels.py                time and peak memory against naive torch, on the CPU or a GPU
    python bench/kernels.py --rows 10000 --hidden 128 --vocab 600               the same at another size
    python bench/kernels.py --compile      compile every kernel for sm_80, sm_90, sm_100 and gfx942

Timing. Each variant lives in a process of its own, so that peaks of memory do not mix: on the CPU the
high-water mark of resident memory above the loaded tensors, on a GPU what torch allocated above them;
gradients count. The processes take turns, one sample each a round, each sample beside a copy and
a product h w^T timed just before it: on a shared machine ratios are worth more than seconds. Medians over
the rounds. The last line is a JSON object. Where other jobs compete for the cores, use OMP_NUM_THREADS=1 and
read cpu_seconds_vs_naive: with more threads each waits for the one that was taken off its core.

Compiling. In a process without the interpreter, into an empty cache. Printed for every kernel and target:
registers a thread, shared memory, spills (bytes of stack and local memory, plus instructions that reach it)
and matrix instructions. Exit status 1 on any spill, and on a product without its target's matrix
instruction. Left out: what no compiler can tell (speed, races), and tuning.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[0] = ROOT  # in place of this folder, whose kernels.py would hide the folder kernels/

# ---------------------------------------------------------------- time and memory


def naive(h, w, t):
    import torch

    logp = torch.log_softmax((h @ w.t()).float(), -1)
    return logp.gather(1, t[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def naive_rows(z, t):
    import torch

    logp = torch.log_softmax(z.float(), -1)
    return logp.gather(1, t[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def torch_linear(h, w, t, chunked=False):
    import torch
    from torch.nn.functional import linear_cross_entropy  # torch 2.13

    options = torch.nn.LinearCrossEntropyOptions() if chunked else None
    return (-linear_cross_entropy(h, w, t, reduction="none", options=options),)


def liger(h, w, t):
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    out = liger_fused_linear_cross_entropy(h, w, t, reduction="sum")
    return (-(getattr(out, "loss", out) / len(t)).expand(len(t)),)


def variants(gpu):
    import torch

    from kernels.linear_logprob import linear_logprob_entropy
    from kernels.logprob import logprob_entropy

    linear = {  # (hidden, weight, targets) -> (logp,) or (logp, entropy)
        "naive": naive,
        "linear_logprob_entropy": linear_logprob_entropy,
        "linear_logprob_entropy, logp only": lambda *a: linear_logprob_entropy(*a)[:1],
        "F.linear_cross_entropy, logp only": torch_linear,
    }
    rows = {  # (logits, targets) -> the same
        "rows: naive": naive_rows,
        "rows: logprob_entropy": logprob_entropy,
    }
    if gpu:
        linear["naive, torch.compile"] = torch.compile(naive)
        linear["F.linear_cross_entropy chunked, logp only"] = lambda *a: torch_linear(*a, chunked=True)
        linear["liger-kernel, sum of logp only"] = liger
        rows["rows: naive, torch.compile"] = torch.compile(naive_rows)
    return {**linear, **rows}


def resident(key) -> int:
    """Bytes of VmRSS (now) or VmHWM (high-water mark) of this process."""
    return int(re.search(rf"{key}:\s+(\d+)", open("/proc/self/status").read())[1]) * 1024


def worker(name, n, h, v) -> None:
    """Print the peak of a first run, then a sample of times for each line that arrives."""
    import torch

    gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    f = variants(gpu)[name]

    def tensors(n, h, v):
        torch.manual_seed(0)
        hidden = torch.randn(n, h, device=device).to(dtype)
        weight = (torch.randn(v, h, device=device) * 3 / h**0.5).to(dtype)
        inputs = [(hidden @ weight.t())] if name.startswith("rows") else [hidden, weight]
        upstream = torch.randn(n, device=device)
        return [x.requires_grad_() for x in inputs], torch.randint(v, (n,), device=device), upstream

    def timed(call) -> float:
        wait, repeat = (torch.cuda.synchronize, 10) if gpu else (lambda: None, 1)
        if gpu:
            call()  # memory is taken again after each round
        wait()
        start = time.perf_counter()
        for _ in range(repeat):
            call()
        wait()
        return (time.perf_counter() - start) / repeat

    def both(inputs, targets, upstream):
        for x in inputs:
            x.grad = None
        outputs = f(*inputs, targets)
        torch.autograd.backward(outputs, [upstream] * len(outputs))

    def forward(inputs, targets, upstream):
        with torch.no_grad():
            f(*inputs, targets)

    def ceilings() -> dict:
        x, y = torch.randn(n, h, device=device).to(dtype), torch.randn(v, h, device=device).to(dtype)
        out = torch.zeros(n, v, dtype=dtype, device=device)
        gemm = timed(lambda: torch.mm(x, y.t(), out=out))
        source = torch.ones(1 << (30 if gpu else 26), dtype=torch.uint8, device=device)
        sink = source.clone()
        return {"gemm": gemm, "copy": timed(lambda: sink.copy_(source)) / (2 * source.numel())}  # s, s a byte

    both(*tensors(8, h, 128))  # threads, libraries and compilers start before memory is watched
    args = tensors(n, h, v)
    if gpu:
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        both(*args)
        peak = torch.cuda.max_memory_allocated() - base
    else:
        open("/proc/self/clear_refs", "w").write("5")  # high-water mark back to now
        base = resident("VmRSS")
        both(*args)
        peak = resident("VmHWM") - base
    print(json.dumps({"peak_mb": peak / 1e6}), flush=True)
    for _ in sys.stdin:
        for x in args[0]:
            x.grad = None  # freed before the clock starts, as between two steps
        sample = ceilings() | {"forward": timed(lambda: forward(*args))}
        start = time.process_time()
        sample["both"] = timed(lambda: both(*args))
        sample["both_cpu"] = time.process_time() - start
        if gpu:
            torch.cuda.empty_cache()  # room for the other processes
        print(json.dumps(sample), flush=True)


def measure(n, h, v, rounds, only) -> dict:
    import torch

    gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, {device}; N {n}, H {h}, V {v}, {'bfloat16' if gpu else 'float32'}")
    runs = {}
    for name in [name for name in variants(gpu) if re.search(only, name)]:
        command = [sys.executable, os.path.abspath(__file__), "--worker", name]
        command += ["--rows", str(n), "--hidden", str(h), "--vocab", str(v)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        first = process.stdout.readline()
        if not first:
            print(f"{name}: not run (exit {process.wait()})")
            continue
        runs[name] = {"process": process, "samples": [], **json.loads(first)}
    for i in range(rounds):
        for run in runs.values():
            print(i, file=run["process"].stdin, flush=True)
            line = run["process"].stdout.readline()
            run["samples"].append(
                json.loads(line) if line else sys.exit(f"{run['process'].args} died in round {i}")
            )
    samples = [s for run in runs.values() for s in run["samples"]]
    gemm, copy = (statistics.median(s[key] for s in samples) for key in ("gemm", "copy"))
    print(f"one product h w^T: {2e-12 * n * h * v / gemm:.3f} TFLOP/s; a copy: {1e-12 / copy:.4f} TB/s")
    print("products: fwd+bwd, in that product; of copy: rate of the bytes that must move, fwd and fwd+bwd")
    print(f"{'':44s}{'forward s':>11s}{'fwd+bwd s':>11s}{'products':>10s}{'of copy':>12s}{'peak MB':>9s}")
    for name, run in runs.items():
        run["process"].stdin.close()
        run["process"].wait()
        median = {key: statistics.median(s[key] for s in run["samples"]) for key in run["samples"][0]}
        run["products"] = statistics.median(s["both"] / s["gemm"] for s in run["samples"])
        size = n * v * (2 if gpu else 4)  # rows: one read forward; one read and one write backward
        run["copy_share"] = statistics.median(3 * size * s["copy"] / s["both"] for s in run["samples"])
        run["copy_share_forward"] = statistics.median(size * s["copy"] / s["forward"] for s in run["samples"])
        run.update(median)
        shares = (run["copy_share_forward"], run["copy_share"]) if name.startswith("rows") else ()
        print(f"{name:44s}{run['forward']:11.4f}{run['both']:11.4f}{run['products']:10.2f}", end="")
        print(f"{' '.join(f'{x:.2f}' for x in shares):>12s}{run['peak_mb']:9.0f}")
    return runs


# ---------------------------------------------------------------- compiling for GPUs without one

MATRIX = {80: r"\bHMMA", 90: r"\bHGMMA", 100: r"\bUTCHMMA", "gfx942": r"\bv_mfma_"}


def kernels_to_compile() -> list:
    """(name, kernel, dtypes of pointers, constants and options, sizes divisible by 16?, is a product?)"""
    from kernels import linear_logprob, logprob

    cases = []
    for v in (151936, 151669):  # the second one breaks alignment
        config, even = logprob.ROW, v % 16 == 0
        for z in ("bf16", "fp32"):
            cases.append((f"row sums, {z}, V {v}", logprob.stats_kernel, {"z_ptr": z}, config, even, False))
        for z, out in (("bf16", "bf16"), ("fp32", "bf16"), ("fp32", "fp32")):
            for entropy in (False, True) if z == out == "bf16" else (True,):
                name = f"row gradient, {z} to {out}, V {v}{', entropy' if entropy else ''}"
                constants = {**config, "ENTROPY": entropy}
                types = {"z_ptr": z, "out_ptr": out}
                cases.append((name, logprob.gradient_kernel, types, constants, even, False))
    for n in (64, linear_logprob.FUSED_ROWS):
        constants = {**linear_logprob.fused_config(n), "UPCAST": False}
        types = {"x_ptr": "bf16", "w_ptr": "bf16"}
        cases.append(
            (f"fused forward, bf16, N {n}", linear_logprob.fused_kernel, types, constants, True, True)
        )
    return cases


def compiled(kernel, types, constants, even, target):
    """As the launcher would: pointers, strides and sizes that are multiples of 16 are said to be so."""
    import triton
    from triton.compiler import ASTSource

    names = kernel.arg_names
    fixed = {k: x for k, x in constants.items() if k in names}
    pointer = {k: "*" + types.get(k, "i64" if k == "t_ptr" else "fp32") for k in names if k.endswith("_ptr")}
    signature = {k: "constexpr" if k in fixed else pointer.get(k, "i32") for k in names}
    aligned = [k for k in names if k in pointer or (even and k not in fixed and k != "n")]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs=fixed,
        attrs={(names.index(k),): [["tt.divisibility", 16]] for k in aligned},
    )
    options = {k: x for k, x in constants.items() if k not in names}
    return triton.compile(source, target=target, options=options)


def resources(binary, target) -> tuple:
    """Registers a thread, spilled registers, assembly."""
    import triton

    if target.backend == "hip":
        text = binary.asm["amdgcn"]
        count = {k: int(x) for k, x in re.findall(r"\.(\w+):\s+(\d+)", text)}
        keys = ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
        return count["vgpr_count"], sum(count[k] for k in keys), text
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(binary.asm["cubin"])
        f.flush()
        read = [
            subprocess.run([tool, flag, f.name], capture_output=True, text=True, check=True).stdout
            for flag in ("-res-usage", "-sass")
        ]
    registers, stack, local = map(int, re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", read[0]).groups())
    return registers, stack + local + len(re.findall(r"\b(?:LDL|STL)\b", read[1])), read[1]


def compile_all() -> int:
    """Compile and print the table; the number of faults."""
    import triton
    from triton.backends.compiler import GPUTarget

    targets = [GPUTarget("cuda", arch, 32) for arch in (80, 90, 100)] + [GPUTarget("hip", "gfx942", 64)]
    head = [t.arch if t.backend == "hip" else f"sm_{t.arch}" for t in targets]
    print(f"triton {triton.__version__}; registers a thread / shared KB / spills / matrix instructions")
    print(f"{'':44s}" + "".join(f"{name:>20s}" for name in head))
    cases, faults = kernels_to_compile(), []
    for name, kernel, types, constants, even, is_product in cases:
        line = f"{name:44s}"
        for target, title in zip(targets, head):
            binary = compiled(kernel, types, constants, even, target)
            registers, spills, text = resources(binary, target)
            matrix = len(re.findall(MATRIX[target.arch], text))
            line += f"{f'{registers} / {binary.metadata.shared // 1024} / {spills} / {matrix}':>20s}"
            faults += [f"{name} on {title}: {spills} spills"] * (spills > 0)
            faults += [f"{name} on {title}: no {MATRIX[target.arch]}"] * (is_product and matrix == 0)
        print(line, flush=True)
    print("\n".join(f"FAULT {f}" for f in faults) or f"{len(cases) * len(targets)} binaries, no fault")
    return len(faults)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=2048, help="tokens N")
    parser.add_argument("--hidden", type=int, default=576, help="width H of the hidden states")
    parser.add_argument("--vocab", type=int, default=49152, help="vocabulary V")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each variant")
    parser.add_argument("--only", default="", help="variants whose name matches this pattern")
    parser.add_argument("--compile", action="store_true", help="compile check instead of timing")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    size = args.rows, args.hidden, args.vocab
    if args.worker == "compile":
        sys.exit(min(compile_all(), 1))
    if args.worker:
        return worker(args.worker, *size)
    if args.compile:
        try:
            import triton  # noqa: F401
        except ImportError:
            return print("Triton is not installed: compile check skipped")
        with tempfile.TemporaryDirectory() as cache:
            env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache}
            sys.exit(
                subprocess.call([sys.executable, os.path.abspath(__file__), "--worker", "compile"], env=env)
            )
    runs = measure(*size, args.rounds, args.only)
    ours, base = runs.get("linear_logprob_entropy"), runs.get("naive")
    result = {
        name: {k: x for k, x in run.items() if k not in ("process", "samples")} for name, run in runs.items()
    }
    if ours and base:
        pairs = zip(ours["samples"], base["samples"])
        wall, cpu = zip(*((a["both"] / b["both"], a["both_cpu"] / b["both_cpu"]) for a, b in pairs))
        import torch

        device = "gpu" if torch.cuda.is_available() else "cpu"
        result[f"{device}_time_vs_naive"] = statistics.median(wall)
        result[f"{device}_peak_mb"] = ours["peak_mb"]
        if device == "cpu":
            result["cpu_seconds_vs_naive"] = statistics.median(cpu)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
