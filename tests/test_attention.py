"""Attention in one packed row: exact for every family that is served, refused for the others; blocks."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import FAMILIES, small_model
from transformers import AttentionInterface, AutoConfig

import attention
from attention import Blocks, Segments, trunk
from policy import audit, load, sampler_copy

ROOT = Path(__file__).parent.parent
every_family = pytest.mark.parametrize("family", FAMILIES)


def some_ids(*lengths: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 128, (n,), generator=generator) for n in lengths]


@torch.no_grad()
def own_logits(model, sequences) -> list[torch.Tensor]:
    """The model's own forward, each sequence alone, without a cache: what everything here is compared
    with."""
    return [model(input_ids=ids[None], use_cache=False).logits[0] for ids in sequences]


def our_logits(model, ids, seg) -> torch.Tensor:
    return model.get_output_embeddings()(trunk(model, ids, seg))


@torch.no_grad()
def fed_through_cache(model, sequences, blocks: Blocks, prompt: int, plan) -> list[torch.Tensor]:
    """Logits after the shared first `prompt` tokens, which are fed once and forked.

    plan: for each forward, how many more tokens of each sequence are in its packed row (0: it is left
    out)."""
    root: list[int] = []
    assert blocks.grow(root, prompt)
    seg = Segments([prompt], [0], torch.tensor([root]), blocks)
    trunk(model, sequences[0][:prompt], seg)
    tables = [blocks.fork(root, prompt) for _ in sequences]
    blocks.release(root)
    past, got = [prompt] * len(sequences), [[] for _ in sequences]
    for new in plan:
        here = [i for i, n in enumerate(new) if n]
        assert all(blocks.grow(tables[i], past[i] + new[i]) for i in here)
        width = max(len(tables[i]) for i in here)
        padded = torch.tensor([tables[i] + [0] * (width - len(tables[i])) for i in here])
        ids = torch.cat([sequences[i][past[i] : past[i] + new[i]] for i in here])
        seg = Segments([new[i] for i in here], [past[i] for i in here], padded, blocks)
        pieces = our_logits(model, ids, seg).split([new[i] for i in here])
        for i, piece in zip(here, pieces):
            got[i].append(piece)
            past[i] += new[i]
    for table in tables:
        blocks.release(table)
    assert past == [len(ids) for ids in sequences]
    return [torch.cat(pieces) for pieces in got]


# ------------------------------------------------------------------------------------------ exact, or refused


@every_family
def test_every_promised_family_passes_the_audit(family):
    """A family that a new version of transformers computes differently would be refused, or worse, trained
    wrongly. The audit must leave the model and the random numbers as they were."""
    model = small_model(family)
    state, before = torch.get_rng_state(), [w.clone() for w in model.parameters()]
    audit(model)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


@every_family
def test_a_packed_row_equals_its_sequences_apart(family):
    """Sequences that see each other, or positions that run on through the row: the loss is then of another
    text (MeetKai/functionary#265, huggingface/trl#1230). Lengths below, at and far beyond the window of 8,
    and of one token."""
    model, sequences = small_model(family), some_ids(5, 1, 23, 8, 9)
    right = torch.cat(own_logits(model, sequences))
    with torch.no_grad():
        ours = our_logits(model, torch.cat(sequences), Segments([len(ids) for ids in sequences]))
    torch.testing.assert_close(ours, right, atol=1e-4, rtol=0)


@every_family
def test_a_prompt_fed_once_and_forked_then_continued_in_mixed_rows_equals_the_full_forward(family):
    """A cache or a window that is one position off in decode (huggingface/transformers#26344,
    karpathy/nanochat#456), a tool's text prefilled at the wrong place (GeeeekExplorer/nano-vllm#67). 13
    shared tokens leave the fourth block of 4 partly filled; every forward mixes rows of several tokens with
    rows of one, and two forwards are pure decode."""
    prompt, *tails = some_ids(13, 10, 5, 4, 22)
    model, sequences = small_model(family), [torch.cat([prompt, tail]) for tail in tails]
    right = own_logits(model, sequences)
    plan = [(3, 1, 1, 7), (1, 1, 0, 9), (4, 0, 1, 1), (1, 1, 1, 3), (1, 1, 1, 1), (0, 1, 0, 1)]
    blocks = Blocks(model.config, 64, 4)
    ours = fed_through_cache(model, sequences, blocks, 13, plan)
    for got, logits in zip(ours, right):
        torch.testing.assert_close(got, logits[13:], atol=1e-4, rtol=0)
    assert sorted(blocks.free) == list(range(1, 64)) and not any(blocks.count)


REFUSED = {  # (family, what its configuration adds): words of the reason
    "gemma2": (dict(sliding_window=8, query_pre_attn_scalar=16), "soft-cap"),
    "gpt_oss": (dict(sliding_window=8, num_local_experts=4, num_experts_per_tok=2), "sinks"),
    "stablelm": ({}, "packed into one row differ"),
    "qwen3_5_text": (  # layers of linear attention carry a state from one sequence of the row to the next
        dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
             linear_value_head_dim=16),
        "packed into one row differ|layers",
    ),
    "granite": (dict(logits_scaling=8.0), "logits are not hidden"),
    "qwen3": (dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)), "rope.*'dynamic'"),
    "llama": (dict(attention_dropout=0.1), "dropout is 0.1"),
}  # fmt: skip


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_would_be_computed_wrongly_is_refused_by_name_and_reason(family):
    """Nothing crashes in these families: a keyword is dropped, a state runs over the border of two sequences,
    the logits are scaled after the head, and the numbers are just wrong."""
    more, reason = REFUSED[family]
    with pytest.raises(ValueError, match=f"'{family}'.*({reason})"):
        audit(small_model(family, **more))


def test_every_dropout_is_off_after_loading_whatever_a_family_calls_it(tokenizer, tmp_path):
    """Some hand a number of their own to the function and have no module for it: trained with it, a first
    ratio is not 1."""
    more = dict(attention_dropout=0.1, residual_dropout=0.5, vocab_size=len(tokenizer))
    small_model("seed_oss", **more).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = load(str(tmp_path))[0].train()
    ids = torch.arange(9)[None]
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
    assert AutoConfig.from_pretrained(tmp_path).residual_dropout == 0.5
    with pytest.raises(ValueError, match="its (attention|residual)_dropout is 0"):
        audit(small_model("seed_oss", **more))


MORE = {  # families that nobody promised: each is either exact or refused
    "qwen2_moe": dict(num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=32),
    "qwen3_moe": dict(num_experts=4, moe_intermediate_size=32, num_experts_per_tok=2),
    "mixtral": dict(num_local_experts=4),
    "gemma": {}, "phi": {}, "glm4": {}, "ernie4_5": {}, "seed_oss": {}, "nemotron": {}, "lfm2": {},
    "granite": dict(attention_multiplier=0.2, embedding_multiplier=2.0, residual_multiplier=0.5),
    "starcoder2": dict(sliding_window=12), "cohere2": dict(sliding_window=12),
    "exaone4": dict(sliding_window=12), "phi3": dict(sliding_window=12),
    "hunyuan_v1_dense": {}, "gpt_neox": {}, "opt": dict(ffn_dim=96, word_embed_proj_dim=64),
    "gemma4_text": dict(sliding_window=12, global_head_dim=16, hidden_size_per_layer_input=8,
                        vocab_size_per_layer_input=128, num_kv_shared_layers=0),
    "bloom": dict(n_head=4, n_layer=4), "mpt": dict(d_model=64, n_heads=4, n_layers=4),
    "minimax": dict(num_local_experts=4),
}  # fmt: skip


@pytest.mark.parametrize("family", MORE)
def test_no_other_family_passes_the_audit_and_is_computed_wrongly(family):
    """The audit looks at a small copy of the configuration. What it lets through must be exact on the model
    itself, with another window, more layers and longer rows than the audit tries."""
    prompt, *tails = some_ids(13, 30, 4)
    model, sequences = small_model(family, **MORE[family]), [torch.cat([prompt, tail]) for tail in tails]
    right = own_logits(model, sequences)
    try:
        audit(model)
    except ValueError as error:
        assert f"'{family}'" in str(error)
        return
    with torch.no_grad():
        ours = our_logits(model, torch.cat(sequences), Segments([len(ids) for ids in sequences]))
    torch.testing.assert_close(ours, torch.cat(right), atol=2e-4, rtol=0)
    cached = fed_through_cache(model, sequences, Blocks(model.config, 64, 4), 13, [(20, 1), (9, 1), (1, 2)])
    torch.testing.assert_close(torch.cat(cached), torch.cat([r[13:] for r in right]), atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    "fault",
    [
        dict(sliding_window=None),
        dict(scaling=1.0),
        dict(seg=None),  # the keyword that never arrives: one row is then one sequence
    ],
)
def test_the_audit_sees_an_attention_that_loses_what_it_is_told(fault):
    """An audit that never fails is worth nothing: each of these faults leaves all shapes right (the window
    that is forgotten in decode: karpathy/nanochat#456)."""
    model = small_model("mistral")

    def faulty(module, q, k, v, mask, **kw):
        return attention.attention(module, q, k, v, mask, **(kw | fault))

    AttentionInterface.register("segments", faulty)
    try:
        with pytest.raises(ValueError, match="'mistral'"):
            audit(model)
    finally:
        AttentionInterface.register("segments", attention.attention)
    audit(model)


# ------------------------------------------------------------------------------------- the model stays usable


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma3_text"])
def test_an_ordinary_forward_and_generate_give_the_same_after_ours(family):
    """Setting a model's attention for one purpose must not spoil the others: padding masks are what a second
    attention implementation loses first (huggingface/transformers#26344, left padding
    unslothai/unsloth#3795)."""
    model = small_model(family, eos_token_id=None)
    short, long = some_ids(7, 15)
    ids = torch.stack([torch.cat([torch.zeros(8, dtype=torch.long), short]), long])  # padded on the left
    mask = torch.ones_like(ids)
    mask[0, :8] = 0

    @torch.no_grad()
    def ordinary():
        logits = model(input_ids=ids, attention_mask=mask).logits
        written = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0
        )
        return logits[0, 8:], logits[1], written

    before = ordinary()
    with torch.no_grad():
        trunk(model, torch.cat([short, long]), Segments([7, 15]))
    after = ordinary()
    for a, b in zip(before, after):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


def gradients(model, sequences) -> dict[str, torch.Tensor]:
    model.zero_grad()
    logits = our_logits(model, torch.cat(sequences), Segments([len(ids) for ids in sequences]))
    torch.log_softmax(logits, -1)[:, 5].mean().backward()
    return {name: w.grad.clone() for name, w in model.named_parameters()}


@pytest.mark.parametrize("family", ["qwen3", "olmo3"])
def test_gradient_checkpointing_keeps_who_belongs_together(family):
    """Checkpointing calls a layer a second time in the backward pass; a keyword that is lost there gives
    gradients of one long sequence, without an error. The gradients are also those of the sequences apart."""
    model, sequences = small_model(family).train(), some_ids(11, 3, 14)
    plain = gradients(model, sequences)
    calls = []
    hook = model.base_model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    again = gradients(model, sequences)
    hook.remove()
    assert len(calls) == 2  # it really was computed twice
    model.gradient_checkpointing_disable()
    model.zero_grad()
    model.set_attn_implementation("eager")
    total = sum(torch.log_softmax(model(input_ids=s[None]).logits[0], -1)[:, 5].sum() for s in sequences)
    (total / 28).backward()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(again[name], plain[name], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(plain[name], weight.grad, atol=1e-5, rtol=1e-3)


def test_attention_dropout_is_not_applied_even_in_training():
    """With dropout in the trainer the first ratio of the first step is not 1 (huggingface/trl#454, #744)."""
    model, sequences = small_model("qwen3", attention_dropout=0.5).train(), some_ids(9, 6)
    first, second = gradients(model, sequences), gradients(model, sequences)
    assert all(torch.equal(first[name], second[name]) for name in first)


# ------------------------------------------------------------------------------------------ the CUDA body


def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa, **paged):
    """torch.nn.attention.varlen.varlen_attn written out, with what FlashAttention 2, its default, checks."""
    used, table = paged.get("seqused_k"), paged.get("block_table")
    assert enable_gqa and cu_q.dtype == cu_k.dtype == torch.int32 and cu_q.shape == cu_k.shape
    outs = []
    for i, (start, end) in enumerate(zip(cu_q.tolist(), cu_q.tolist()[1:])):
        if paged:
            assert used.dtype == table.dtype == torch.int32 and k.shape[1] % 256 == 0
            assert paged["num_splits"] == 1  # more returned NaN (pytorch/torchtitan#3235)
            assert table.is_contiguous() and used.is_contiguous()
            keys, values = (x[table[i].long()].flatten(0, 1)[: used[i]] for x in (k, v))
        else:
            keys, values = (x[cu_k[i] : cu_k[i + 1]] for x in (k, v))
        assert end - start <= max_q and len(keys) <= max_k
        query_at = torch.arange(len(keys) - (end - start), len(keys))[:, None]
        ahead = torch.arange(len(keys))[None] - query_at
        left, right = (10**9 if side == -1 else side for side in window_size)
        seen = (ahead <= right) & (ahead >= -left)
        keys, values = (x.repeat_interleave(q.shape[1] // k.shape[-2], 1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q[start:end], keys) * scale
        outs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values))
    return torch.cat(outs)


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize(
    "new, past", [([9, 5, 1], None), ([1, 3, 12, 1], [300, 255, 0, 7]), ([1, 1], [2, 256])]
)
def test_the_call_of_varlen_attention_is_that_of_its_reference_and_of_our_sdpa(
    monkeypatch, new, past, window
):
    """A wrong edge, a missing argument, a window that is off by one are seen without a GPU: the function that
    is called there must give what the CPU body gives."""
    torch.manual_seed(0)
    config = small_model("qwen3").config
    module = SimpleNamespace(layer_idx=0, config=config)
    q, k, v = (torch.randn(1, heads, sum(new), 16) for heads in (4, 2, 2))
    segments, cache = [Segments(new)], None
    if past:
        cache, tables = Blocks(config, 9, 256), torch.arange(1, 9).view(4, 2)[: len(new)]
        cache.k.normal_(), cache.v.normal_()
        segments = [Segments(new, past, tables, cache)]
        if set(new) == {1}:
            segments.append(Segments.decoding(torch.tensor(past), tables, cache))
    monkeypatch.setattr(attention, "varlen_attn", varlen_attn)
    monkeypatch.setattr(attention, "_PAGED", True)
    for seg in segments:
        right, _ = attention.attention(module, q, k, v, None, 0.25, seg=seg, sliding_window=window)
        keys, values = (cache.k[0], cache.v[0]) if cache else (k[0].transpose(0, 1), v[0].transpose(0, 1))
        found = attention._flash(q[0].transpose(0, 1), keys, values, seg, 0.25, window)
        torch.testing.assert_close(found, right[0], atol=1e-5, rtol=0)


# ------------------------------------------------------------------------------------------ blocks and places


def test_positions_and_last_places_of_a_packed_row():
    """Positions that are shared by the row, or that start at 0 behind a cached past
    (unslothai/unsloth#3795)."""
    seg = Segments([3, 5])
    assert seg.position.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]] and seg.last.tolist() == [2, 7]
    blocks = Blocks(small_model("qwen3").config, 8, 4)
    seg = Segments([2, 1, 3], [4, 9, 0], torch.tensor([[1, 2, 0], [3, 4, 5], [6, 0, 0]]), blocks)
    assert seg.position.tolist() == [[4, 5, 9, 0, 1, 2]] and seg.last.tolist() == [1, 2, 5]


def filled_blocks(blocks: int, size: int, tokens: int) -> tuple[Blocks, list[int]]:
    """Blocks with one table whose token t holds the keys and values t."""
    cache, table = Blocks(small_model("qwen3").config, blocks, size), []
    assert cache.grow(table, tokens)
    for t in range(tokens):
        cache.k[:, table[t // size], t % size] = cache.v[:, table[t // size], t % size] = t
    return cache, table


def read(cache: Blocks, table: list[int], tokens: int) -> list[float]:
    return [float(cache.k[-1, table[t // cache.size], t % cache.size, 0, 0]) for t in range(tokens)]


def test_a_fork_shares_the_full_blocks_and_copies_the_partly_filled_one():
    """The samples of a group hold the prompt's keys once; only the block they go on writing into is their
    own."""
    cache, table = filled_blocks(10, 4, 10)  # 2 full blocks, 2 tokens in the third
    a, b = cache.fork(table, 10), cache.fork(table, 10)
    assert a[:2] == b[:2] == table[:2] and len({table[2], a[2], b[2]}) == 3
    assert read(cache, a, 10) == read(cache, b, 10) == list(range(10))
    assert len(cache.free) == 9 - 5
    even = cache.fork(table, 8)  # nothing partly filled: nothing to copy
    assert even == table[:2] and len(cache.free) == 4


def test_forks_diverge_without_touching_each_other():
    """One sample that writes into a shared block puts its words into the mouths of all others."""
    cache, table = filled_blocks(10, 4, 10)
    a, b = cache.fork(table, 10), cache.fork(table, 10)
    for fork, value in ((a, 100.0), (b, 200.0)):
        assert cache.grow(fork, 13)
        for t in range(10, 13):
            cache.k[:, fork[t // 4], t % 4] = value
    assert read(cache, a, 13) == [*range(10), 100, 100, 100]
    assert read(cache, b, 13) == [*range(10), 200, 200, 200]
    assert read(cache, table, 10) == list(range(10))


def test_a_block_is_free_again_only_when_its_last_owner_lets_go_and_all_come_back():
    """A block freed too early is overwritten by another row, one that is never freed fills the cache after
    hours."""
    cache, table = filled_blocks(10, 4, 10)
    forks = [cache.fork(table, 10) for _ in range(3)]
    shared, own = table[:2], table[2]
    cache.release(table)
    assert table == [] and own in cache.free and not set(shared) & set(cache.free)
    for fork in forks[:2]:
        cache.release(fork)
    assert not set(shared) & set(cache.free) and read(cache, forks[2], 10) == list(range(10))
    cache.release(forks[2])
    assert sorted(cache.free) == list(range(1, 10)) and not any(
        cache.count
    )  # each once, and block 0 is nobody's


def test_without_enough_free_blocks_nothing_is_taken():
    """A table that was extended by half leaks what it took, or hands out a block twice."""
    cache, table = filled_blocks(5, 4, 10)  # 4 blocks, 1 of them free
    free = list(cache.free)
    assert cache.grow(table, 16) and len(table) == 4 and not cache.free
    cache.release(table)
    cache, table = filled_blocks(5, 4, 10)
    assert not cache.grow(table, 17) and len(table) == 3 and cache.free == free
    other: list[int] = []
    assert not cache.grow(other, 5) and other == []
    assert cache.grow(other, 1) and cache.fork(table, 10) is None
    assert [cache.count[block] for block in table] == [1, 1, 1]
    assert cache.fork(table, 8) == table[:2]  # full blocks need no free one


# ------------------------------------------------------------------------------------------- speed on the CPU


def test_decoding_rows_are_gathered_in_pieces_of_about_one_length():
    """A batch padded to its longest row reads the cache of that length for every row: one row of 400 tokens
    beside 63 of 20 would cost 64 times 400."""
    past = [20] * 40 + [399] + [20] * 23
    blocks = Blocks(small_model("qwen3", num_key_value_heads=4, head_dim=128).config, 2, 16)
    seg = Segments([1] * 64, past, torch.zeros(64, 25, dtype=torch.long), blocks)
    assert seg.single[0] == 40 and sorted(seg.single.tolist()) == list(range(64))
    assert [(start, end) for start, end, _, _ in seg.pieces][0][0] == 0
    gathered = sum(tables.numel() for _, _, tables, _ in seg.pieces)  # blocks; 64 * 25 if all were padded
    assert gathered < 63 * 2 + 25 + 0.3 * 64 * 25
    bias = torch.cat([b.exp().sum(-1).flatten() for b in seg.bias(None)])  # keys that each row sees
    assert bias.tolist() == [400.0] + [21.0] * 63
    assert torch.cat([b.exp().sum(-1).flatten() for b in seg.bias(8)]).tolist() == [8.0] * 64


# ------------------------------------------------------------------------- a package of the same name as ours


@pytest.mark.parametrize("place", ["early", "late"])
def test_the_program_starts_where_a_package_named_kernels_is_installed(tmp_path, place):
    """Hugging Face's `kernels`, which transformers uses, has the name of our folder: a regular package hides
    a plain folder wherever it stands on the path, and the import then fails only on the machines that have
    it."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("__version__ = '0.0.0'\n")
    start = "import policy, kernels, kernels.linear_logprob as ours; print(kernels.__file__, ours.__file__)"
    command, path = [sys.executable, "-c", start], [str(tmp_path)]
    if place == "early":  # before our own folder; late: behind it, as an installed package stands
        command[1:1], path = ["-P"], [str(tmp_path), str(ROOT)]  # -P: without the working directory
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    hidden, ours = done.stdout.split()
    assert hidden.startswith(str(tmp_path)) and ours == str(ROOT / "kernels" / "linear_logprob.py")


def test_a_half_precision_copy_for_sampling_keeps_its_rope_frequencies():
    """model.to(bfloat16) rounds the buffers too: with theta 1e6 and heads of 128 an angle is off by a radian
    after a thousand tokens, and every sampled token is off-policy without a sign of it."""
    model = small_model("qwen3")
    copied = sampler_copy(model, torch.bfloat16)
    assert {w.dtype for w in copied.parameters()} == {torch.bfloat16}
    buffers = dict(copied.named_buffers())
    assert buffers and all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())
    assert all(b.dtype == torch.float32 for b in buffers.values())
    tied = small_model("qwen3", tie_word_embeddings=True)
    copied = sampler_copy(tied, torch.bfloat16)
    assert copied.get_output_embeddings().weight is copied.get_input_embeddings().weight
