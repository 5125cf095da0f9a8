"""Log-prob and entropy of kernels/: both bodies (torch; Triton, here under its interpreter) against float64.

On a GPU the same tests run on the compiled kernels. Under the interpreter programs run
one after another, so races cannot show, and a cast to bfloat16 truncates: gradients may differ by 2^-7.
"""

import math
import os
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import linear_logprob, logprob
from kernels.linear_logprob import linear_logprob_entropy
from kernels.logprob import logprob_entropy, which_body

DEVICE = "cuda" if torch.cuda.is_available() and not logprob.INTERPRETED else "cpu"
TRITON = logprob.triton is not None and (DEVICE == "cuda" or logprob.INTERPRETED)
NEEDS_TRITON = pytest.mark.skipif(
    not TRITON, reason="kernels not tested: no Triton, or it was imported without TRITON_INTERPRET=1"
)
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NaN in numpy
BODIES = ["torch", pytest.param("triton", marks=NEEDS_TRITON)]
both_bodies = pytest.mark.parametrize("body", BODIES)
INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def reference(logits, targets, temperature=1.0):
    """The definition, in float64: log_softmax, then -sum p log p with 0 log 0 = 0."""
    t = torch.as_tensor(temperature, dtype=torch.float64, device=logits.device)
    logp = torch.log_softmax(logits.double() / (t[:, None] if t.dim() else t), -1)
    entropy = -(logp.exp() * logp.masked_fill(logp == -INF, 0.0)).sum(-1)
    skip = targets == -100
    picked = logp.gather(1, targets.masked_fill(skip, 0)[:, None])[:, 0]
    return picked.masked_fill(skip, 0.0), entropy.masked_fill(skip, 0.0)


def gradients(outputs, upstream, inputs):
    """Gradients of sum(upstream * outputs) over the outputs whose upstream is not None."""
    used = [(o, g.to(o.dtype)) for o, g in zip(outputs, upstream) if g is not None]
    return torch.autograd.grad([o for o, _ in used], inputs, [g for _, g in used])


def case(n, v, dtype=torch.float32, std=3.0):
    logits = (torch.randn(n, v, device=DEVICE) * std).to(dtype)
    return logits, torch.randint(v, (n,), device=DEVICE)


def linear_case(n, h, v, dtype=torch.float32, std=3.0):
    hidden = torch.randn(n, h, device=DEVICE).to(dtype)
    weight = (torch.randn(v, h, device=DEVICE) * std / h**0.5).to(dtype)
    return hidden, weight, torch.randint(v, (n,), device=DEVICE)


def close(got, want, atol, rtol=0.0):
    torch.testing.assert_close(got.double(), want.double(), atol=atol, rtol=rtol, equal_nan=True)


def narrow_slices(monkeypatch, width=None):
    """Cut the vocabulary into slices of `width` tokens (the last one narrower), or leave it whole."""

    def cut(n, v, device):
        return [(lo, min(lo + (width or v), v)) for lo in range(0, v, width or v)]

    monkeypatch.setattr(linear_logprob, "slices", cut)


# ---------------------------------------------------------------- logits


@both_bodies
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("outputs", ["logp", "entropy", "both"])
def test_values_and_gradients_equal_float64(body, dtype, outputs):
    """A gradient of the entropy that is silently missing (trl 6625), or a missing second 1/T."""
    for v, temperature in ((1000, 1.0), (4500, torch.linspace(0.5, 1.5, 6, device=DEVICE))):
        logits, targets = case(6, v, dtype)
        targets[2] = -100
        upstream = [
            torch.randn(6, device=DEVICE) if outputs in (name, "both") else None
            for name in ("logp", "entropy")
        ]
        mine, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
        got = logprob_entropy(mine, targets, temperature, backend=body)
        want = reference(exact, targets, temperature)
        assert got[0].dtype == got[1].dtype == torch.float32
        close(got[0], want[0], 5e-6)
        close(got[1], want[1], 5e-6)
        (grad,), (grad_64,) = gradients(got, upstream, [mine]), gradients(want, upstream, [exact])
        assert grad.dtype == dtype
        close(grad, grad_64, 2e-6, {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype])


@both_bodies
@pytest.mark.parametrize("v", [1, 2, 1000, 1023, 1025, 50257, 128256, 151669, 151936])
def test_any_vocabulary_size_is_summed_without_phantom_columns(body, v):
    """Columns behind the vocabulary counted as logit 0: positive log-probs, reward collapses (verl 2656)."""
    logits, targets = case(2, v)
    logits -= 20  # phantom zeros would dominate
    targets[1] = v - 1
    logp, entropy = logprob_entropy(logits, targets, backend=body)
    want = reference(logits, targets)
    assert (logp <= 0).all() and (entropy >= 0).all()
    close(logp, want[0], 1e-5)
    close(entropy, want[1], 1e-5)
    if v == 1:
        assert logp.tolist() == [0, 0] and entropy.tolist() == [0, 0]


@both_bodies
def test_log_prob_and_entropy_by_hand(body):
    """s = e^0 + e^-1 + e^-2 = 1.5032147; log p = -log s; H = log s + (e^-1 + 2 e^-2) / s."""
    logits, targets = torch.tensor([[2.0, 1.0, 0.0]], device=DEVICE), torch.tensor([0], device=DEVICE)
    logp, entropy = logprob_entropy(logits, targets, backend=body)
    assert logp.item() == pytest.approx(-0.4076060, abs=1e-6)
    assert entropy.item() == pytest.approx(0.8323956, abs=1e-6)


@both_bodies
def test_equal_logits_give_the_log_of_the_vocabulary_wherever_they_stand(body):
    """A maximum that starts at 0, not at -inf: log-prob inf at logits -200 (verl 7439). By hand: ln 1000."""
    for level in (-200.0, -1e4, 1e4):
        logits = torch.full((1, 1000), level, device=DEVICE)
        logp, entropy = logprob_entropy(logits, torch.tensor([7], device=DEVICE), backend=body)
        assert logp.item() == pytest.approx(-math.log(1000), abs=2e-6)
        assert entropy.item() == pytest.approx(math.log(1000), abs=2e-6)


@both_bodies
def test_a_forbidden_token_has_probability_zero_and_no_nan(body):
    """0 * -inf in p log p (trl 7221). By hand: H = 0, ln 2, 0; gradient of log-prob 1[j = t] - p."""
    rows = [
        ([0, -INF], 0.0, [0, 0]),
        ([0, 0, -INF], math.log(2), [0.5, -0.5, 0]),
        ([65504, -65504], 0.0, [0, 0]),
    ]
    for row, entropy, gradient in rows:
        logits = torch.tensor([row], dtype=torch.float16, device=DEVICE).requires_grad_()
        got = logprob_entropy(logits, torch.tensor([0], device=DEVICE), backend=body)
        assert got[1].item() == pytest.approx(entropy, abs=1e-6)
        assert got[0].item() == pytest.approx(-entropy, abs=1e-6)
        (grad,) = torch.autograd.grad(got[0], logits, torch.ones(1, device=DEVICE), retain_graph=True)
        assert grad[0].tolist() == pytest.approx(gradient, abs=1e-3)
        (grad,) = torch.autograd.grad(got[1], logits, torch.ones(1, device=DEVICE))
        assert grad[0].tolist() == pytest.approx([0.0] * len(row), abs=1e-3)


@both_bodies
def test_a_broken_row_is_nan_and_touches_no_other(body):
    """A skip test like `> -inf` hides NaN; a shared maximum spreads it."""
    logits, targets = case(6, 4200)
    broken = logits.clone()
    broken[1, 5], broken[3, 4199], broken[4] = NAN, INF, -INF
    broken[5, :4100] = -INF  # a whole block of nothing, then tokens: not broken
    good, upstream = torch.tensor([0, 2, 5]), torch.randn(2, 6, device=DEVICE)
    logits[5, :4100] = -INF
    targets[5] = 4150
    logits.requires_grad_(), broken.requires_grad_()
    want, got = reference(logits, targets), logprob_entropy(broken, targets, backend=body)
    (grad,), (clean,) = gradients(got, upstream, [broken]), gradients(want, upstream, [logits])
    for mine, exact in ((got[0], want[0]), (got[1], want[1]), (grad, clean)):
        close(mine[good], exact[good], 5e-6)
        assert mine[[1, 3, 4]].reshape(3, -1).isnan().any(1).all()


@both_bodies
def test_a_row_without_upstream_gradient_gets_exact_zeros_even_if_it_is_nan(body, monkeypatch):
    """0 * NaN: a masked token that is NaN poisons every weight (SkyRL 1635)."""
    hidden, weight, targets = linear_case(6, 32, 300)
    hidden[1], hidden[4], targets[1] = NAN, INF, -100
    upstream = torch.randn(6, device=DEVICE)
    upstream[4] = 0.0  # masked by the loss, while row 1 is ignored
    fine = torch.tensor([0, 2, 3, 5])
    for width in (None, 128):
        narrow_slices(monkeypatch, width)
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logp, entropy = linear_logprob_entropy(x, w, targets, backend=body)
        assert logp[1] == 0 and entropy[1] == 0
        dx, dw = gradients((logp, entropy), (upstream, upstream), [x, w])
        assert (dx[[1, 4]] == 0).all()
        x64, w64 = hidden[fine].double().requires_grad_(), weight.double().requires_grad_()
        want = gradients(
            reference(x64 @ w64.t(), targets[fine]), (upstream[fine], upstream[fine]), [x64, w64]
        )
        close(dx[fine], want[0], 2e-5)
        close(dw, want[1], 2e-5)
    logits = (hidden @ weight.t()).requires_grad_()
    grad = gradients(logprob_entropy(logits, targets, backend=body), (upstream, upstream), [logits])[0]
    assert (grad[[1, 4]] == 0).all() and grad[fine].isfinite().all()


@pytest.mark.skipif(DEVICE == "cuda", reason="on a GPU a device assert, which ends the process")
@pytest.mark.parametrize("bad", [-1, -99, -101, 10])
def test_a_target_outside_the_vocabulary_is_refused_by_its_value(bad):
    """Read out of bounds in silence, or matched with a padded column (cut-cross-entropy 59)."""
    hidden, weight, targets = linear_case(3, 4, 10)
    targets[1] = bad
    for call in (
        lambda: logprob_entropy(hidden @ weight.t(), targets),
        lambda: linear_logprob_entropy(hidden, weight, targets),
    ):
        with pytest.raises(ValueError, match=f"target {bad} "):
            call()


@both_bodies
def test_strides_do_not_matter(body):
    """Rows taken as contiguous (TransformerEngine 2734)."""
    tall = torch.randn(7, 3, device=DEVICE)
    swapped = torch.randn(4, 2, 8, device=DEVICE).transpose(0, 1)[1]
    cut, shared = torch.randn(3, 10, device=DEVICE)[:, :7], torch.randn(1, 9, device=DEVICE).expand(3, 9)
    for logits in (swapped, cut, tall.t(), shared):
        targets = torch.randint(logits.shape[1], (2 * len(logits),), device=DEVICE)[::2]
        results = []
        for x in (logits.detach().requires_grad_(), logits.detach().contiguous().requires_grad_()):
            got = logprob_entropy(x, targets, backend=body)
            results.append((*got, *gradients(got, torch.ones(2, len(logits), device=DEVICE), [x])))
        for a, b in zip(*results):
            close(a, b, 1e-6)


@NEEDS_TRITON
def test_rows_beyond_two_to_the_31_are_found():
    """row * stride in int32 wraps at row 14,135 of 151,936 columns (trl 7266, Liger 251). Three rows far
    apart in a buffer of 4.3 GB, of which only the touched pages are really taken."""
    far = 2**30 + 64  # a stride that fits in int32, unlike twice as much
    buffer = torch.empty(2 * far + 256, dtype=torch.bfloat16, device=DEVICE)
    logits = buffer.as_strided((3, 100), (far, 1)).copy_(torch.randn(3, 100))
    hidden = buffer.as_strided((3, 16), (far, 1), 100).copy_(torch.randn(3, 16))
    weight = buffer.as_strided((3, 16), (far, 1), 132).copy_(torch.randn(3, 16))
    targets, ones = torch.tensor([0, 2, 1], device=DEVICE), torch.ones(2, 3, device=DEVICE)
    near = logits.clone().requires_grad_()
    want = logprob_entropy(near, targets, backend="torch")
    (gradient,) = gradients(want, ones, [near])
    got = logprob_entropy(logits.requires_grad_(), targets, inplace_backward=True, backend="triton")
    close(torch.stack(got), torch.stack(want), 1e-6)
    (grad,) = gradients(got, ones, [logits])
    assert grad.data_ptr() == logits.data_ptr()
    close(grad, gradient, 1e-6, 2**-7)
    got = linear_logprob_entropy(hidden, weight, targets, backend="triton")
    close(torch.stack(got), torch.stack(reference(hidden.double() @ weight.double().t(), targets)), 1e-5)


@NEEDS_TRITON
def test_kernels_read_inside_their_inputs_and_write_inside_their_outputs():
    """An access out of bounds reads garbage in silence. NaN lies around inputs, a mark around outputs."""
    n, v, mark = 3, 1500, 12345.0

    def inside(x, fill):
        room = torch.full([s + 70 for s in x.shape], fill, dtype=x.dtype, device=DEVICE)
        room[tuple(slice(35, 35 + s) for s in x.shape)] = x
        return room, room[tuple(slice(35, 35 + s) for s in x.shape)]

    logits, targets = case(n, v, torch.bfloat16)
    room, z = inside(logits, NAN)
    _, t = inside(targets, 10**9)
    _, inv_t = inside(torch.ones(n, device=DEVICE), NAN)
    flat = torch.full((4 * n + 40,), mark, device=DEVICE)
    logprob.row_stats_triton(z, t, inv_t, flat[20:-20].view(4, n))
    assert (flat[:20] == mark).all() and (flat[-20:] == mark).all() and (flat[20:-20] != mark).all()
    logp, entropy, sums = logprob.merge(flat[20:-20].view(1, 4, n), t == -100)
    close(torch.stack((logp, entropy)), torch.stack(reference(logits, targets)), 5e-6)
    canvas, out = inside(torch.full((n, v), mark, device=DEVICE), mark)
    _, g = inside(torch.ones(n, device=DEVICE), NAN)
    logprob.row_gradient_triton(z, t, inv_t, sums, g, g, out)
    assert (canvas == mark).sum() == canvas.numel() - n * v and out.isfinite().all()
    assert room.isnan().sum() == room.numel() - n * v
    hidden, weight, targets = linear_case(n, 70, 200, torch.bfloat16)
    stats = linear_logprob.fused_stats(
        inside(hidden, NAN)[1], inside(weight, NAN)[1], inside(targets, -1)[1], inv_t
    )
    got = logprob.merge(stats, targets == -100)[:2]
    close(torch.stack(got), torch.stack(reference(hidden.double() @ weight.double().t(), targets)), 1e-5)


@both_bodies
def test_every_output_is_written_whole(body, monkeypatch):
    """A result that leans on what fresh memory holds: every buffer is handed out full of NaN."""

    def spoiled(x):
        return x.fill_(NAN) if x.is_floating_point() else x

    for home, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        plain = getattr(home, name)
        monkeypatch.setattr(home, name, lambda *a, plain=plain, **k: spoiled(plain(*a, **k)))
    for width in (None, 130):
        narrow_slices(monkeypatch, width)
        hidden, weight, targets = (a.requires_grad_(i < 2) for i, a in enumerate(linear_case(5, 24, 300)))
        got = linear_logprob_entropy(hidden, weight, targets, backend=body)
        grads = gradients(got, torch.ones(2, 5, device=DEVICE), [hidden, weight])
        assert all(x.isfinite().all() for x in (*got, *grads))
    logits, targets = case(3, 1100)
    got = logprob_entropy(logits.requires_grad_(), targets, backend=body)
    assert all(x.isfinite().all() for x in (*got, *gradients(got, torch.ones(2, 3, device=DEVICE), [logits])))


@both_bodies
def test_bfloat16_logits_are_summed_in_float32(body):
    """A softmax done in bfloat16 is off by up to 0.07 nat over a vocabulary of 151,936."""
    logits, targets = case(4, 151936, torch.bfloat16)
    got, want = logprob_entropy(logits, targets, backend=body), reference(logits, targets)
    close(torch.stack(got), torch.stack(want), 2e-5)


def test_gradient_in_place_equals_the_plain_one_and_a_second_use_is_an_error():
    """The gradient overwrites the logits: a later reader must get an error, never gradients for logits."""
    for body in ["torch"] + ["triton"] * TRITON:
        logits, targets = case(5, 1300)
        results = []
        for inplace in (False, True):
            x = logits.clone().requires_grad_()
            y = x * 1.0
            logp, entropy = logprob_entropy(y, targets, 0.8, inplace_backward=inplace, backend=body)
            ((logp + 0.1 * entropy).sum()).backward(retain_graph=True)
            results.append(x.grad)
        assert torch.equal(*results)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            logp.sum().backward()
        with pytest.raises(ValueError, match="inplace_backward"):
            logprob_entropy(logits[:1].expand(5, -1), targets, inplace_backward=True)


@both_bodies
def test_an_output_that_is_not_used_costs_no_backward(body, monkeypatch):
    """Entropy is logged at every step, seldom trained on: no gradient of it unless asked for (verl 2608)."""
    asked = []
    stats, plain = logprob.BODIES[body]
    spy = lambda *a: asked.append(a[5] is not None) or plain(*a)  # noqa: E731
    monkeypatch.setitem(logprob.BODIES, body, (stats, spy))
    hidden, weight, targets = linear_case(4, 8, 50)
    for used, want in ((0, False), (1, True)):
        out = linear_logprob_entropy(hidden.requires_grad_(), weight, targets, backend=body)
        out[used].sum().backward()
        assert asked.pop() is want and not asked


# ---------------------------------------------------------------- hidden states and the LM head


@both_bodies
@pytest.mark.parametrize("width", [None, 128])
@pytest.mark.parametrize("wanted", ["hidden", "weight", "both"])
def test_linear_path_equals_float64_for_each_gradient(body, width, wanted, monkeypatch):
    """Slices of the vocabulary, the last one of 44 columns; each gradient alone, and both."""
    narrow_slices(monkeypatch, width)
    hidden, weight, targets = linear_case(9, 37, 300)
    targets[4] = -100
    temperature, upstream = torch.linspace(0.6, 1.4, 9, device=DEVICE), torch.randn(2, 9, device=DEVICE)
    mine = [hidden.clone(), weight.clone()]
    exact = [hidden.double(), weight.double()]
    leaves = [i for i, name in enumerate(("hidden", "weight")) if wanted in (name, "both")]
    for pair in (mine, exact):
        for i in leaves:
            pair[i].requires_grad_()
    got = linear_logprob_entropy(*mine, targets, temperature, backend=body)
    want = reference(exact[0] @ exact[1].t(), targets, temperature)
    close(torch.stack(got), torch.stack(want), 1e-5)
    for a, b in zip(
        gradients(got, upstream, [mine[i] for i in leaves]),
        gradients(want, upstream, [exact[i] for i in leaves]),
    ):
        close(a, b, 1e-5, 1e-5)


@both_bodies
def test_bfloat16_inputs_keep_float32_logits(body):
    """Logits rounded to bfloat16 move log-probs by 0.01 to 0.2 nat (maxtext 5231)."""
    hidden, weight, targets = linear_case(16, 64, 500, torch.bfloat16, std=6.0)
    mine, exact = (
        [hidden.clone().requires_grad_(), weight.clone().requires_grad_()],
        [hidden.double(), weight.double()],
    )
    got = linear_logprob_entropy(*mine, targets, 0.7, backend=body)
    want = reference((exact[0].requires_grad_() @ exact[1].requires_grad_().t()), targets, 0.7)
    close(torch.stack(got), torch.stack(want), 3e-5)
    rounded = reference(hidden @ weight.t(), targets, 0.7)[0]
    assert (rounded - want[0]).abs().max() > 1e-2
    upstream = torch.randn(2, 16, device=DEVICE)
    for a, b in zip(gradients(got, upstream, mine), gradients(want, upstream, exact)):
        assert a.dtype == torch.bfloat16
        assert (a.double() - b).norm() / b.norm() < 8e-3


@NEEDS_TRITON
@pytest.mark.parametrize("n,h,v", [(1, 64, 1), (5, 96, 1000), (70, 100, 1025), (130, 64, 130)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_forward_equals_float64_at_sizes_that_fit_no_tile(n, h, v, dtype, monkeypatch):
    """H % 128 refused, phantom columns, a wrong merge. Few rows without gradient take the fused kernel."""
    runs = []
    plain = linear_logprob.fused_stats
    monkeypatch.setattr(linear_logprob, "fused_stats", lambda *a: runs.append(1) or plain(*a))
    hidden, weight, targets = linear_case(n, h, v, dtype)
    hidden[:, 0], weight[:, 0] = 4.0, -8.0  # logits near -32: a phantom zero would win
    targets[0] = v - 1
    temperature = torch.linspace(0.7, 1.3, n, device=DEVICE)
    with torch.no_grad():
        got = linear_logprob_entropy(hidden, weight, targets, temperature, backend="triton")
    assert runs == [1]
    close(
        torch.stack(got),
        torch.stack(reference(hidden.double() @ weight.double().t(), targets, temperature)),
        3e-5,
    )


def test_dtypes_may_differ_and_each_gradient_has_its_own():
    """bfloat16 hidden states with a float32 head failed in the backward only (trl 7077)."""
    hidden, weight, targets = linear_case(6, 16, 90)
    for a, b in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        x, w = hidden.to(a).requires_grad_(), weight.to(b).requires_grad_()
        got = linear_logprob_entropy(x, w, targets)
        close(torch.stack(got), torch.stack(reference(x.double() @ w.double().t(), targets)), 1e-5)
        dx, dw = gradients(got, torch.ones(2, 6, device=DEVICE), [x, w])
        assert dx.dtype == a and dw.dtype == b


def test_autocast_does_not_round_the_logits():
    """Under autocast a matrix product inside turns to bfloat16, and log-probs lose two digits."""
    hidden, weight, targets = linear_case(6, 64, 90)
    plain = linear_logprob_entropy(hidden, weight, targets)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        for a, b in zip(plain, linear_logprob_entropy(hidden, weight, targets)):
            assert torch.equal(a, b)


@pytest.mark.parametrize("width", [None, 3])
def test_torch_body_passes_gradcheck_in_float64(width, monkeypatch):
    """The backward against finite differences, with an ignored row and a temperature for each row."""
    narrow_slices(monkeypatch, width)
    targets, temperature = torch.tensor([1, 6, -100, 0]), torch.tensor([1.0, 0.5, 1.0, 2.0])
    logits = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    hidden = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda z: logprob_entropy(z, targets, temperature), logits)
    torch.autograd.gradcheck(
        lambda x, w: linear_logprob_entropy(x, w, targets, temperature), (hidden, weight)
    )


@both_bodies
@pytest.mark.parametrize("width,products", [(None, 3), (100, 4 * 3)])
def test_one_slice_keeps_its_logits_and_more_make_them_again(body, width, products, monkeypatch):
    """3 matrix products when the vocabulary fits in one slice, else 4 for each; and a second backward of the
    same graph is right although the first one overwrote the kept logits."""
    narrow_slices(monkeypatch, width)
    count, plain = [], linear_logprob.product
    monkeypatch.setattr(linear_logprob, "product", lambda *a: count.append(1) or plain(*a))
    hidden, weight, targets = (a.requires_grad_(i < 2) for i, a in enumerate(linear_case(5, 16, 300)))
    logp, _ = linear_logprob_entropy(hidden, weight, targets, backend=body)
    first = torch.autograd.grad(logp.sum(), [hidden, weight], retain_graph=True)
    assert len(count) == products
    second = torch.autograd.grad(logp.sum(), [hidden, weight])
    for a, b in zip(first, second):
        assert torch.equal(a, b)


def test_no_tensor_of_all_logits_is_ever_made():
    """The largest tensor of forward and backward stays within the workspace and the gradients."""
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple | list) else (out,):
                largest = max(largest, x.untyped_storage().nbytes() if torch.is_tensor(x) else 0)
            return out

    hidden, weight, targets = linear_case(512, 16, 49152)
    with Sizes():
        logp, entropy = linear_logprob_entropy(hidden.requires_grad_(), weight.requires_grad_(), targets)
        (logp + 0.1 * entropy).sum().backward()
    assert largest <= linear_logprob.WORKSPACE[DEVICE] < 512 * 49152 * 4


# ---------------------------------------------------------------- the borders


@NEEDS_TRITON
def test_a_grpo_step_is_the_same_with_kernel_and_torch():
    """Loss and gradients of the clipped policy loss: two copies of the numerics that drift (Liger 1082)."""
    hidden, weight, targets = linear_case(24, 32, 260)
    mask = torch.rand(24, device=DEVICE) > 0.3
    advantage = torch.randn(24, device=DEVICE)
    old = reference(hidden @ weight.t(), targets)[0].float() + 0.3 * torch.randn(24, device=DEVICE)
    results = []
    for body in ("torch", "triton"):
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logp, entropy = linear_logprob_entropy(x, w, targets.masked_fill(~mask, -100), backend=body)
        ratio = torch.where(mask, logp - old, 0.0).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage) + 0.01 * entropy
        loss = -(gain * mask).sum() / mask.sum()
        results.append((loss, *torch.autograd.grad(loss, [x, w])))
    for a, b in zip(*results):
        close(a, b, 1e-6)


@both_bodies
def test_no_rows_at_all_is_fine(body):
    """A rank whose micro-batch has no policy token still runs the step."""
    hidden, weight, targets = linear_case(0, 8, 50)
    for outputs, leaf in (
        (linear_logprob_entropy(hidden, weight.requires_grad_(), targets, backend=body), weight),
        (
            logprob_entropy(
                logits := torch.zeros(0, 50, device=DEVICE).requires_grad_(), targets, backend=body
            ),
            logits,
        ),
    ):
        assert outputs[0].shape == outputs[1].shape == (0,)
        outputs[0].sum().backward()
        assert (leaf.grad == 0).all()


def test_bad_input_is_refused_with_its_value():
    """Nothing falls back in silence."""
    logits, targets = case(3, 10)
    for pattern, call in (
        ("above 0", lambda: logprob_entropy(logits, targets, 0.0)),
        ("above 0", lambda: logprob_entropy(logits.cpu(), targets.cpu(), torch.tensor([1.0, -1.0, 1.0]))),
        ("above 0", lambda: logprob_entropy(logits, targets, torch.ones(2, device=DEVICE))),
        ("integers", lambda: logprob_entropy(logits, targets.float())),
        ("integers", lambda: logprob_entropy(logits, targets[:2])),
        (r"\[1, 3, 10\]", lambda: logprob_entropy(logits[None], targets)),
        ("do not fit", lambda: linear_logprob_entropy(logits, logits[:, :5], targets)),
        ("backend", lambda: logprob_entropy(logits, targets, backend="cuda")),
        ("float64", lambda: logprob_entropy(logits.double(), targets, backend="triton")),
    ):
        with pytest.raises(ValueError, match=pattern):
            call()


def test_the_cpu_trains_on_the_torch_body_even_under_the_interpreter():
    """The interpreter is a thousand times slower: it runs only for those who name it."""
    assert which_body(torch.zeros(1)) == "torch"
    if TRITON:
        assert which_body(torch.zeros(1, device=DEVICE), "triton") == "triton"


def test_everything_works_without_triton():
    """An optional import that is not optional, or one that hides a body nobody runs (trl 7253)."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from kernels.linear_logprob import linear_logprob_entropy as f\n"
        "w = torch.zeros(4, 2, requires_grad=True)\n"
        "logp, entropy = f(torch.ones(3, 2), w, torch.tensor([0, 1, -100])); logp.sum().backward()\n"
        "print(logp.tolist(), w.grad[:, 0].tolist())"
    )
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert (
        run.stdout.strip() == f"[{-math.log(4):.16g}, {-math.log(4):.16g}, 0.0] [0.5, 0.5, -0.5, -0.5]"
        or (run.stdout.startswith("[-1.386294") and run.stdout.strip().endswith("[0.5, 0.5, -0.5, -0.5]"))
    ), run.stdout + run.stderr
