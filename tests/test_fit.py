"""What is predicted before a run is what torch holds; the rehearsal changes nothing.

For Qwen3-4B on 8 ranks this very file is started as a program of its own: torch's memory tracker for FSDP2
follows fake tensors through a fake process group of 8, without memory and without a GPU.
"""

import inspect
import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import SMALL, small_model
from transformers import AutoConfig

import fit
import grpo
import policy as net
from attention import Segments, trunk
from kernels.linear_logprob import linear_logprob_entropy
from rollout import Sampler

SHAPE = dict(
    preset="tiny", batch=8, group=2, max_prompt=24, max_new_tokens=40, max_rows=8, tokens_per_row=256
)
RATES = fit.H100


def small_plan(config: grpo.Config, memory: float = 80e9, **more) -> fit.Plan:
    model_config = AutoConfig.for_model("qwen3", **{**SMALL, **more})
    return fit.plan(config, model_config, 1, "cpu", memory, RATES)


def preset(name: str) -> grpo.Config:
    return grpo.Config(**{"preset": name, **grpo.PRESETS[name]})


def bytes_of(tensors) -> int:
    """Of the different storages of tensors."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("tied", [True, False])
def test_weights_gradients_and_states_have_the_bytes_that_torch_holds(tied):
    """A tied head counted twice is 0.8 GB too much for Qwen3-4B; without a state of AdamW 2 GB lack."""
    model = small_model("qwen3", tie_word_embeddings=tied)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(input_ids=torch.arange(9)[None], use_cache=False).logits.sum().backward()
    optimizer.step()
    items = small_plan(grpo.Config(**SHAPE), tie_word_embeddings=tied).items
    (weights,) = [item for name, item in items.items() if name.startswith("weights")]
    states = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    assert weights["load"] == weights["backward"] == bytes_of(model.parameters())
    assert items["AdamW's two states"]["sample"] == bytes_of(states)
    assert items["gradients, float32"]["update"] == bytes_of(w.grad for w in model.parameters())


def test_the_cache_has_the_bytes_that_the_sampler_takes(tokenizer):
    """The cache is the largest item of a GPU: a factor of 2 (keys and values) or of query to key heads."""
    config = grpo.Config(**SHAPE)
    p = small_plan(config)
    sampler = Sampler(small_model("qwen3"), tokenizer, 8, 64, p.cache_tokens)
    block = sampler.blocks.k[:, :1].nbytes * 2  # the one that belongs to nobody
    assert sampler.blocks.k.nbytes + sampler.blocks.v.nbytes - block == p.items["KV cache"]["sample"]


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_kept_activations_are_the_tensors_that_autograd_saves(family):
    """Activations are predicted from two layers of fake tensors: any op that keeps more would be missed."""
    model, n, saved = small_model(family).train(), 48, []
    own = {w.untyped_storage()._cdata for w in model.parameters()}

    def save(t):
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
        hidden = trunk(model, torch.arange(n), Segments([n]))
    found = bytes_of([t for t in [*saved, hidden] if t.untyped_storage()._cdata not in own])
    kept, _ = fit.layers_memory(model.config, n, torch.float32)
    assert found == pytest.approx(kept, rel=0.03)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_peak_of_fake_tensors_is_the_peak_of_real_ones(checkpointing):
    """Recomputation and the temporaries of a backward count, not only what is kept."""
    model, n = small_model("qwen3", num_hidden_layers=6).train(), 96
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(lambda w: setattr(w, "grad", None))
    ids, seg = torch.arange(n), Segments([n])
    with fit.Tracker([*model.parameters(), ids, seg.position]) as tracker:
        hidden = trunk(model, ids, seg)
        kept = tracker.live
        hidden.backward(torch.ones_like(hidden))
    predicted = fit.layers_memory(model.config, n, torch.float32, checkpointing)
    assert (kept, tracker.peak) == pytest.approx(predicted, rel=0.03)
    assert predicted[1] > 1.5 * predicted[0] or not checkpointing


def test_the_heads_workspace_is_what_its_backward_holds():
    """The full logits of 23,040 rows would be 14 GB; a chunked head must be predicted as such."""
    n, v, h = 2048, 16384, 64
    hidden, weight = torch.randn(n, h, requires_grad=True), torch.randn(v, h, requires_grad=True)
    with fit.Tracker([hidden, weight]) as tracker:
        logp, _ = linear_logprob_entropy(hidden, weight, torch.zeros(n, dtype=torch.long))
        logp.sum().backward()
    assert tracker.peak - weight.nbytes == pytest.approx(fit.head_memory(n, v, h, 4, "cpu"), rel=0.15)


def test_qwen3_4b_on_8_ranks_needs_what_torchs_tracker_says():
    """Gathered layers, unreduced gradients and the reduction are FSDP's own; four layers show all of them."""
    environment = {**os.environ, "PYTHONPATH": str(Path(fit.__file__).parent)}
    command = [sys.executable, __file__]
    out = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert out.returncode == 0, out.stderr
    measured = json.loads(out.stdout.splitlines()[-1])  # [tokens of the row, bytes at the peak]
    for n, peak in measured:
        config = replace(preset("qwen3-4b"), max_prompt=n // 2, max_new_tokens=n - n // 2, tokens_per_row=n)
        four = fit.known(config.model)
        four.num_hidden_layers, four.layer_types = 4, four.layer_types[:4]
        p = fit.plan(config, four, 8, "cuda", 80e9, RATES)
        others = (
            "AdamW",
            "the sampler",
            "KV",
            "CUDA",
            "gradients",
            "workspace",
        )  # not yet there, or not asked
        training = {k: v for k, v in p.items.items() if not k.startswith(others)}
        predicted = max(sum(i.get(m, 0) for i in training.values()) for m in ("head", "backward", "update"))
        assert predicted == pytest.approx(peak, rel=0.06)


@pytest.mark.parametrize(
    "name, ranks, millions", [("qwen3-0.6b", 1, "596"), ("qwen3-4b", 8, "4,022"), ("qwen2.5-7b", 8, "7,615")]
)
def test_the_presets_fit_in_80_gb(name, ranks, millions):
    """The presets' models stand in fit.py by their numbers: their weights must be as many as published."""
    config = preset(name)
    p = fit.predict(config, fit.known(config.model), ranks, "cuda", 80e9, RATES)
    assert f"weights, float32, 1/{ranks} of {millions}," in str(p)
    assert p.need <= 80e9 and "It fits" in str(p)
    assert p.cache_tokens >= 5 * (config.max_prompt + config.max_new_tokens)


def test_what_does_not_fit_says_what_to_lower_and_then_fits():
    """A table that only says no leaves the reader to search among fifty options."""
    config = replace(preset("qwen3-4b"), cache_tokens=400_000)
    where = fit.known(config.model), 8, "cuda", 80e9, RATES
    p = fit.predict(config, *where)
    tokens = int(p.advice.split("--cache_tokens ")[1].strip("."))
    assert "DOES NOT FIT in 80.0 GB" in p.advice and "--max_new_tokens" not in p.advice
    again = fit.predict(replace(config, cache_tokens=tokens), *where)
    assert not again.advice and again.need <= 80e9
    one = fit.predict(config, where[0], 1, "cuda", 20e9, RATES)
    way = "--cache_tokens 32000 --offload --max_new_tokens 5120 --tokens_per_row 7680"
    assert one.advice.endswith(f"take {way}.")
    followed = replace(config, cache_tokens=32000, offload=True, max_new_tokens=5120, tokens_per_row=7680)
    assert not fit.predict(followed, where[0], 1, "cuda", 20e9, RATES).advice
    assert (
        "take more ranks, or a smaller model" in fit.predict(config, where[0], 1, "cuda", 8e9, RATES).advice
    )
    low = replace(config, tokens_per_row=8192)  # a row is never lowered to more
    assert "--tokens_per_row 23040" not in fit.predict(low, where[0], 1, "cuda", 40e9, RATES).advice


def test_offloaded_states_leave_the_device():
    """With --offload float32 weights, gradients and AdamW's states are in CPU memory."""
    config = preset("qwen2.5-7b")
    model_config = fit.known(config.model)
    here, away = (
        fit.plan(replace(config, offload=o, cache_tokens=23040), model_config, 8, "cuda", 80e9, RATES)
        for o in (False, True)
    )
    assert here.total("update") - away.total("update") == pytest.approx(16 * 7.6156e9 / 8, rel=1e-3)


@pytest.mark.parametrize("steps", [0, 1])
def test_the_rehearsal_changes_no_bit(tokenizer, steps):
    """A rehearsal that steps the optimizer, even with rate 0, moves AdamW's step count: updates differ."""
    config = replace(grpo.Config(**SHAPE), mini_batches=1)
    found = []
    for rehearsed in (False, True):
        model = small_model("qwen3")
        policy = net.shard(net.Policy(model), "cpu")
        optimizer = torch.optim.AdamW(policy.parameters(), 1e-2, fused=True)
        sampler = Sampler(model, tokenizer, 8, 64)
        row = net.packed_row([[5, 6, 7, 8, 9]], [[0, 0, 1, 1, 1]])

        def train(policy=policy, row=row, optimizer=optimizer):
            policy(*row)[0].sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(steps):  # a continued run has states already
            train()
        torch.manual_seed(7)
        if rehearsed:
            large = replace(small_plan(config), items={"": {"head": 1e10}})
            fit.rehearse(large, policy, optimizer, sampler, config, "cpu")
            assert all(w.grad is None for w in policy.parameters())
        sampled = sampler.generate([[3, 4, 5]], 4, 12, seed=1)
        train()
        found.append(
            [torch.rand(3), *policy.parameters(), *(t for s in optimizer.state.values() for t in s.values())]
            + [torch.tensor(t.ids) for t in sampled]
            + [torch.tensor(t.logprobs) for t in sampled]
        )
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    "where, sentence", [("sampler", "lower --max_rows"), ("policy", "lower --cache_tokens, --tokens_per_row")]
)
def test_memory_that_runs_out_in_the_rehearsal_names_what_and_the_setting(
    tokenizer, monkeypatch, capsys, where, sentence
):
    """A stack trace of the allocator at hour 20 says neither."""

    def full(*args, **kw):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    config = grpo.Config(**SHAPE)
    model = small_model("qwen3")
    policy, sampler = net.Policy(model), Sampler(model, tokenizer, 8, 64)
    monkeypatch.setattr(*((sampler, "generate") if where == "sampler" else (policy, "forward")), full)
    large = replace(small_plan(config), items={"": {"head": 1e10}})
    with pytest.raises(SystemExit):
        fit.rehearse(large, policy, torch.optim.AdamW(policy.parameters()), sampler, config, "cpu")
    said = capsys.readouterr().err
    assert sentence in said and "Tried to allocate 2.00 GiB" in said and said.count("\n") == 1
    with pytest.raises(RuntimeError, match="shapes"), fit.holding("", ""):
        raise RuntimeError("shapes do not fit")  # another error stays what it is


def test_a_laptop_run_is_predicted_but_not_rehearsed_and_compared_in_one_line():
    """The laptop's seconds are counted; a step that costs one more would be felt."""
    config = preset("tiny")
    p = fit.predict(config, fit.known(""), 1, "cpu")
    assert not p.advice and p.need < 2e9 + fit.LIBRARIES
    fit.rehearse(p, None, None, None, config, "cpu")
    row = {"speed/tokens_per_s": 19800.0, "time/rollout": 0.98, "time/train": 1.87, "time/step": 2.89}
    line = fit.compare(p, row, "cpu")
    assert "\n" not in line and "/ 1.98e+04" in line and "step s" in line
    with pytest.raises(SystemExit):  # the kernel would kill it
        fit.rehearse(replace(p, advice="IT DOES NOT FIT"), None, None, None, config, "cpu")


# ---- the program that torch's tracker follows --------------------------------------------------------------


class Head(torch.autograd.Function):
    """In place of the log-prob, which asks for values that fake tensors lack; d weight has its size."""

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight)
        return hidden.float().sum(1)

    @staticmethod
    def backward(ctx, g):
        return tuple(torch.empty_like(t) for t in ctx.saved_tensors)


class Trained(torch.nn.Module):
    def __init__(self, hf):
        super().__init__()
        self.hf = hf

    def forward(self, ids, seg):
        return Head.apply(trunk(self.hf, ids, seg), self.hf.get_output_embeddings().weight)


def track(tokens: int, layers: int = 4) -> int:
    """Peak in bytes of one micro-batch of a packed row of Qwen3-4B with `layers` layers, rank 0 of 8."""
    from torch._subclasses import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoModelForCausalLM

    config, seg = fit.known("Gen-Verse/Qwen3-4B-RA-SFT"), Segments([tokens])
    config.num_hidden_layers, config.layer_types = layers, config.layer_types[:layers]
    mesh = torch.distributed.init_device_mesh("cpu", (8,))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with FakeTensorMode(allow_non_fake_inputs=True):
        policy = Trained(AutoModelForCausalLM.from_config(config)).train()
        policy.hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for layer in policy.hf.base_model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=precision)
        fully_shard(policy, mesh=mesh, mp_policy=precision)
        tracker = FSDPMemTracker(policy)
        with tracker:
            policy(torch.zeros(tokens, dtype=torch.long), seg).sum().backward()
    (sizes,) = tracker.get_tracker_snapshot("peak").values()
    return next(v for k, v in sizes.items() if "Total" in str(k))


@pytest.mark.parametrize(
    "options, words",
    [
        (["--ranks", "0"], "--ranks 0: take more than 0"),
        (["--memory", "-5"], "--memory -5.0: take more than 0"),
        (["--group", "1"], "--group 1: a group of one"),
    ],
)
def test_the_table_is_refused_for_settings_that_the_run_would_refuse(monkeypatch, capsys, options, words):
    """It fits, for a run that cannot be started, is no answer."""
    monkeypatch.setattr(sys, "argv", ["fit.py", "--preset", "qwen3-4b", *options])
    with pytest.raises(SystemExit):
        fit.main()
    assert words in capsys.readouterr().err


def test_memory_is_that_of_this_program_and_not_of_the_one_that_started_it():
    """getrusage keeps its peak across exec: started from a notebook of 20 GB, nothing would fit."""
    code = "import re, resource, sys\nfrom contextlib import suppress\nfrom pathlib import Path\n"
    code += inspect.getsource(fit.peak_memory) + "print(peak_memory('cpu'))"
    start = f"import os, sys\nheld = b'x' * 300_000_000\nos.execv(sys.executable, ['python', '-c', {code!r}])"
    done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, timeout=60)
    assert 1e6 < int(done.stdout) < 1e8, done.stderr


if __name__ == "__main__":
    from torch.testing._internal.distributed.fake_pg import FakeStore

    warnings.filterwarnings("ignore")
    torch.distributed.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    layers = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    print(json.dumps([[n, track(n, layers)] for n in ([512, 23040] if layers == 4 else [23040])]))
