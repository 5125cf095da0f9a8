"""Will it fit, and how long is a step: said before the first step, tried out, and compared after it.

    python fit.py --preset qwen3-4b --ranks 8 --memory 80     # needs no GPU, no weights and no torchrun

All from the configuration. Weights are counted on the meta device. Activations are not a formula: one and two
layers run forward and backward on fake tensors, which have a size and no content, a tracker adds up what is
alive, and the other layers follow in proportion. A rank's memory is summed at five moments:

    load      the whole model in float32, beside the sampler's copy
    sample    prompts are fed beside all rows that decode, and their logits
    head      the head of a full packed row goes backward: the activations of every layer are kept
    backward  a layer runs again and goes backward; its neighbour is gathered, the one before it reduced
    update    the gradient of embedding and head is reduced

GB are 10^9 bytes. Left out: NCCL's buffers and fragmentation, for which RESERVE is assumed; attention without
flash kernels, quadratic in the length; the tools' time; CUDA graphs (faster decoding, and memory of their
own); more than one node; the host's memory, where each rank loads the whole model in float32 and makes the
sampler's copy (of 7B on 8 ranks 370 GB for that moment), and keeps what --offload moves there.
"""

import copy
import os
import re
import resource
import sys
import time
import warnings
import weakref
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

import policy as net
from attention import Segments, trunk
from config import PRESETS, Config, check
from kernels.linear_logprob import slices
from kernels.logprob import CACHED
from options import check_values, fail, parse_args

warnings.filterwarnings("ignore", message=".*gradient_checkpointing_enable")
MOMENTS = ("load", "sample", "head", "backward", "update")
RESERVE = 0.06  # of a GPU's memory, for CUDA's context, NCCL and fragmentation: assumed
USE = 0.4  # of the speed of matrix products, which training reaches: assumed
LAUNCH = 0.7e-3  # seconds a layer and decoding step, launched from Python; published: 19.6 ms for 28 layers
LENGTH = 1 / 3  # mean answer, as a share of max_new_tokens; the longest takes them all: assumed
PROMPT = 1 / 8  # mean prompt, as a share of max_prompt: assumed
PREFILL = 4096  # tokens of prompts that rollout.Sampler feeds in one step
H100 = 989e12, 3.35e12  # bfloat16 FLOP/s, bytes/s of the data sheet
FIELDS = """model_type hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
head_dim vocab_size tie_word_embeddings max_position_embeddings""".split()
MODELS = {  # of the presets, so that the table needs no network
    "": ("qwen3", 128, 384, 2, 4, 2, 32, 640, True, 512),
    "Qwen/Qwen3-0.6B": ("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, True, 40960),
    "Gen-Verse/Qwen3-4B-RA-SFT": ("qwen3", 2560, 9728, 36, 32, 8, 128, 151936, True, 262144),
    "Gen-Verse/Qwen2.5-7B-RA-SFT": ("qwen2", 3584, 18944, 28, 28, 4, 128, 152064, False, 32768),
}


def peak_memory(device: str) -> int:
    """Largest memory so far in bytes: torch's on a GPU, the whole process's on CPU."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated()
    with suppress(OSError):  # of this program alone; getrusage's is also of the one that started it
        return 1024 * int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


LIBRARIES = -(-peak_memory("cpu") // 10**8) * 10**8  # the interpreter and what is imported, about


class Tracker(TorchDispatchMode):
    """Bytes of the tensors made under it that are alive, and their peak. A storage with several views counts
    once, those of `old` not at all."""

    def __init__(self, old=()):
        super().__init__()
        self.live = self.peak = 0
        self.old = [t.untyped_storage() for t in old]  # held: a freed one's number is given to another
        self.seen = {storage._cdata for storage in self.old}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for storage in (t.untyped_storage() for t in tree_leaves(out) if isinstance(t, torch.Tensor)):
            if storage._cdata not in self.seen:
                self.seen.add(storage._cdata)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        return out

    def _free(self, key: int, size: int):
        self.seen.discard(key)
        self.live -= size


def layers_memory(config, n: int, dtype, checkpointing=False, grad=True, windows=True) -> tuple[int, int]:
    """(bytes alive after the forward, peak up to the end of the backward) of all layers for one sequence of n
    tokens, weights and their gradients apart. windows: sliding ones take a mask, as on CPU."""
    found, seg = [], Segments([n])
    for layers in (1, 2):
        small = copy.deepcopy(config)
        small.num_hidden_layers, small.vocab_size, small.pad_token_id = layers, 96, None
        if getattr(config, "layer_types", None):
            small.layer_types = config.layer_types[:layers]
        with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True):
            model = AutoModelForCausalLM.from_config(small, dtype=dtype).train()
            for module in model.modules():
                if not windows and hasattr(module, "sliding_window"):
                    module.sliding_window = None
            for weight in model.parameters():
                weight.register_post_accumulate_grad_hook(lambda w: setattr(w, "grad", None))
            if checkpointing:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            with torch.set_grad_enabled(grad), Tracker(model.parameters()) as tracker:
                hidden = trunk(model, torch.zeros(n, dtype=torch.long), seg)
                alive = tracker.live
                if grad:
                    hidden.backward(torch.empty_like(hidden))
        found.append((alive, tracker.peak))
    return tuple(one + (config.num_hidden_layers - 1) * (two - one) for one, two in zip(*found))


def head_memory(n: int, v: int, h: int, b: int, device: str) -> int:
    """Peak bytes of the chunked head on hidden [n, h] and weight [v, h] of b bytes a number, without the
    weight's gradient: a slice of logits, their gradient (in place in float32), d hidden in float32, hidden
    three times, sums; on CPU two blocks of rows."""
    parts = slices(n, v, torch.device(device))
    scratch = 8 * min(CACHED, n * parts[0][1]) if device == "cpu" else 0
    hidden = (4 * min(2, len(parts)) + 3 * b) * n * h
    return (4 + b % 4) * n * parts[0][1] + hidden + 16 * n * len(parts) + scratch


@dataclass
class Plan:
    """What is predicted. items: bytes a rank needs, by item and moment; speed: tokens/s, seconds a step."""

    memory: float  # bytes that a rank may take of its device
    items: dict[str, dict[str, float]]
    cache_tokens: int
    speed: dict[str, float]
    advice: str = ""

    def total(self, moment: str) -> float:
        return sum(item.get(moment, 0) for item in self.items.values())

    @property
    def need(self) -> float:
        return max(map(self.total, MOMENTS))

    def __str__(self):
        lines = [f"{'will it fit: GB a rank':49s}" + "".join(f"{m:>9s}" for m in MOMENTS)]
        for name, item in {**self.items, "sum": {m: self.total(m) for m in MOMENTS}}.items():
            if item:
                name += f" of {self.cache_tokens:,} tokens" if name == "KV cache" else ""
                cells = (f"{item[m] / 1e9:9.2f}" if item.get(m) else f"{'-':>9s}" for m in MOMENTS)
                lines.append(f"  {name:47s}" + "".join(cells))
        s, fits = self.speed, self.advice or f"It fits in {self.memory / 1e9:.1f} GB."
        return "\n".join(lines) + (
            f"\n{fits}\nPredicted: {s['tokens/s']:,.0f} tokens/s in the rollout; {s['step']:.3g} s a step, "
            f"{s['rollout']:.3g} rollout and {s['train']:.3g} training.\nAssumed: mean answer {LENGTH:.2f} "
            f"of the longest, mean prompt {PROMPT:.3f}; decoding {LAUNCH * 1e3} ms a layer, "
            f"{s['bandwidth'] / 1e12:.3g} TB/s; training at {USE:.0%} of {s['flops'] / 1e12:.3g} TFLOP/s; "
            "tools take no time."
        )


def plan(config: Config, model_config, ranks: int, device: str, memory: float, rates: tuple) -> Plan:
    """memory: bytes a rank may take; rates: (FLOP/s, bytes/s) of the device."""
    cpu, c = device == "cpu", model_config
    dtype = net.compute_dtype(config.dtype, device)
    b = dtype.itemsize
    alone = ranks == 1 and cpu and b == 4  # no FSDP, no second copy for the sampler
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(c)
    weights = sum(w.numel() for w in model.parameters())
    shard = sum(-(-len(w) // ranks) * w[0].numel() for w in model.parameters())
    layer = sum(w.numel() for w in model.base_model.layers[0].parameters())
    root = weights - c.num_hidden_layers * layer  # embedding, last norm, head: FSDP's outermost group
    head = model.get_output_embeddings().weight
    embedding = 0 if head is not model.get_input_embeddings().weight else head.numel()  # of the same weight
    (v, h), head = head.shape, head.numel()
    longest = min(config.max_prompt + config.max_new_tokens, c.max_position_embeddings)
    row = max(config.tokens_per_row, longest)  # a sequence longer than a row has a row of its own
    rows = min(config.max_rows, -(-config.batch // ranks))

    heads, kv = c.num_attention_heads, getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    dim = getattr(c, "head_dim", None) or c.hidden_size // heads
    # FlashAttention 2, backward: d query in float32, d key and d value of each query head
    flash = 0 if cpu else row * heads * dim * (4 + 2 * b * (kv != heads))
    kept, peak = (size / longest * row for size in layers_memory(c, longest, dtype, not cpu, windows=cpu))
    prefill = layers_memory(c, PREFILL + rows, dtype, grad=False, windows=False)[1]
    masters = 4 * shard if cpu or not config.offload else 0
    load = 4 * weights if cpu else masters + 4 * root  # on a GPU layer by layer
    drawn = min(rows * v, max(v, 2**22)) if cpu else rows * v  # logits alive at once in the sampler
    copied = 0 if alone else b * weights
    reference = b * (shard + (0 if alone else root)) if config.kl else 0  # its root group stays gathered
    # FSDP: gathered, then gradients before the reduction, then what travels through it, in float32
    moving = {"head": 4 * head, "backward": 4 * head}
    if not alone:
        moving = {"head": b * (root + head), "backward": b * (root + 2 * layer + head + layer) + 4 * layer,
                  "update": b * (2 * root + embedding) + 4 * root}  # fmt: skip

    def during(size: float, *moments: str) -> dict[str, float]:
        return dict.fromkeys(moments, size) if size else {}

    run = MOMENTS[1:]
    items = {
        f"weights, float32, 1/{ranks} of {weights:,}": {"load": load, **during(masters, *run)},
        "AdamW's two states": during(2 * masters, *run),
        "gradients, float32": during(masters, *run[1:]),
        "gathered weights, gradients in reduction": moving,
        "the sampler's copy of the weights": during(copied, *MOMENTS),
        "reference policy": during(reference, *MOMENTS),
        "KV cache": {},
        f"activations kept, row of {row:,} tokens": during(kept, "head", "backward"),
        "one layer at work": {"sample": prefill, "backward": peak - kept},
        "workspace of attention": during(flash, "backward"),
        "logits": {"sample": 28 * drawn, "head": head_memory(row, v, h, b, device)},
        "interpreter, libraries" if cpu else f"CUDA, NCCL, fragmentation: {RESERVE:.0%} assumed":
            during(LIBRARIES if cpu else RESERVE * memory, *MOMENTS),
    }  # fmt: skip
    p = Plan(memory, items, 0, {})
    a_token = 2 * c.num_hidden_layers * kv * dim * b  # bytes of its keys and values
    left = min(4e9, memory - p.need) if cpu else memory - max(map(p.total, run))
    fits = max(longest, min(config.max_rows * longest, int(left / a_token) // 256 * 256))
    p.cache_tokens = config.cache_tokens or fits
    items["KV cache"] = during(p.cache_tokens * a_token, *run)
    if cpu:  # a layer's keys and values are gathered a row or a megabyte at a time
        items["one layer at work"]["sample"] += longest * a_token / c.num_hidden_layers

    (flops, bandwidth), answer = rates, LENGTH * config.max_new_tokens
    mine, length = config.batch / ranks, answer + PROMPT * config.max_prompt
    steps = max(mine * answer / max(1, min(rows, p.cache_tokens / length)), config.max_new_tokens)
    width = mine * answer / steps  # rows a decoding step, on average
    read = b * weights + a_token * width * length / 2
    step = LAUNCH * c.num_hidden_layers + max(read / bandwidth, 2 * weights * width / flops)
    passes = 3 + (not cpu) + (config.old_logp == "trainer" and config.mini_batches > 1) + bool(config.kl)
    products = 2 * (layer * c.num_hidden_layers + head) + 2 * c.num_hidden_layers * heads * dim * length
    train = mine * length * passes * products / (USE * flops)
    p.speed = {"tokens/s": config.batch * answer / (steps * step), "rollout": steps * step, "train": train,
               "step": steps * step + train, "flops": flops, "bandwidth": bandwidth}  # fmt: skip
    return p


def predict(config, model_config, ranks: int, device: str, memory: float = 0, rates=None) -> Plan:
    """The plan for this device, measured where nothing is given; if it does not fit, with what to lower."""
    if device == "cpu" and not memory:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        with suppress(OSError, ValueError):  # a container may have less; "max": it has not
            memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
        memory /= net.ranks_here(ranks)
        with suppress(OSError):  # resets the peak: a cold start may have had a higher one
            Path("/proc/self/clear_refs").write_text("5")
    where = model_config, ranks, device, memory or torch.cuda.mem_get_info()[1], rates or measure(device)
    first = p = plan(config, *where)
    lowered, quarter = {}, config.max_new_tokens // 4
    row, short = (
        min(config.tokens_per_row, config.max_prompt + new, model_config.max_position_embeddings)
        for new in (config.max_new_tokens, quarter)
    )
    for name, value in [("cache_tokens", None), ("tokens_per_row", row), ("offload", True),
                        ("max_new_tokens", quarter), ("tokens_per_row", short)]:  # fmt: skip
        if p.need > p.memory and getattr(config, name) != value and (name, device) != ("offload", "cpu"):
            config = replace(config, **{name: value})
            p = plan(config, *where)
            lowered[name] = value
    if first.need > first.memory:
        if "cache_tokens" in lowered:
            lowered["cache_tokens"] = p.cache_tokens  # what the last plan leaves
        options = (f"--{name}" if value is True else f"--{name} {value}" for name, value in lowered.items())
        way = " ".join(options)
        way = way if p.need <= p.memory else "more ranks, or a smaller model"
        missing = (first.need - first.memory) / 1e9
        first.advice = (
            f"IT DOES NOT FIT in {p.memory / 1e9:.1f} GB, {missing:.2f} GB are missing: take {way}."
        )
    return first


def measure(device: str) -> tuple[float, float]:
    """(FLOP/s of a matrix product in the dtype of compute, bytes/s of a copy, read and written)."""
    n, dtype = (512, torch.float32) if device == "cpu" else (4096, torch.bfloat16)
    a, (x, y) = torch.ones(n, n, dtype=dtype, device=device), torch.ones(2, 2 * n**2, device=device)
    times = []
    for job in [lambda: a @ a, lambda: y.copy_(x)] * 4:
        start = time.perf_counter()
        job()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 2 * n**3 / min(times[::2]), 2 * x.nbytes / min(times[1::2])


@contextmanager
def holding(item: str, way_out: str):
    """Out of memory in here ends the program with one sentence: what did not fit, and what to lower."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and not re.search("out of memory|t allocate mem", str(error)):
            raise
        reason = (str(error) or "MemoryError").splitlines()[0]
        fail(f"out of memory: {item} did not fit; {way_out} ({reason})")


def rehearse(plan: Plan, policy: net.Policy, optimizer, sampler, config, device: str, ref=None) -> None:
    """The largest things of a run, once, before its first step: memory runs out now and not in hour 20.

    With the cache and the sampler's copy in place: the longest prompt for max_rows samples, then a full row,
    sequences of the longest length, through the old log-prob, forward and backward, beside tensors as large
    as AdamW's states and the gradients of the micro-batches before. No optimizer step, no random number:
    nothing changes by a bit. On CPU, which swaps or kills, a plan that does not fit ends the program instead,
    and one that needs less than 2 GB is not rehearsed.
    """
    if device == "cpu" and plan.advice:
        fail(plan.advice)
    small = torch.tensor(float(plan.need < 2e9 + LIBRARIES))
    dist.all_reduce(small, op=dist.ReduceOp.MIN)  # LIBRARIES differ: all ranks rehearse, or none
    if device == "cpu" and small:
        return
    longest = sampler.max_len
    total = max(config.tokens_per_row, longest)
    lengths = [longest] * (total // longest) + [total % longest] * (total % longest > 0)
    row = net.packed_row([[0] * n for n in lengths], [[1] * n for n in lengths], device)
    way = f"lower --cache_tokens, --tokens_per_row (not below {longest}: then --max_new_tokens)"
    with holding("the logits of all rows that decode", "lower --max_rows"):
        prompt = [0] * min(config.max_prompt, longest - 1)
        sampler.generate([prompt], min(config.max_rows, config.batch), max_new_tokens=1)
    with holding("the optimizer's state", "lower --cache_tokens, add --offload, or take more ranks"):
        held = [torch.empty_like(w) for w in policy.parameters() for _ in range(1 if optimizer.state else 3)]
    with holding(f"the old log-prob of a row of {total} tokens", way), torch.no_grad():
        for scorer in filter(None, (policy, ref)):
            scorer(*row, config.temperature)
    with holding(f"the activations of a row of {total} tokens", way):
        logp, _ = policy(*row, config.temperature)
    with holding(f"the backward of a row of {total} tokens", way):
        (logp.sum() * 0.0).backward()
    del held
    optimizer.zero_grad()


def compare(plan: Plan, row: dict, device: str) -> str:
    """In one line the prediction beside what torch (on CPU the system) and the first step's metrics say."""
    unseen = 0 if device == "cpu" else [*plan.items.values()][-1]["load"]  # torch does not count it
    pairs = [("peak GB", (plan.need - unseen) / 1e9, peak_memory(device) / 1e9)]
    pairs += [("tokens/s", plan.speed["tokens/s"], row["speed/tokens_per_s"])]
    pairs += [(f"{part} s", plan.speed[part], row[f"time/{part}"]) for part in ("rollout", "train", "step")]
    return "predicted / measured: " + ", ".join(f"{what} {a:,.3g} / {b:,.3g}" for what, a, b in pairs)


def known(name: str):
    """transformers' configuration of a model: the presets' from here, others from a folder or the hub."""
    if name in MODELS:
        return AutoConfig.for_model(**dict(zip(FIELDS, MODELS[name])))
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        fail(f"--model {name}: no configuration of that name ({str(error).splitlines()[0]})")


@dataclass
class Options(Config):
    ranks: int = 1  # GPUs, or processes on CPU
    memory: float = 80.0  # GB of each of them


def main() -> None:
    c = parse_args(Options, presets=PRESETS)
    check(c)
    check_values(c, "ranks memory")
    device, rates = ("cuda", H100) if c.model else ("cpu", None)
    print(f"{c.preset}, {c.ranks} rank(s) with {c.memory} GB: computed, not run")
    print(predict(c, known(c.model), c.ranks, device, c.memory * 1e9, rates))


if __name__ == "__main__":
    main()
