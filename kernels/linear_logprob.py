"""Log-probability and entropy straight from hidden states and the LM head, without the [N, V] logits.

The formulas are those of logprob.py, with logits = hidden weight^T. Let dz [N, V] be the gradient by the
logits. Then

    d hidden = dz weight  [N, H]          d weight = dz^T hidden  [V, H]

Logits are the largest tensor of a training step: 16,384 tokens of V = 151,936 are 10 GB in float32, and
log_softmax keeps several of them. They never exist here. The vocabulary is cut into slices of a few thousand
tokens: one matrix product makes the logits of a slice in a buffer that every slice reuses, `row_stats`
reduces them to four numbers a row, and `merge` joins the slices. The backward makes the logits of a slice
again (cheaper than 10 GB), turns them into dz, and multiplies.

Cost. 2 NVH operations forward; 4 NVH backward and 2 NVH more for making the logits again, all of them in the
library's matrix product. A small vocabulary fits in one slice: its logits are kept, nothing is made twice.
Beside the products a slice is written and read once forward (8 bytes an element), and written, read, written
as dz and read twice backward (14 bytes in bfloat16); and each slice is added to d hidden, 16 N H bytes. For
23,040 rows of a 2,560-wide model with 151,936 tokens, 104 slices, the products take about twice as long as
all this traffic on an H200 (computed from 790 TFLOP/s and 4.3 TB/s, not measured). Memory
is WORKSPACE bytes for the slice, half as much for dz in bfloat16, four numbers a row and slice, and backward
d hidden twice in float32 and a copy of hidden.

Layout. Slices run over the vocabulary, not over tokens: the product keeps all N rows, each slice of d weight
is written once (chunks of tokens would add to all of it every time, and in bfloat16 lose the small terms),
and what accumulates is d hidden, in float32. bfloat16 inputs are multiplied with float32 sums and float32
logits: to round logits to bfloat16 moves a log-prob by 0.01 to 0.2, more than a policy moves in a step.
Deterministic, no atomics, no locks.

`fused_kernel` is the other way to do it, for the forward alone: a program owns a tile of rows and a range of
the vocabulary, multiplies tile by tile and reduces each tile in registers. It saves the buffer and the
launches but reads a tile through L2 at 64 operations a byte, so it stays behind the library for many rows. It
serves log-probs of FUSED_ROWS rows or fewer, without gradient, where reading the weight bounds the time
(below 184 rows on an H200) and launches weigh. A fused backward is left out: it needs atomics or locks and
loses to the two products. So is sampling in the tiles: the sampler draws its numbers by trajectory.

To copy this elsewhere take this file and logprob.py. A sharded weight must be gathered: call this inside the
forward of the wrapped module (FSDP), where the weight is whole.
"""

import torch

from kernels.logprob import BODIES, IGNORE, check_rows, incoming, merge, triton, which_body

WORKSPACE = {"cpu": 32 << 20, "cuda": 128 << 20}  # bytes of float32 logits alive at once
FUSED_ROWS = 256  # the fused forward serves at most so many rows: an estimate, not measured on a GPU


def slices(n, v, device) -> list:
    """[(lo, hi)] over the vocabulary, of equal width: logits of n rows within WORKSPACE, or 1,024 columns."""
    width = max(1024, WORKSPACE["cpu" if device.type == "cpu" else "cuda"] // (4 * max(n, 1)))
    width = -(-v // -(-v // width))  # as many slices as that takes, made equal
    width = -(-width // 64) * 64
    return [(lo, min(lo + width, v)) for lo in range(0, v, width)]


def product(a, b, out) -> torch.Tensor:
    """out <- a b, summed in float32 or better and rounded once. (out= also keeps autocast away.)"""
    if a.dtype == out.dtype:
        return torch.mm(a, b, out=out)
    if a.element_size() == 2 and out.dtype == torch.float32:  # half in, float32 out: only GPUs have it
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    return out.copy_(torch.mm(a, b, out=a.new_empty(out.shape)))


class _LinearLogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets, inv_t, body):
        (n, _), v = x.shape, len(weight)
        parts = slices(n, v, x.device)
        buffer = torch.empty(n, parts[0][1], dtype=inv_t.dtype, device=x.device)
        stats = torch.empty(len(parts), 4, n, dtype=inv_t.dtype, device=x.device)
        for k, (lo, hi) in enumerate(parts):
            z = product(x, weight[lo:hi].to(x.dtype).t(), buffer[:, : hi - lo])
            BODIES[body][0](z, targets - lo, inv_t, stats[k])
        logp, entropy, sums = merge(stats, targets == IGNORE)
        ctx.save_for_backward(x, weight, targets, inv_t, sums)
        ctx.parts, ctx.body = parts, body
        ctx.kept = buffer if len(parts) == 1 else None
        ctx.set_materialize_grads(False)  # an unused output's gradient arrives as None and costs nothing
        return logp, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g_logp, g_entropy):
        x, weight, targets, inv_t, sums = ctx.saved_tensors
        want_x, want_w = ctx.needs_input_grad[:2]
        g_logp, g_entropy, inv_t = incoming(g_logp, g_entropy, targets, inv_t)
        x_live = x.masked_fill(inv_t[:, None] == 0, 0.0)  # 0 * NaN of an idle row would reach d weight
        kept, ctx.kept = ctx.kept, None  # overwritten below: a second backward makes the logits again
        buffer = (
            torch.empty(len(x), ctx.parts[0][1], dtype=inv_t.dtype, device=x.device) if kept is None else kept
        )
        dz_buffer = buffer if x.dtype == buffer.dtype else torch.empty_like(buffer, dtype=x.dtype)
        dx = torch.empty(x.shape, dtype=inv_t.dtype, device=x.device) if want_x else None
        more = torch.empty_like(dx) if want_x and len(ctx.parts) > 1 else None
        dw = torch.empty_like(weight) if want_w else None
        for lo, hi in ctx.parts:
            w, z, dz = weight[lo:hi].to(x.dtype), buffer[:, : hi - lo], dz_buffer[:, : hi - lo]
            if kept is None:
                product(x, w.t(), z)
            BODIES[ctx.body][1](z, targets - lo, inv_t, sums, g_logp, g_entropy, dz)
            if want_x and lo == 0:
                product(dz, w, dx)
            elif want_x:
                dx += product(dz, w, more)
            if want_w:
                product(dz.t(), x_live, dw[lo:hi])
        return None if dx is None else dx.to(x.dtype), dw, None, None, None


# ---------------------------------------------------------------- fused forward

if triton is not None:
    from kernels.logprob import INTERPRETED, absorb, tl

    @triton.jit(do_not_specialize=["n"])
    def fused_kernel(
        x_ptr, w_ptr, t_ptr, inv_t_ptr, out_ptr, x_stride, w_stride, n, v, size, width,
        BN: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr, UPCAST: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0) * BN + tl.arange(0, BN)  # neighbours in time share the tiles of w in L2
        some_row = tl.minimum(row, n - 1)  # past the end, read the last one: no mask in the inner loop
        k = tl.arange(0, BH)
        t = tl.load(t_ptr + some_row)
        inv_t = tl.load(inv_t_ptr + some_row)
        x_row = x_ptr + some_row.to(tl.int64)[:, None] * x_stride + k[None, :]
        m = tl.full((BN,), float("-inf"), tl.float32)
        s = tl.zeros((BN,), tl.float32)
        u = tl.zeros((BN,), tl.float32)
        zt = tl.zeros((BN,), tl.float32)
        lo = tl.program_id(1) * width
        hi = tl.minimum(lo + width, v)
        for c in range(lo, hi, BV):
            col = c + tl.arange(0, BV)
            w_col = w_ptr + tl.minimum(col, v - 1).to(tl.int64)[None, :] * w_stride + k[:, None]
            z = tl.zeros((BN, BV), tl.float32)
            for h in range(0, size, BH):
                a = tl.load(x_row + h, mask=(h + k < size)[None, :], other=0.0)
                b = tl.load(w_col + h, mask=(h + k < size)[:, None], other=0.0)
                if UPCAST:  # the interpreter multiplies the bit patterns of bfloat16, and does not say so
                    a, b = a.to(tl.float32), b.to(tl.float32)
                z = tl.dot(a, b, z, input_precision="ieee")
            z = tl.where((col < hi)[None, :], z * inv_t[:, None], float("-inf"))
            hit = col[None, :] == t[:, None]
            zt += tl.sum(tl.where(hit, z, 0.0), 1)  # 0 unless the target is in this range
            m, s, u = absorb(z, m, s, u)
        out = out_ptr + tl.program_id(1) * 4 * n + row
        tl.store(out, m, mask=row < n)
        tl.store(out + n, s, mask=row < n)
        tl.store(out + 2 * n, u, mask=row < n)
        tl.store(out + 3 * n, zt, mask=row < n)


def fused_config(n) -> dict:
    """Tile and warps by number of rows. `bench/kernels.py --compile` refuses one that spills registers."""
    rows = {"BN": 64, "num_warps": 4} if n <= 64 else {"BN": 128, "num_warps": 8}
    return {**rows, "BV": 128, "BH": 64, "num_stages": 3}


def fused_stats(x, weight, targets, inv_t) -> torch.Tensor:
    """Stats [K, 4, N] of K ranges of the vocabulary: about two programs for each of 132 multiprocessors."""
    (n, size), v, config = x.shape, len(weight), fused_config(len(x))
    x, weight = (a if a.stride(1) == 1 else a.contiguous() for a in (x, weight))
    tiles, bv = triton.cdiv(n, config["BN"]), config["BV"]
    width = triton.cdiv(triton.cdiv(v, bv), max(1, 264 // tiles)) * bv
    stats = torch.empty(triton.cdiv(v, width), 4, n, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        fused_kernel[(tiles, len(stats))](
            x, weight, targets, inv_t, stats, x.stride(0), weight.stride(0), n, v, size, width,
            UPCAST=INTERPRETED, **config,
        )  # fmt: skip
    return stats


# ---------------------------------------------------------------- the function


def linear_logprob_entropy(hidden, weight, targets, temperature=1.0, *, backend=None) -> tuple:
    """Log-prob of each target, and entropy, under softmax(hidden weight^T / temperature), in nats.

    hidden       [N, H] float   bfloat16, float16, float32; float64 is computed in float64
    weight       [V, H] float   the LM head; the wider of the two dtypes is the one multiplied in
    targets      [N] int        -100: log-prob 0, entropy 0, no gradient
    temperature  number or [N]  above 0; gets no gradient
    backend                     None: see logprob.which_body; "torch" or "triton"
    returns      (logp [N], entropy [N]) float32 (float64 for float64), differentiable in hidden and weight
    A row with NaN, +inf or nothing but -inf gives NaN and touches no other row; if the loss uses it, the
    gradient of the weight is NaN. Bad input raises as in logprob_entropy.
    """
    if hasattr(weight, "full_tensor"):
        raise ValueError(
            "weight is a shard (DTensor): call this inside the forward of the wrapped module, or gather it"
        )
    a, b = (f"{x.dtype} {list(x.shape)} on {x.device}" for x in (hidden, weight))
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or len(weight) == 0:
        raise ValueError(f"hidden [N, H] and weight [V, H] do not fit: {a} and {b}")
    if not (hidden.is_floating_point() and weight.is_floating_point() and hidden.device == weight.device):
        raise ValueError(f"hidden and weight must be floats on one device: {a} and {b}")
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    x = hidden.to(dtype if hidden.is_cuda else torch.promote_types(dtype, torch.float32))
    body = which_body(x, backend)
    targets, inv_t = check_rows(targets, temperature, len(hidden), len(weight), x)
    graph = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    half = hidden.dtype == weight.dtype and hidden.element_size() == 2  # float32 has no matrix instruction
    if body == "triton" and not graph and half and len(x) <= FUSED_ROWS:
        return merge(fused_stats(hidden, weight, targets, inv_t), targets == IGNORE)[:2]
    return _LinearLogprobEntropy.apply(x, weight, targets, inv_t, body)
