"""Log-probability and entropy of next-token logits, forward and backward, without a second [N, V] tensor.

The formulas. For a row of logits over V tokens and a temperature T let z = logits / T, m = max_j z_j, and

    s = sum_j e^(z_j - m)            u = sum_j e^(z_j - m) (z_j - m)            p_j = e^(z_j - m) / s

    log-prob of token t   logp = (z_t - m) - log s
    entropy               H    = -sum_j p_j log p_j = log s - u / s
    gradients             d logp / d z_j = 1[j = t] - p_j
                          d H    / d z_j = -p_j (log p_j + H)                and d z / d logits = 1 / T

Large numbers meet only in z_j - m, which floats hold exactly where the two are close; so float32 keeps 1e-6
even for logits near -10,000. m and log s are stored apart, as their sum would be rounded to the spacing of
floats at m. Sums are float32 for logits of any dtype: a softmax in bfloat16 is off by up to 0.1 nat, which
exp(new - old) takes for a change of the policy.

Bytes. log_softmax, exp and a product hold three to five [N, V] tensors; one of them is 2.5 GB in bfloat16 for
8,192 tokens and V = 151,936. Here the forward reads the logits once and writes four numbers a row, the
backward reads them once more and writes their gradient: 2 NV and 4 NV bytes in bfloat16. For given logits
that is the floor: a maximum is known only when the whole row was read, and a row (300 KB) does not stay on a
multiprocessor. So the limit is memory bandwidth; one exponential an element hides behind it.
`inplace_backward=True` writes the gradient over the logits, which saves 2 NV bytes of memory and no traffic.

Layout. A program owns a row, walks the vocabulary in blocks and carries (m, s, u). When a block brings a
larger maximum m', the sums move to the new origin with a = e^(m - m'): u becomes a (u + (m - m') s), s
becomes a s. The same rule joins slices of the vocabulary that were summed apart (`merge`), and that is how
linear_logprob.py uses this file. Columns behind the last token enter as -inf before the maximum is taken; as
zeros they would be 3,712 tokens of logit 0 when 151,936 columns are read in blocks of 4,096. The backward has
no sums left, so each block of each row is a program of its own. No atomics, no locks, no tuning at run time:
equal inputs give equal bits. Rows are counted in int64 (row 14,135 of V = 151,936 begins beyond 2^31) and lie
on grid axis 0 (the other axes end at 65,535).

Two bodies of equal signature: torch functions that work through blocks of rows which stay in the cache, and
Triton kernels for CUDA tensors; `which_body` chooses. Left out: second derivatives, a gradient for the
temperature. To copy this elsewhere take the file, torch, and Triton if there is a GPU.
"""

import functools
import os
import shutil
import sysconfig
import warnings

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a bare CPU installation: the torch body does everything
    triton = None

IGNORE = -100  # target of a row that takes no part: log-prob 0, entropy 0, no gradient
CACHED = 1 << 20  # elements in a block of rows of the torch body: two float32 blocks are 8 MB


def row_stats(z, targets, inv_t, out) -> None:
    """out [4, N] <- m, s, u, z_t of z [N, C] * inv_t [N]. z_t = 0 if the target is in another slice."""
    c = z.shape[1]
    for rows, d, e in _row_blocks(z, out.dtype):
        t, scale = targets[rows, None], inv_t[rows, None]
        m = z[rows].amax(1, keepdim=True) * scale
        zt = torch.where((t >= 0) & (t < c), z[rows].gather(1, t.clamp(0, c - 1)) * scale, 0.0)
        torch.exp(_centre(z[rows], scale, m, d), out=e)
        out[:, rows] = torch.cat((m, e.sum(1, True), d.mul_(e).sum(1, True), zt), 1).t()


def row_gradient(z, targets, inv_t, sums, g_logp, g_entropy, out) -> None:
    """out [N, C] <- d(sum g_logp logp + g_entropy H) / d logits, the arguments as `incoming` and `merge` give
    them; out may be z. gradient_j = e_j (a + b d_j) + 1[j = t] g  with  d_j = z_j - m,  e_j = e^d_j:
    the formula at the top with p_j = e_j / s and log p_j = d_j - log s; b is all that multiplies d_j."""
    c, (m, log_s, entropy) = z.shape[1], sums
    g, over_s = g_logp * inv_t, inv_t * (-log_s).exp()
    b = None if g_entropy is None else -g_entropy * over_s
    a = -g_logp * over_s + (0.0 if b is None else b * (entropy - log_s))
    for rows, d, e in _row_blocks(z, sums.dtype):
        t, scale = targets[rows, None], inv_t[rows, None]
        torch.exp(_centre(z[rows], scale, m[rows, None], d), out=e)
        e.mul_(a[rows, None] if b is None else d.mul_(b[rows, None]).add_(a[rows, None]))
        e.scatter_add_(1, t.clamp(0, c - 1), torch.where((t >= 0) & (t < c), g[rows, None], 0.0))
        out[rows] = e
    out[inv_t == 0] = 0.0


def _row_blocks(z, dtype):
    """Slices of the rows of z, each with two scratch blocks of its size."""
    (n, c), step = z.shape, max(1, CACHED // z.shape[1])
    d, e = torch.empty(2, min(step, n), c, dtype=dtype, device=z.device)
    for i in range(0, n, step):
        yield slice(i, i + step), d[: n - i], e[: n - i]


def _centre(z, scale, m, out):
    """out <- z * scale - m, -inf cut to -10,000: e^ of both is 0, but 0 * -inf in u would be NaN."""
    origin = m.masked_fill(m == -torch.inf, 0.0)
    return torch.mul(z, scale, out=out).sub_(origin).clamp_(min=-1e4)


def merge(stats, ignored) -> tuple:
    """stats [K, 4, N] of K slices of the vocabulary -> logp [N], entropy [N], (m, log s, entropy) [3, N]."""
    m, s, u, zt = stats.unbind(1)  # [K, N] each
    top = m.amax(0)
    shift = m - top.masked_fill(top == -torch.inf, 0.0)
    a = shift.exp()  # 0 for a slice that holds nothing but -inf
    log_s = (s_all := (a * s).sum(0)).log()
    u_all = (a * (u + shift.clamp(min=-1e4) * s)).sum(0)
    logp = ((zt.sum(0) - top) - log_s).masked_fill_(ignored, 0.0)
    entropy = (log_s - u_all / s_all).masked_fill_(ignored, 0.0)
    return logp, entropy, torch.stack((top, log_s, entropy))


def incoming(g_logp, g_entropy, targets, inv_t) -> tuple:
    """Gradients of both outputs (None for an unused entropy), and inv_t with 0 for idle rows: left out, or
    masked by the loss. The gradient of such a row is exactly 0, where 0 * NaN would be NaN."""
    g_logp = torch.zeros_like(inv_t) if g_logp is None else g_logp.contiguous()
    g_entropy = g_entropy if g_entropy is None else g_entropy.contiguous()
    idle = (g_logp == 0) & (g_entropy is None or g_entropy == 0) | (targets == IGNORE)
    return g_logp, g_entropy, inv_t.masked_fill(idle, 0.0)


if triton is not None:

    @triton.jit
    def absorb(z, m, s, u):
        """Carry m, s, u [R] over a tile z [R, B] of float32 logits, -inf where there is no token."""
        top = tl.maximum(m, tl.max(z, 1))
        origin = tl.where(top == float("-inf"), 0.0, top)  # nothing but -inf so far: -inf - -inf would be NaN
        d = z - origin[:, None]
        e = tl.exp(d)
        shift = tl.where(m == float("-inf"), 0.0, m - origin)
        a = tl.exp(shift)
        u = a * (u + shift * s) + tl.sum(tl.where(e > 0, e * d, 0.0), 1)
        s = a * s + tl.sum(e, 1)
        return top, s, u

    @triton.jit(do_not_specialize=["n"])
    def stats_kernel(z_ptr, t_ptr, inv_t_ptr, out_ptr, stride, n, c, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        z_ptr += row * stride
        inv_t = tl.load(inv_t_ptr + row)
        m = tl.full((1,), float("-inf"), tl.float32)
        s = tl.zeros((1,), tl.float32)
        u = tl.zeros((1,), tl.float32)
        for lo in range(0, c, BLOCK):
            col = lo + tl.arange(0, BLOCK)[None, :]
            z = tl.load(z_ptr + col, mask=col < c, other=float("-inf")).to(tl.float32) * inv_t  # [1, BLOCK]
            m, s, u = absorb(z, m, s, u)
        t = tl.load(t_ptr + row)
        zt = tl.load(z_ptr + t, mask=(t >= 0) & (t < c), other=0.0).to(tl.float32) * inv_t
        out = out_ptr + row + tl.arange(0, 1)
        tl.store(out, m)
        tl.store(out + n, s)
        tl.store(out + 2 * n, u)
        tl.store(out_ptr + 3 * n + row, zt)

    @triton.jit(do_not_specialize=["n"])
    def gradient_kernel(
        z_ptr, t_ptr, inv_t_ptr, sums_ptr, g_logp_ptr, g_entropy_ptr, out_ptr, z_stride, out_stride, n, c,
        ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inv_t = tl.load(inv_t_ptr + row)
        g_logp = tl.load(g_logp_ptr + row)
        end = tl.where(inv_t == 0, 0, c)  # an idle row reads nothing and gets zeros
        z = tl.load(z_ptr + row * z_stride + col, mask=col < end, other=0.0).to(tl.float32) * inv_t
        logp = (z - tl.load(sums_ptr + row)) - tl.load(sums_ptr + n + row)
        p = tl.exp(logp)
        g = g_logp * (tl.where(col == tl.load(t_ptr + row), 1.0, 0.0) - p)
        if ENTROPY:
            g_entropy = tl.load(g_entropy_ptr + row)
            g -= tl.where(p > 0, g_entropy * p * (logp + tl.load(sums_ptr + 2 * n + row)), 0.0)
        g = tl.where(col < end, g * inv_t, 0.0)
        tl.store(out_ptr + row * out_stride + col, g.to(out_ptr.dtype.element_ty), mask=col < c)


# under TRITON_INTERPRET=1 the kernels take CPU tensors
INTERPRETED = triton is not None and not isinstance(stats_kernel, triton.JITFunction)
ROW = {"BLOCK": 4096, "num_warps": 8}  # columns a program takes at a time: 16 a thread, in loads of 16 bytes


def row_stats_triton(z, targets, inv_t, out) -> None:
    with torch.cuda.device_of(z):
        stats_kernel[(len(z),)](z, targets, inv_t, out, z.stride(0), *z.shape, **ROW)


def row_gradient_triton(z, targets, inv_t, sums, g_logp, g_entropy, out) -> None:
    args = z, targets, inv_t, sums, g_logp, g_entropy, out, z.stride(0), out.stride(0), *z.shape
    with torch.cuda.device_of(z):
        grid = len(z), triton.cdiv(z.shape[1], ROW["BLOCK"])
        gradient_kernel[grid](*args, ENTROPY=g_entropy is not None, **ROW)


BODIES = {"torch": (row_stats, row_gradient), "triton": (row_stats_triton, row_gradient_triton)}


@functools.cache
def builds() -> bool:
    """Whether Triton can build what launches its kernels on a GPU; says so if not."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    found = bool(compiler) and os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h"))
    if not found:
        warnings.warn(
            "log-probs by torch, slower: Triton needs a C compiler and Python's headers", stacklevel=2
        )
    return found


def which_body(x, backend=None) -> str:
    """The body for x: Triton for CUDA tensors where it is installed, else torch. Under TRITON_INTERPRET=1 the
    kernels run on the CPU too, a thousand times slower, so only for a caller who asks by backend="triton"."""
    fits = triton is not None and x.dtype != torch.float64 and (INTERPRETED or x.is_cuda and builds())
    if backend not in (None, "torch", "triton") or (backend == "triton" and not fits):
        need = "float32 or less, and a GPU, or TRITON_INTERPRET=1 before triton is imported"
        raise ValueError(f"backend {backend!r} for {x.dtype} on {x.device}: torch takes all, triton {need}")
    body = backend or ("triton" if fits and not INTERPRETED else "torch")
    return body if len(x) else "torch"  # no rows: a grid of no programs cannot be launched


class _LogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, inv_t, inplace, body):
        stats = torch.empty(1, 4, len(logits), dtype=inv_t.dtype, device=logits.device)
        BODIES[body][0](logits, targets, inv_t, stats[0])
        logp, entropy, sums = merge(stats, targets == IGNORE)
        ctx.save_for_backward(logits, targets, inv_t, sums)
        ctx.inplace, ctx.body = inplace, body
        ctx.set_materialize_grads(False)  # an unused output's gradient arrives as None and costs nothing
        return logp, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g_logp, g_entropy):
        logits, targets, inv_t, sums = ctx.saved_tensors
        out = logits.detach() if ctx.inplace else logits.new_empty(logits.shape)
        g_logp, g_entropy, inv_t = incoming(g_logp, g_entropy, targets, inv_t)
        BODIES[ctx.body][1](logits, targets, inv_t, sums, g_logp, g_entropy, out)
        if ctx.inplace:  # who needs these logits later gets autograd's error, not the gradient in their place
            torch.autograd.graph.increment_version(logits)
        return out, None, None, None, None


def logprob_entropy(logits, targets, temperature=1.0, *, inplace_backward=False, backend=None) -> tuple:
    """Log-prob of each target, and entropy, under softmax(logits / temperature), in nats.

    logits       [N, V] float   any strides; sums and outputs are float32 (float64 for float64)
    targets      [N] int        -100: log-prob 0, entropy 0, no gradient
    temperature  number or [N]  above 0; gets no gradient
    inplace_backward            the backward overwrites `logits`, which nothing may use by then
    backend                     None: see which_body; "torch" or "triton"
    returns      (logp [N], entropy [N]), differentiable in logits; an unused output costs no backward
    A row with NaN, +inf or nothing but -inf gives NaN and touches no other row. Bad input raises ValueError;
    a target outside [0, V) on a GPU is left to torch._assert_async, for which the host does not wait.
    """
    if logits.dim() != 2 or logits.shape[1] == 0 or not logits.is_floating_point():
        raise ValueError(f"logits must be floats [N, V] with V > 0, got {logits.dtype} {list(logits.shape)}")
    if inplace_backward and (logits.stride(1) != 1 or logits.stride(0) < logits.shape[1]):
        raise ValueError(f"inplace_backward: rows must be contiguous and apart, strides {logits.stride()}")
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    body = which_body(logits, backend)
    targets, inv_t = check_rows(targets, temperature, *logits.shape, logits)
    return _LogprobEntropy.apply(logits, targets, inv_t, inplace_backward, body)


def check_rows(targets, temperature, n, v, like) -> tuple:
    """-> targets [N] int64 and 1 / temperature [N], both contiguous, or ValueError."""
    if targets.shape != (n,) or targets.is_floating_point() or targets.device != like.device:
        raise ValueError(f"targets must be integers [{n}] on {like.device}: {targets.dtype} {targets.shape}")
    targets = targets.long().contiguous()
    good = ((targets >= 0) & (targets < v)) | (targets == IGNORE)
    if like.is_cuda:
        torch._assert_async(good.all(), f"a target is outside [0, {v}) and not {IGNORE}")
    elif not good.all():
        raise ValueError(f"target {targets[~good][0]} is outside [0, {v}); a row to leave out has {IGNORE}")
    dtype = torch.promote_types(like.dtype, torch.float32)
    t = torch.as_tensor(temperature, dtype=dtype)
    if t.requires_grad or t.shape not in ((), (n,)) or not (t.is_cuda or (t > 0).all()):
        raise ValueError(f"temperature must be above 0, a number or [{n}], without gradient: {temperature}")
    return targets, torch.ones(n, dtype=dtype, device=like.device) / (t.to(like.device) if t.dim() else t)
