"""Decode steps launched ahead of the host: no value is asked of the device, and no token is one too many."""

import concurrent.futures
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import FAMILIES, small_model
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.overrides import TorchFunctionMode

import rollout
from attention import Blocks
from decode import DecodeStep
from rollout import Sampler
from sampling import draw_tokens

BARE = SimpleNamespace(eos_token_id=None)


class NothingMade(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        made = (torch.tensor, torch.as_tensor, torch.from_numpy, torch.asarray, torch.Tensor.cpu)
        assert function not in (*made, torch.Tensor.cuda), f"{function.__name__} in a decode step"
        return function(*args, **(kwargs or {}))


def head_and_draw(model, law=(1.0, 1.0, 0)):
    return lambda hidden, uniform: draw_tokens(model.get_output_embeddings()(hidden), uniform, *law)


@pytest.mark.parametrize("law", [(1.0, 1.0, 0), (0.6, 0.9, 20), (0.0, 1.0, 0)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_decode_step_asks_the_device_for_no_value(family, law):
    """A CUDA graph can record neither a value read from the device nor one written to it, and without a graph
    each stops the host. Reading raises on tensors that have no content; writing is a call that makes a tensor
    out of Python's or numpy's."""
    real = small_model(family)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        model = type(real)(real.config).eval()
        step = DecodeStep(model, Blocks(real.config, 9, 4), 4, 2, head_and_draw(model, law))
        with NothingMade():
            step._compute()
        with pytest.raises(AssertionError), NothingMade():
            torch.as_tensor(0.6)
        with pytest.raises(DataDependentOutputException):  # as a step that asks for a value would
            step.drawn[0].tolist()


@torch.inference_mode()
def test_places_without_a_row_change_nothing_of_the_others():
    """A step is recorded for a few numbers of rows; the places left over compute on block 0."""
    model = small_model("qwen3")
    found = []
    for places in (3, 8):
        blocks = Blocks(model.config, 9, 4)
        tables = [[1, 2], [3, 4], [5]]
        step = DecodeStep(model, blocks, places, 2, head_and_draw(model))
        reads = [
            step.launch([p, p, p], tables, [0.2, 0.5, 0.8], [7, 8, 9] if p == 0 else None)() for p in range(4)
        ]
        found.append(reads)
    for (a, x), (b, y) in zip(*found):
        assert a == b and all(math.isclose(p, q, abs_tol=1e-5) for p, q in zip(x, y))


def test_the_next_step_is_launched_before_the_tokens_of_this_one_are_read(monkeypatch):
    """Reading first, the GPU waits for Python at every token."""
    events, plain = [], DecodeStep.launch

    def launch(self, *given, **more):
        events.append("launch")
        read = plain(self, *given, **more)

        def reads():
            events.append("read")
            return read()

        return reads

    monkeypatch.setattr(DecodeStep, "launch", launch)
    sampler = Sampler(small_model("qwen3", eos_token_id=None), BARE, max_rows=2, graphs=True)
    sampler.generate([[5, 6, 7]], 2, 6)
    assert events == ["launch"] + ["launch", "read"] * 5 + ["read"]  # none after the one that ends both rows


def test_broken_logits_of_a_step_ahead_stop_the_run_when_its_tokens_are_read(monkeypatch):
    """A recorded step cannot raise: a row of NaN must be found when its token is read."""
    model = small_model("qwen3", eos_token_id=None)
    sampler = Sampler(model, BARE, max_rows=2, graphs=True)
    plain, calls = rollout.draw_tokens, []

    def breaks(logits, *more):
        calls.append(len(logits))
        return plain(logits * (float("nan") if len(calls) > 3 else 1.0), *more)

    monkeypatch.setattr(rollout, "draw_tokens", breaks)
    with pytest.raises(FloatingPointError, match="of 2 rows have NaN"):
        sampler.generate([[5, 6, 7]], 2, 20)
    assert sorted(sampler.blocks.free) == list(range(1, len(sampler.blocks.count)))


def test_a_queue_that_waits_for_blocks_does_not_stop_the_steps_ahead(monkeypatch):
    """With long answers the cache is full and the batch is not: no row could join, so none is waited for."""
    first, plain = [], DecodeStep.launch

    def launch(self, past, tables, uniform, ids):
        first.append(ids is not None)
        return plain(self, past, tables, uniform, ids)

    monkeypatch.setattr(DecodeStep, "launch", launch)
    model = small_model("qwen3", eos_token_id=None)
    sampler = Sampler(model, BARE, 16, 50, cache_tokens=240, block=4, graphs=True)
    sampler.generate([[5, 6], [7, 8]], 8, 44)
    assert sampler.stats["put_back"] > 0 and first.count(False) > 3 * first.count(True)


def test_a_run_after_one_that_was_broken_off_in_a_step_ahead_is_the_same(monkeypatch):
    """The recorded steps are kept from run to run, and a step that nobody has read must not count in the
    next one. Prompts come from an iterator, as on ranks that share them."""
    model = small_model("qwen3", eos_token_id=None)
    sampler = Sampler(model, BARE, max_rows=3, graphs=True)
    right = sampler.generate([[5, 6, 7], [8, 9]], 3, 9)
    with monkeypatch.context() as broken:
        broken.setattr(sampler, "_append", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sampler.generate([[5, 6, 7], [8, 9]], 3, 9)
    assert any(step.unread for step in sampler.graphs.values())
    found = sampler.generate(iter([[5, 6, 7], [8, 9]]), 3, 9)
    assert [t.ids for t in found] == [t.ids for t in right]


@pytest.mark.parametrize("settings", [dict(max_rows=8), dict(max_rows=3), dict(cache_tokens=200)], ids=str)
@pytest.mark.parametrize("deterministic", [True, False])
def test_agents_write_the_same_as_without_steps_ahead(settings, deterministic):
    """The step that a row made too far feeds an end token and draws another: neither may stay behind, in ids,
    in the cache or in the count of what is cached."""
    model = small_model("qwen3", eos_token_id=list(range(30, 42)))  # a turn ends every ten tokens
    prompts = [[5, 6, 7], [9, 8], [11, 12, 13, 14, 15]]

    def respond(row):
        done = concurrent.futures.Future()
        done.set_result(f"turn {row.turns}")
        return [done] * (row.turns < 4)

    def run(graphs):
        how = dict(block=4, deterministic=deterministic, graphs=graphs)
        sampler = Sampler(model, BARE, max_len=110, **settings, **how)
        found = sampler.generate(prompts, 4, 100, 1.0, 1.0, 0, 0, None, respond, lambda *_: [50, 51, 52])
        assert sorted(sampler.blocks.free) == list(range(1, len(sampler.blocks.count)))
        assert sampler.stats["tokens"] == sum(sum(t.mask) for t in found)
        return found, sampler.stats

    (right, stats), (found, _) = run(False), run(True)
    assert sum(len(t.tool_results) for t in right) > 5 and {"stop", "length"} == {t.finish for t in right}
    assert stats["put_back"] > 0 or "cache_tokens" not in settings
    for a, b in zip(right, found):
        assert (a.ids, a.mask, a.finish, a.tool_results) == (b.ids, b.mask, b.finish, b.tool_results)
        assert all(math.isclose(p, q, abs_tol=1e-4) for p, q in zip(a.logprobs, b.logprobs))


def test_a_tool_result_joins_as_soon_as_it_is_there():
    """Rows that run ahead must look up for a tool's answer, else it waits for the longest of them."""
    model = small_model("qwen3", eos_token_id=40)
    sampler = Sampler(model, BARE, max_rows=8, graphs=True, deterministic=False)
    answers, seen = [], []

    def respond(row):
        if row.turns > 1:
            return []
        answers.append(concurrent.futures.Future())
        return answers[-1:]

    def follow(row, results):
        seen.append(sampler.stats["steps"])
        return [5]

    plain = sampler._goes_on

    def goes_on(rows):
        for future in answers:  # a tool that takes some steps
            if not future.done() and sampler.stats["steps"] > 8:
                future.set_result("done")
                answered.append(sampler.stats["steps"])
        return plain(rows)

    answered: list[int] = []
    sampler._goes_on = goes_on
    sampler.generate([[5, 6, 7]], 8, 60, 1.0, 1.0, 0, 0, None, respond, follow)
    assert answered and seen and all(b - a <= 2 for a, b in zip(answered, seen))
