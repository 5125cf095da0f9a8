"""The policy network: load and audit it, score tokens, shard it, copy its weights, save it.

A policy is a Hugging Face causal language model with our attention (attention.py) and our head
(kernels/linear_logprob.py). Neither fits every family, and where one does not, nothing crashes: numbers are
just wrong. So `audit` compares them with the model's own forward at every load.

Axis letters: N tokens of a packed row, H hidden size, V vocabulary.

Left out: tensor parallelism, balance losses of mixtures of experts, LoRA, and every family that `audit`
refuses by name. To copy into another project take attention.py, chat.py, tool_calls.py, options.py and
kernels/ with it.
"""

import copy
import difflib
import heapq
import itertools
import os
import shutil
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import kernels
from attention import Blocks, Segments, multiplies_bfloat16, trunk
from chat import turn_marks
from options import fail

# Hugging Face's package of the same name hides our plain folder: add it to that package's path
kernels.__path__.append(str(Path(__file__).parent / "kernels"))
from kernels.linear_logprob import linear_logprob_entropy  # noqa: E402

logging.disable_progress_bar()  # loading and saving are short; the terminal belongs to the run

# ---- load and audit ----------------------------------------------------------------------------------------


def load(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu"):
    """(model, tokenizer) from a hub name, a folder or a .gguf file: audited, every dropout off.

    Ends the program with one sentence if there is no such model, ValueError if the family cannot be served.
    """
    path = Path(name).expanduser()
    gguf = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    if (path / "checkpoints").is_dir():
        fail(f"--model {name} is a run; its policies are {path}/checkpoints/step_.../model")
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or gguf:  # a hub name has one slash at most
        if not path.exists():
            beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
            near = difflib.get_close_matches(path.name, beside, 1)
            hint = f"; did you mean {path.parent / near[0]}?" if near else ""
            fail(f"--model {name}: there is no such file or folder{hint}")
        name = str(path.parent if gguf else path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **gguf)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **gguf).to(device)
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().split("\n")[0]
        fail(f"--model {name}: cannot be loaded; give a hub name, a folder or a .gguf file ({reason})")
    if gguf:  # its weights are ordinary numbers now; as a "quantized" model it could not be saved
        model.hf_quantizer = None
        del model.config.quantization_config
    for module in model.modules():  # dropout is a module, or a number that a layer hands to F.dropout
        for key, value in vars(module).items():
            if isinstance(value, float) and ("drop" in key or isinstance(module, nn.Dropout)):
                setattr(module, key, 0.0)
    for key in dropouts(model.config):
        setattr(model.config, key, 0.0)
    audit(model)
    if tokenizer.chat_template:
        stop_at_the_end_of_a_turn(model, tokenizer)
    return model.eval(), tokenizer


def stop_at_the_end_of_a_turn(model, tokenizer) -> None:
    """Add the token by which the chat template ends a turn to those that end generation: base models (of
    Qwen2.5, Qwen3) have a template, but end with the document. Saved with the model."""
    try:
        end = tokenizer.convert_tokens_to_ids(turn_marks(tokenizer)[1])
    except ValueError:
        return  # a template that marks no turns: sft.py and the tool's turns refuse it themselves
    ends = model.generation_config.eos_token_id
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if end not in [*ends, tokenizer.eos_token_id]:
        model.generation_config.eos_token_id = [*ends, end]


def dropouts(config) -> dict[str, float]:
    """The dropouts of a configuration that are not 0, by their names."""
    return {key: value for key, value in config.to_dict().items() if "drop" in key and value}


SERVED = "Qwen2, Qwen3 (dense), Llama 3, SmolLM 2 and 3, Mistral, Gemma 3 (text), OLMo 2 and 3"


@torch.no_grad()
def audit(model) -> None:
    """Raise ValueError, naming the family and what differs, unless this project computes the model exactly.

    Families fail in silence: a keyword that never arrives at the attention, a layer with a state of its own,
    a position code that looks at the whole row, logits that are not hidden @ W.T. So a small random float32
    copy of the configuration (as many layers as show every kind of layer, window 8) is compared with its own
    eager forward, in the mode of training; the head is compared on the real weights.
    """
    config = model.config

    def refuse(why: str):
        raise ValueError(f"model family {config.model_type!r} cannot be used: {why} (served: {SERVED})")

    if not hasattr(config, "num_hidden_layers") or not hasattr(model.base_model, "layers"):
        refuse("it is not a plain text model of base_model.layers")
    rope = getattr(config, "rope_parameters", None) or {}
    for kind in [rope, *(r for r in rope.values() if isinstance(r, dict))]:
        if kind.get("rope_type") in ("dynamic", "longrope"):
            refuse(f"its rope of type {kind['rope_type']!r} depends on the length of the whole packed row")
    for name, value in dropouts(config).items():
        refuse(f"its {name} is {value}, so two passes over one text differ; set it to 0")

    small = copy.deepcopy(config)
    kinds = getattr(config, "layer_types", None)
    layers = min(max([4] + [kinds.index(kind) + 1 for kind in set(kinds or [])]), config.num_hidden_layers)
    small.num_hidden_layers, small._attn_implementation = layers, "eager"
    if kinds:
        small.layer_types = kinds[:layers]
    if getattr(config, "sliding_window", None):
        small.sliding_window = 8
    small.vocab_size, small.pad_token_id, small.bos_token_id, small.eos_token_id = 96, None, None, None
    lengths = [21, 16]  # both beyond the window
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            twin = type(model)(small).float().train()
            for weight in twin.parameters():
                if weight.dim() == 2:  # at the usual scale of .02 a wrong mask or a wrong head hardly shows
                    weight.normal_(0, weight.shape[1] ** -0.5)
                else:
                    weight.add_(0.1 * torch.randn_like(weight))
            rows = [torch.randint(0, 96, (n,)) for n in lengths]
        own = torch.cat([twin(input_ids=row[None], use_cache=False).logits[0] for row in rows])
        hidden = [twin.base_model(input_ids=row[None], use_cache=False).last_hidden_state[0] for row in rows]
    except Exception as error:  # whatever a family we do not know raises
        refuse(f"a small copy of it does not run ({type(error).__name__}: {str(error)[:120]})")
    own = torch.log_softmax(own, -1)  # [37, 96]

    def differs(states: list[Tensor], logp: Tensor) -> bool:
        found = torch.log_softmax(torch.cat(states) @ twin.get_output_embeddings().weight.T, -1)
        return not torch.allclose(found, logp, atol=1e-3)

    if differs(hidden, own):
        refuse("its logits are not hidden @ W.T: a scale, a soft-cap or a bias comes after, or chance")
    cache = Blocks(small, 16, 4)
    tables = torch.arange(1, 15).view(2, 7)
    try:
        packed = trunk(twin, torch.cat(rows), Segments(lengths))
        fed, past = [[], []], [0, 0]  # prompts; a tool's result beside one token; then one token each
        for new in [[9, 12], [5, 1], [1, 1], [1, 1], [1, 1]]:
            ids = torch.cat([row[p : p + n] for row, p, n in zip(rows, past, new)])
            states = trunk(twin, ids, Segments(new, past, tables, cache)).split(new)
            fed, past = [f + [s] for f, s in zip(fed, states)], [p + n for p, n in zip(past, new)]
    except Exception as error:
        refuse(f"its attention is not called as we need it ({type(error).__name__}: {str(error)[:120]})")
    if differs([packed], own):
        refuse("sequences packed into one row differ from the same sequences apart")
    if cache.seen != set(range(layers)):
        refuse(f"only layers {sorted(cache.seen)} of {layers} use the cache, the others a state of their own")
    if differs(fed[0] + fed[1], torch.cat([own[: past[0]], own[lengths[0] : lengths[0] + past[1]]])):
        refuse("prefill and decode from the cache differ from the full forward")

    ids = torch.arange(3, 35, device=model.device) % config.vocab_size
    hidden = model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0, :-1]
    fused, _ = linear_logprob_entropy(hidden, model.get_output_embeddings().weight, ids[1:])
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    plain = torch.log_softmax(logits.float(), -1).gather(1, ids[1:, None])[:, 0]
    if not torch.allclose(fused.float(), plain, atol=1e-3 if hidden.dtype == torch.float32 else 0.5):
        refuse("the fused log-prob differs from log-softmax of its logits")


# ---- score tokens ------------------------------------------------------------------------------------------


class Policy(nn.Module):
    """The trained network: trunk and head in one forward, so that FSDP has gathered the (tied) head weight
    when it is used."""

    def __init__(self, hf):
        super().__init__()
        self.hf = hf

    def forward(
        self, ids: Tensor, seg: Segments, targets: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Log-prob of the target at each place, and entropy there, of softmax(logits / temperature).

        ids [N] the packed row; targets [N] the token that follows at each place, -100 where none is scored.
        Returns (logp, entropy) [N] float32, 0 where nothing is scored. The head runs only where something is.
        """
        hidden = trunk(self.hf, ids, seg)  # [N, H]
        scored = (targets != -100).nonzero()[:, 0]  # [n]
        weight = self.hf.get_output_embeddings().weight  # [V, H]
        # [n], [n]
        logp, entropy = linear_logprob_entropy(hidden[scored], weight, targets[scored], temperature)
        zeros = logp.new_zeros(len(ids))
        return zeros.index_put((scored,), logp), zeros.index_put((scored,), entropy)


def pack(lengths: list[int], budget: int, ranks: int = 1) -> list[list[int]]:
    """Sequences (by index) of each packed row: as few rows of at most `budget` tokens as ranks share evenly,
    and in each about as many tokens. One that is longer than the budget has a row of its own.

    The longest first, each into the emptiest row (Graham 1969); if one is too full then, with more rows.
    """
    count = -(-sum(min(n, budget) for n in lengths) // (budget * ranks)) * ranks
    while True:
        rows: list[list[int]] = [[] for _ in range(count)]
        filled = [(0, r) for r in range(count)]  # a heap
        for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
            tokens, r = filled[0]
            rows[r].append(i)
            heapq.heapreplace(filled, (tokens + lengths[i], r))
        if all(tokens <= budget or len(rows[r]) == 1 for tokens, r in filled):
            return rows
        count += ranks


def micro_batches(lengths: list[int], budget: int, rank: int = 0, ranks: int = 1) -> list[list[int]]:
    """This rank's packed rows of an optimizer batch that every rank knows: as many on each, some empty.

    An empty row must still run forward and backward, with weight 0: FSDP gathers and reduces in every one of
    them, and a rank with fewer would leave the others waiting for ever.
    """
    return pack(lengths, budget, ranks)[rank::ranks]


def packed_row(
    ids: Sequence[list[int]], masks: Sequence[list[int]], device="cpu"
) -> tuple[Tensor, Segments, Tensor]:
    """(ids [N], Segments, targets [N]) of sequences side by side.

    The log-prob of token t+1 comes from the hidden state at t: targets[t] is the next token of the same
    sequence if the policy wrote that one (its mask is 1), else -100. The last place scores nothing.
    """
    targets = [
        token if m else -100
        for seq, mask in zip(ids, masks)
        for token, m in zip([*seq[1:], -100], [*mask[1:], 0])
    ]
    row = torch.tensor([token for seq in ids for token in seq], device=device)
    return row, Segments([len(seq) for seq in ids], device=device), torch.tensor(targets, device=device)


# ---- many ranks --------------------------------------------------------------------------------------------


def init_process_group() -> tuple[int, int, str]:
    """(rank, ranks, device), under torchrun and in a plain process alike: gloo on CPU, NCCL beside it on GPU.

    The time-out is hours, not NCCL's ten minutes: ranks wait for the one whose trajectories are longest.
    """
    global _store
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    if device != "cpu":
        torch.cuda.set_device(device)
        # else cuBLAS may add parts of a long sum in bfloat16, as the gradient of a weight over a row's tokens
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if not dist.is_initialized():
        _store, rank, _ = next(dist.rendezvous("env://")) if ranks > 1 else (dist.HashStore(), 0, 1)
        backend, wait = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl", timedelta(hours=4)
        dist.init_process_group(backend, timeout=wait, store=_store, rank=rank, world_size=ranks)
    return dist.get_rank(), ranks, device


_store: dist.Store | None = None  # of the rendezvous
_countings = itertools.count()


def take_turns(n: int):
    """The numbers 0 to n-1, each on one rank only: the one that asks for it first. Every rank calls it."""
    key = f"turns/{next(_countings)}"
    return itertools.takewhile(lambda i: i < n, (_store.add(key, 1) - 1 for _ in itertools.count()))


def ranks_here(ranks: int) -> int:
    """Ranks on this node, which share its cores and memory: torchrun says how many, else all of them."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks))


def share_of_cores(ranks: int) -> int:
    """CPU cores for this rank: those of its node, divided among its ranks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // ranks_here(ranks))


def set_threads(threads: int, ranks: int) -> int:
    """Give this rank `threads` CPU threads, or for 0 its share of its node's cores; returns the share."""
    share = share_of_cores(ranks)
    torch.set_num_threads(threads or share)
    return share


def compute_dtype(name: str, device: str) -> torch.dtype:
    """The dtype that a configuration names; "": float32 on CPU, bfloat16 on GPU."""
    return getattr(torch, name or ("float32" if device == "cpu" else "bfloat16"))


class RoundedLinear(nn.Linear):
    """A linear layer in bfloat16 for a processor that does not multiply it: in float32, rounded as a unit for
    bfloat16 would. (torch multiplies number by number there, 20 times slower.)"""

    def forward(self, x: Tensor) -> Tensor:
        return _Rounded.apply(x, self.weight, self.bias)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        x = x.bfloat16()
        ctx.save_for_backward(x, weight)
        with torch.autocast("cpu", enabled=False):
            bias = None if bias is None else bias.bfloat16().float()
            return F.linear(x.float(), weight.bfloat16().float(), bias).bfloat16()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        rows = grad.float().flatten(0, -2)
        dx = (rows @ weight.bfloat16().float()).bfloat16().view(x.shape)
        return dx, rows.T @ x.float().flatten(0, -2), rows.sum(0) if ctx.needs_input_grad[2] else None


def shard(
    policy: Policy, device: str, checkpointing: bool = False, dtype: str = "", offload: bool = False
) -> Policy:
    """FSDP2: float32 master weights in shards, compute in `dtype`. One CPU process: not sharded.

    The policy may come on the CPU: layers are moved to the device one by one, and never stand there whole.
    offload: weights, gradients and optimizer state live in CPU memory, where the optimizer steps; a layer's
    shard travels to the GPU when it is gathered.
    """
    if checkpointing:
        policy.hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy.train()  # checkpointing is silently off in eval mode; dropout is 0, so nothing else differs
    compute = compute_dtype(dtype, device)
    if device == "cpu" and compute == torch.bfloat16 and not multiplies_bfloat16():
        for module in policy.modules():
            if type(module) is nn.Linear:
                module.__class__ = RoundedLinear
    if dist.get_world_size() == 1 and device == "cpu":
        if compute != torch.float32:  # the residual stream and the head stay float32: unlike FSDP, and faster
            policy.forward = torch.autocast("cpu", compute)(policy.forward)
    else:
        how = {
            "mesh": dist.init_device_mesh(device.split(":")[0], (dist.get_world_size(),)),
            # inputs as they are: the gathered embedding is in `compute` already, and OLMo hands its layers
            # cosines in float32 on purpose, as in the sampler's copy
            "mp_policy": MixedPrecisionPolicy(compute, torch.float32, cast_forward_inputs=False),
            "offload_policy": CPUOffloadPolicy(device != "cpu") if offload else OffloadPolicy(),
        }
        for layer in policy.hf.base_model.layers:
            fully_shard(layer, **how)
        fully_shard(policy, **how)
    if device != "cpu":
        torch.cuda.empty_cache()  # of the unsharded weights: the sampler's cache is about to ask what is free
    return policy


@torch.no_grad()
def broken(policy: Policy, rows) -> str:
    """Where a loss or gradient that is not finite begins, as the end of a sentence: the first module whose
    output is not; if there is none, the last parameter whose gradient is not, for the backward comes to that
    one first. rows: the arguments of the forwards, (ids, seg, targets) each. Every rank has to call it."""
    outputs, gradients = [], []
    for name, weight in policy.named_parameters():  # now: the forward below gathers what is sharded
        if weight.grad is not None:
            gradient = weight.grad.to_local() if hasattr(weight.grad, "to_local") else weight.grad
            gradients += [] if gradient.isfinite().all() else [name]

    def look(name, module, given, out):
        out = out if isinstance(out, tuple) else (out,)
        if not all(x.isfinite().all() for x in out if torch.is_tensor(x)):
            outputs.append(name)

    hooks = [m.register_forward_hook(partial(look, name)) for name, m in policy.named_modules() if name]
    for row in rows:
        policy(*row)
    for hook in hooks:
        hook.remove()
    if outputs:
        return f": the output of {outputs[0]} is not"
    return f": the gradient of {gradients[-1]} is not" if gradients else ""


def gradient_norm(policy: Policy) -> tuple[Tensor, Tensor]:
    """Norm of the whole gradient: in shards, as torch clips by it, and whole. Every rank has to call it.

    Look at it before the clipping: divided by a norm of NaN every gradient is NaN, and hides where it began.
    """
    gradients = [weight.grad for weight in policy.parameters() if weight.grad is not None]
    sharded = torch.nn.utils.get_total_norm(gradients)
    return sharded, full(sharded)


def full(tensor: Tensor) -> Tensor:
    """The whole tensor of a sharded one; every rank has to call it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def sampler_copy(model, dtype: torch.dtype):
    """A copy for sampling, its weights in `dtype`. Buffers stay as they are: with rope frequencies rounded to
    bfloat16 a position is off by a radian after a thousand tokens."""
    cast = {id(w): nn.Parameter(w.detach().to(dtype, copy=True)) for w in model.parameters()}
    return copy.deepcopy(model, cast)  # takes them in place of its own: no second model in float32


@torch.no_grad()
def copy_weights(policy: Policy, model) -> None:
    """The policy's weights into the sampler's own unsharded copy, cast before they travel."""
    for (name, mine), (other, theirs) in zip(
        policy.hf.named_parameters(), model.named_parameters(), strict=True
    ):
        assert name == other, f"{name} would be copied into {other}"
        # .to(device): an offloaded shard is gathered by NCCL
        theirs.copy_(full(mine.detach().to(theirs.device, theirs.dtype)))


def save(policy: Policy, tokenizer, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Hugging Face format, loadable by AutoModelForCausalLM. All ranks call it; rank 0 writes, and a folder
    of that name is replaced only when the new one is complete."""
    state = {}
    for name, tensor in policy.hf.state_dict().items():
        whole = full(tensor.detach().to(dtype))  # gathered by all ranks, kept by one
        if dist.get_rank() == 0:
            state[name] = whole.cpu()
    if dist.get_rank() == 0:
        part = folder.with_name(folder.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        policy.hf.save_pretrained(part, state_dict=state)
        tokenizer.save_pretrained(part)
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    dist.barrier()
