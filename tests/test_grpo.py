"""What an update may depend on, and what a run is told. Values are worked out by hand."""

import ast
import copy
import json
import math
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import small_model
from torch import nn

import evaluate
import grpo
import sft
from data import Problem
from episodes import Agents, alarms, gather, measure
from episodes import evaluate as evaluate_policy
from options import parse_args
from policy import Policy, RoundedLinear, micro_batches, pack, packed_row
from rollout import Trajectory
from tools import PythonTool, ToolResult

INF, NAN = float("inf"), float("nan")


def near(values, tolerance=1e-5):
    return pytest.approx(values, abs=tolerance)


# ---- rows --------------------------------------------------------------------------------------------------


def test_the_log_prob_of_a_token_comes_from_the_place_before_it():
    """Prompt 3, response 3: places 2, 3, 4 score tokens 3, 4, 5 (verl-project/verl#2368)."""
    ids, seg, targets = packed_row([[10, 11, 12, 13, 14, 15]], [[0, 0, 0, 1, 1, 1]])
    assert ids.tolist() == [10, 11, 12, 13, 14, 15]
    assert targets.tolist() == [-100, -100, 13, 14, 15, -100]


def test_sequences_of_a_row_do_not_score_each_other():
    """The last place of one would predict the first token of the next; positions start anew
    (MeetKai/functionary#265, huggingface/trl#1230)."""
    ids, seg, targets = packed_row([[1, 2, 3], [4, 5, 6, 7, 8]], [[1, 1, 1], [1, 1, 0, 1, 1]])
    assert targets.tolist() == [2, 3, -100, 5, -100, 7, 8, -100]
    assert seg.position[0].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]


def test_rows_hold_every_sequence_once_and_keep_to_the_budget():
    """By hand: at most 8 count of each, 20 in all: three rows of 8. 9 is alone and too long, 5 and 4 begin
    the two others, 3 goes to the emptier one."""
    assert pack([5, 3, 4, 9], 8) == [[3], [0], [2, 1]]
    assert pack([6, 6, 6], 9) == [[0], [1], [2]]  # two rows would do for 18 tokens, not for these
    lengths = [(7 * i) % 23 + 1 for i in range(40)]
    rows = pack(lengths, 30)
    assert sorted(i for row in rows for i in row) == list(range(40))
    assert all(sum(lengths[i] for i in row) <= 30 for row in rows)
    assert pack([], 8) == []


@pytest.mark.parametrize("budget", [60, 100_000])
def test_ranks_get_about_as_many_tokens_each_however_large_the_budget(budget):
    """Rows filled to the budget before they are dealt leave ranks without work: of a batch that fits one row
    one rank would train it all."""
    lengths = [(7 * i) % 23 + 1 for i in range(40)]
    tokens = [sum(lengths[i] for row in micro_batches(lengths, budget, r, 4) for i in row) for r in range(4)]
    assert max(tokens) - min(tokens) <= 8 and sum(tokens) == sum(lengths)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_every_rank_gets_as_many_rows(ranks):
    """A rank with fewer leaves the others waiting for ever (verl-project/verl#5591, huggingface/trl#4041)."""
    lengths = [5, 3, 4, 9, 2]
    dealt = [micro_batches(lengths, 8, rank, ranks) for rank in range(ranks)]
    assert len({len(rows) for rows in dealt}) == 1
    assert sorted(i for rows in dealt for row in rows for i in row) == list(range(5))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_a_linear_layer_without_a_unit_for_bfloat16_rounds_its_numbers_and_its_results(bias, autocast):
    """Against the definition in float64 of the rounded numbers; a result is off by half a last place, 2^-9.
    Summed in bfloat16 a gradient of 300 rows would be off by more."""
    torch.manual_seed(0)
    layer = RoundedLinear(40, 24, bias)
    x, upstream = torch.randn(1, 300, 40, requires_grad=True), torch.randn(1, 300, 24).bfloat16()
    exact = [t.detach().bfloat16().double().requires_grad_() for t in (x, *layer.parameters())]
    want = nn.functional.linear(*exact)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = layer(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), want, atol=1e-6, rtol=2**-8)
    found.backward(upstream)
    want.backward(upstream.double())
    for tensor, right in zip((x, *layer.parameters()), exact):
        assert tensor.grad.dtype == torch.float32
        torch.testing.assert_close(tensor.grad.double(), right.grad, atol=1e-4, rtol=2**-8)


# ---- an update ---------------------------------------------------------------------------------------------


class Scores(nn.Module):
    """A policy that is told the log-prob and entropy of every token, whatever stands before it."""

    def __init__(self, logp: dict[int, float], entropy: dict[int, float] | None = None):
        super().__init__()
        self.logp = nn.Parameter(torch.tensor([logp.get(i, 0.0) for i in range(300)]))
        self.entropy = torch.tensor([(entropy or {}).get(i, 0.0) for i in range(300)])
        self.start, self.rows = self.logp.detach().clone(), []

    def forward(self, ids, seg, targets, temperature=1.0):
        self.rows.append([t for t in targets.tolist() if t != -100])
        at = targets.clamp(min=0)
        return tuple(torch.where(targets != -100, x[at], 0.0) for x in (self.logp, self.entropy))

    def change(self, *tokens) -> list[float]:
        return (self.logp.detach() - self.start)[list(tokens)].tolist()


def episode(ids, mask, advantage=1.0, logprobs=None) -> dict:
    return {"ids": ids, "mask": mask, "logprobs": logprobs or [0.0] * len(ids), "advantage": advantage}


def settings(**more) -> grpo.Config:
    return grpo.Config(**{**dict(mini_batches=1, clip_norm=1e9, tokens_per_row=1000), **more})


def update(policy, episodes, lr=1.0, seed=0, **more) -> dict:
    """One grpo.update by plain SGD, so that the change of a weight is -lr times its gradient."""
    return grpo.update(policy, torch.optim.SGD(policy.parameters(), lr=lr), episodes, settings(**more), seed)


@pytest.mark.parametrize("tokens_per_row", [1, 1000])
@pytest.mark.parametrize("old_logp", ["trainer", "sampler"])
def test_a_token_of_a_long_answer_weighs_as_much_as_one_of_a_short_answer(tokens_per_row, old_logp):
    """Answers of 1 and of 99 tokens: each token weighs 1/100. By means of sequences the one would weigh 1/2
    (huggingface/trl#2881), by means of micro-batches it depends on the rows (huggingface/trl#2647,
    allenai/open-instruct#1161, PrimeIntellect-ai/prime-rl#583)."""
    tokens = list(range(100, 199))
    policy = Scores({})
    long, short = episode([1, *tokens], [0] + [1] * 99), episode([1, 99], [0, 1], advantage=-2.0)
    update(policy, [short, long], tokens_per_row=tokens_per_row, old_logp=old_logp)
    assert policy.change(*tokens) == near([0.01] * 99, 1e-7)
    assert policy.change(99) == near([-0.02], 1e-7)


def test_neither_prompt_nor_tool_tokens_enter_the_normaliser():
    """Truncated or foreign tokens that stay in the denominator make the loss too small
    (huggingface/trl#6369)."""
    changes = []
    for prompt, tool in [([1], []), ([1] * 40, []), ([1], [2] * 30), ([1] * 9, [3] * 5)]:
        policy = Scores({})
        ids = [*prompt, 10, 11, *tool, 12]
        mask = [0] * len(prompt) + [1, 1] + [0] * len(tool) + [1]
        update(policy, [episode(ids, mask), episode([1, 20], [0, 1], -1.0)])
        changes.append(policy.change(10, 11, 12, 20))
        assert policy.change(1, 2, 3) == [0, 0, 0]
    assert changes == [[0.25, 0.25, 0.25, -0.25]] * 4


@pytest.mark.parametrize("tis", [0.0, 2.0])
@pytest.mark.parametrize("old_logp", ["trainer", "sampler"])
@pytest.mark.parametrize("bad", [NAN, INF, 1e9])
def test_a_stored_log_prob_at_a_masked_place_changes_neither_weights_nor_metrics(bad, old_logp, tis):
    """Log-probs at tool tokens are placeholders (yaof20/Flash-RL#19, NovaSky-AI/SkyRL#1635)."""
    found = []
    for value in (0.0, bad):
        policy = Scores({10: -1.0, 11: -2.0, 12: -0.5})
        told = [value, -1.1, -1.9, value, -0.5]
        metrics = update(
            policy, [episode([1, 10, 11, 7, 12], [0, 1, 1, 0, 1], logprobs=told)], old_logp=old_logp, tis=tis
        )
        found.append((policy.change(*range(20)), metrics))
    assert found[0] == found[1]


def test_the_old_policy_is_the_one_before_the_first_optimizer_step():
    """Two optimizer steps on the same token, A = 1, learning rate 0.1: the log-prob rises by 0.1, then by 0.1
    times the ratio e^0.1. Were the old log-prob taken anew, it would be 0.1 again."""
    for old_logp in ("trainer", "sampler"):
        policy = Scores({10: -1.0})
        batch = [episode([1, 10], [0, 1], logprobs=[0.0, -1.0]) for _ in range(4)]
        metrics = update(policy, batch, lr=0.1, mini_batches=2, old_logp=old_logp)
        assert policy.change(10) == near([0.1 + 0.1 * math.exp(0.1)], 1e-6)
        assert metrics["policy/kl_old"] == near(-0.05)  # old - new: 0 in the first half, -0.1 in the second
        assert metrics["policy/clip_high"] == 0
        assert metrics["policy/grad_norm"] == near((1 + math.exp(0.1)) / 2)


def test_a_ratio_that_has_left_the_clip_range_earns_nothing_more():
    """Learning rate 0.3: after the first step the ratio is e^0.3 = 1.35 > 1.28, so the second does
    nothing."""
    policy = Scores({10: -1.0})
    batch = [episode([1, 10], [0, 1], logprobs=[0.0, -1.0]) for _ in range(4)]
    metrics = update(policy, batch, lr=0.3, mini_batches=2)
    assert policy.change(10) == near([0.3], 1e-6)
    assert metrics["policy/clip_high"] == near(0.5) and metrics["policy/kl_old"] == near(-0.15)
    policy = Scores({10: -1.0})
    update(policy, batch, lr=0.3, mini_batches=2, clip_high=0.4)  # and the bound is that of the settings
    assert policy.change(10) == near([0.3 + 0.3 * math.exp(0.3)], 1e-6)


def test_every_optimizer_batch_has_a_normaliser_of_its_own_and_every_episode_its_turn():
    """Episodes of 1, 2 and 4 tokens, one to each optimizer step: weights 1, 1/2 and 1/4. Each is trained on
    once."""
    groups = {1: [10], 2: [20, 21], 4: [40, 41, 42, 43]}
    batch = [episode([1, *tokens], [0] + [1] * n) for n, tokens in groups.items()]
    policy = Scores({})
    update(policy, batch, mini_batches=3, old_logp="sampler")
    for n, tokens in groups.items():
        assert policy.change(*tokens) == near([1 / n] * n)
    assert sorted(t for row in policy.rows for t in row) == [10, 20, 21, 40, 41, 42, 43]


def test_the_split_into_optimizer_batches_belongs_to_the_seed():
    """A continued run must repeat it; another step must not."""
    batch = [episode([1, 10 + i], [0, 1]) for i in range(8)]

    def order(seed):
        policy = Scores({})
        update(policy, batch, seed=seed, mini_batches=8, old_logp="sampler")
        return policy.rows

    assert order(5) == order(5) != order(6)
    assert len(order(2**63 + 7)) == 8  # any 64-bit key will do


def test_the_correction_for_the_sampler_is_a_weight_with_a_cap():
    """Sampler and trainer differ by a factor 1.5, 0.5 and 4: weights 1.5, 0.5 and, capped, 2, beside the
    ratio of 1; no gradient goes through them. Off, all are 1."""
    factors = [1.5, 0.5, 4.0]
    told = [0.0, *(-1.0 - math.log(f) for f in factors)]
    for tis, weights in [(2.0, [1.5, 0.5, 2.0]), (0.0, [1, 1, 1])]:
        policy = Scores({10: -1.0, 11: -1.0, 12: -1.0})
        update(policy, [episode([1, 10, 11, 12], [0, 1, 1, 1], logprobs=told)], tis=tis)
        assert policy.change(10, 11, 12) == near([w / 3 for w in weights], 1e-6)
    policy = Scores({10: -1.0, 11: -1.0, 12: -1.0})
    update(policy, [episode([1, 10, 11, 12], [0, 1, 1, 1], logprobs=told)], tis=2.0, old_logp="sampler")
    assert policy.change(10, 11, 12) == near([0, 0.5 / 3, 0], 1e-6)  # the ratio itself: 1.5 and 4 are clipped


@pytest.mark.parametrize("tokens_per_row", [1, 5, 1000])
@pytest.mark.parametrize("mini_batches", [1, 2])
def test_metrics_are_means_over_tokens_not_over_rows(tokens_per_row, mini_batches):
    """A logged mean of means is not the batch's (huggingface/trl#6380), and reordering attached entropies to
    the wrong rows (thunlp/JustRL#5). Entropies 1, 2 and 6, gaps .1, .2 and .6: means 3 and 0.3."""
    policy = Scores({10: -1.0, 11: -2.0, 12: -3.0}, entropy={10: 1.0, 11: 2.0, 12: 6.0})
    batch = [
        episode([1, 1, 1, 10, 11], [0, 0, 0, 1, 1], logprobs=[0, 0, 0, -1.1, -2.2]),
        episode([1, 12], [0, 1], logprobs=[0, -2.4]),
    ]
    metrics = update(policy, batch, lr=0.0, tokens_per_row=tokens_per_row, mini_batches=mini_batches)
    assert metrics["policy/entropy"] == near(3.0)
    assert metrics["sampler/gap_mean"] == near(0.3)
    assert metrics["sampler/gap_max"] == near(0.6)
    assert metrics["policy/kl_old"] == near(0.0)


@pytest.mark.parametrize("tokens_per_row", [1, 7, 1000])
@pytest.mark.parametrize("old_logp", ["trainer", "sampler"])
def test_what_is_stored_of_a_token_is_that_tokens_own(tokens_per_row, old_logp):
    """Rows are shuffled and sorted by length, and a value is computed one place before its token: entropies
    were attached to the wrong rows (thunlp/JustRL#5). Where the policy wrote nothing: 0, and a ratio of 1."""
    tokens = {t: (-0.01 * t, 0.1 * t) for t in range(10, 20)}
    policy = Scores({t: lp for t, (lp, _) in tokens.items()}, {t: h for t, (_, h) in tokens.items()})
    batch = [
        episode([1, 10, 11, 2, 12], [0, 1, 1, 0, 1], logprobs=[0, -0.1, -0.21, 0, -0.12]),
        episode([3, 13], [0, 1], logprobs=[0, -0.23]),
        episode(
            [4, 4, 4, 14, 15, 5, 5, 16],
            [0, 0, 0, 1, 1, 0, 0, 1],
            logprobs=[0, 0, 0, -0.14, -0.15, 0, 0, -0.36],
        ),
    ]
    update(policy, batch, lr=0.0, tokens_per_row=tokens_per_row, old_logp=old_logp)
    for e in batch:
        written = list(zip(e["ids"], e["mask"], e["logprobs"]))
        assert e["old_logprobs"] == near([m * -0.01 * t for t, m, _ in written])
        assert e["entropy"] == near([m * 0.1 * t for t, m, _ in written])
        gap = [m * (-0.01 * t - told) if old_logp == "sampler" else 0.0 for t, m, told in written]
        assert e["ratio"] == near([math.exp(g) for g in gap])


@pytest.mark.parametrize("old_logp", ["trainer", "sampler"])
@pytest.mark.parametrize("mini_batches", [1, 2])
def test_a_batch_without_policy_tokens_changes_nothing(old_logp, mini_batches):
    """Prompts that left no room: 0/0, or a crash in backward (huggingface/trl#3248, #5826,
    verl-project/verl#4165)."""
    policy = Scores({})
    metrics = update(
        policy, [episode([1, 2, 3], [0, 0, 0])] * 2, old_logp=old_logp, mini_batches=mini_batches
    )
    assert policy.change(*range(300)) == [0.0] * 300
    assert all(v == 0 for v in metrics.values())


def test_a_group_without_advantage_counts_in_the_mean_and_moves_nothing():
    """Tokens of solved prompts have no gradient; they stay in the denominator, as in the published recipe."""
    policy = Scores({})
    update(policy, [episode([1, 10], [0, 1], 0.0), episode([1, 11], [0, 1], 1.0)])
    assert policy.change(10, 11) == [0.0, 0.5]


def test_the_gradient_is_clipped_as_a_whole_and_its_norm_logged_before():
    """Gradient (-0.6, 0.8) / 1: norm 1, clipped to 0.5."""
    policy = Scores({})
    batch = [episode([1, 10], [0, 1], 1.2), episode([1, 11], [0, 1], -1.6)]
    metrics = update(policy, batch, clip_norm=0.5)
    assert metrics["policy/grad_norm"] == near(1.0)
    assert policy.change(10, 11) == near([0.3, -0.4])


# ---- an update of a real model -----------------------------------------------------------------------------


def own_logp(hf, ids, temperature=1.0):
    """Log-probs [len(ids)] of each token by the model's own forward, 0 for the first."""
    logp = torch.log_softmax(hf(input_ids=torch.tensor([ids])).logits[0] / temperature, -1)
    return torch.cat([logp.new_zeros(1), logp[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]])


def naive_gradients(hf, episodes) -> dict[str, torch.Tensor]:
    """Gradients of the clipped token-mean loss, one episode and one token at a time, in float64."""
    hf = copy.deepcopy(hf).double()
    loss, tokens = 0.0, sum(sum(e["mask"]) for e in episodes)
    for e in episodes:
        a = e["advantage"]
        for new, old, m in zip(own_logp(hf, e["ids"]), e["logprobs"], e["mask"]):
            r = (new - old).exp()
            if m and not (a > 0 and r > 1.28 or a < 0 and (r < 0.8 or r > 10)):  # beyond: no gradient
                loss += -a * r / tokens
    loss.backward()
    return {name: p.grad.float() for name, p in hf.named_parameters()}


@pytest.fixture(scope="module")
def batch():
    """Episodes of the small model: prompts, tool tokens and answers of many lengths; log-probs that are its
    own give or take 0.15, so that some ratios are clipped. And the gradients by the naive computation."""
    hf, generator = small_model("qwen3", num_hidden_layers=2), torch.Generator().manual_seed(3)
    episodes = []
    for n, mask in enumerate(["0011111", "000111000011", "01", "0000000111001111", "00010", "0111111111"]):
        ids = torch.randint(3, 128, (len(mask),), generator=generator).tolist()
        noise = 0.15 * torch.randn(len(mask), generator=generator)
        told = (own_logp(hf, ids).detach() + noise).tolist()
        mask = [int(m) for m in mask]
        episodes.append(
            episode(ids, mask, [1.2, -0.7, 0.4, -1.5, 0.0, 0.9][n], [lp * m for lp, m in zip(told, mask)])
        )
    return episodes, naive_gradients(hf, episodes)


def changes(episodes, **more) -> dict[str, torch.Tensor]:
    policy = Policy(small_model("qwen3", num_hidden_layers=2))
    before = {name: p.detach().clone() for name, p in policy.hf.named_parameters()}
    update(policy, episodes, **more)
    return {name: before[name] - p.detach() for name, p in policy.hf.named_parameters()}


@pytest.mark.parametrize("tokens_per_row", [1, 20, 1000])
@pytest.mark.parametrize("order", ["as they are", "reversed", "mixed"])
def test_an_update_depends_neither_on_the_rows_nor_on_the_order_of_the_episodes(batch, tokens_per_row, order):
    """Any split into micro-batches, neighbours in a row, and shuffled groups: the gradient of one episode at
    a time in float64 (huggingface/trl#2647, #3231, #3021, MeetKai/functionary#265). Tool tokens are context,
    no target."""
    episodes, gradients = batch
    episodes = {"as they are": episodes, "reversed": episodes[::-1], "mixed": episodes[3:] + episodes[:3]}[
        order
    ]
    found = changes(episodes, tokens_per_row=tokens_per_row, old_logp="sampler")
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, atol=3e-5, rtol=1e-3, msg=name)


def test_a_masked_place_of_a_real_model_does_not_reach_the_weights(batch):
    """The same, with nonsense for the log-probs of prompt and tool tokens: the same bits."""
    episodes, _ = batch
    dirty = [
        {**e, "logprobs": [lp if m else NAN for lp, m in zip(e["logprobs"], e["mask"])]} for e in episodes
    ]
    clean, found = changes(episodes, old_logp="sampler"), changes(dirty, old_logp="sampler")
    assert all(torch.equal(clean[name], found[name]) for name in clean)


def on_policy(batch, temperature=1.0):
    hf = small_model("qwen3", num_hidden_layers=2)
    return [
        {**e, "logprobs": [lp * m for lp, m in zip(own_logp(hf, e["ids"], temperature).tolist(), e["mask"])]}
        for e in batch[0]
    ]


def test_on_policy_the_samplers_and_the_trainers_log_probs_give_the_same_update(batch):
    """Ratio 1 either way, so the gradient is that of -A log pi; a gap between the two is what the log
    shows."""
    episodes = on_policy(batch)
    found = [changes(episodes, old_logp=old) for old in ("trainer", "sampler")]
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name], atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("mini_batches", [1, 2])
def test_the_first_ratio_is_one(batch, temperature, mini_batches):
    """Dropout in train mode (huggingface/trl#454, #744), or a temperature that the trainer leaves out
    (huggingface/trl#4159, PrimeIntellect-ai/prime-rl#679), makes the policy look off its own policy from the
    start."""
    policy = Policy(small_model("qwen3", num_hidden_layers=2, attention_dropout=0.1)).train()
    metrics = update(
        policy, on_policy(batch, temperature), lr=0.0, temperature=temperature, mini_batches=mini_batches
    )
    assert metrics["sampler/gap_max"] < 1e-4
    assert abs(metrics["policy/kl_old"]) < 1e-6
    assert metrics["policy/clip_low"] == metrics["policy/clip_high"] == metrics["policy/dual"] == 0


def test_the_entropy_of_a_uniform_policy_is_the_log_of_the_vocabulary(batch):
    """All logits equal: ln 128, and every log-prob -ln 128, at any temperature."""
    policy = Policy(small_model("qwen3", num_hidden_layers=2))
    nn.init.zeros_(policy.hf.get_output_embeddings().weight)
    told = [{**e, "logprobs": [-math.log(128)] * len(e["ids"])} for e in batch[0]]
    metrics = update(policy, told, lr=0.0, temperature=0.6)
    assert metrics["policy/entropy"] == near(math.log(128), 1e-4)
    assert metrics["sampler/gap_max"] < 1e-4


@pytest.mark.parametrize(
    "tensor", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"]
)
def test_a_gradient_that_is_not_finite_ends_the_run_before_it_reaches_a_weight(batch, tensor):
    """One NaN in one weight, and after the step it is in all of them: the model then prints "!!!!" for ever
    (mll-lab-nu/RAGEN#52, Jiayi-Pan/TinyZero#63)."""
    policy = Policy(small_model("qwen3", num_hidden_layers=2, tie_word_embeddings=False))
    policy.hf.get_parameter(tensor).data[:, 3] = NAN
    before = copy.deepcopy(policy.hf.state_dict())
    with pytest.raises(FloatingPointError, match="gradient"):
        update(policy, batch[0])
    assert all(
        torch.equal(v.nan_to_num(7.0), before[k].nan_to_num(7.0)) for k, v in policy.hf.state_dict().items()
    )


# ---- options of the update ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens_per_row", [1, 1000])
@pytest.mark.parametrize(
    "loss_mean, one, two", [("token", 1 / 3, 1 / 3), ("sequence", 1 / 2, 1 / 4), ("constant", 1 / 8, 1 / 8)]
)
def test_a_token_weighs_what_the_mean_says_however_the_rows_are_packed(loss_mean, one, two, tokens_per_row):
    """Answers of one and of two tokens, A = 1, max_new_tokens 4. A mean in each micro-batch would give 1 and
    1/2 for any of them as soon as each answer has a row of its own."""
    policy = Scores({})
    batch = [episode([1, 10], [0, 1]), episode([1, 11, 5, 12], [0, 1, 0, 1])]
    more = dict(loss_mean=loss_mean, max_new_tokens=4, tokens_per_row=tokens_per_row)
    metrics = update(policy, batch, **more)
    assert policy.change(10, 11, 12, 5) == near([one, two, two, 0])
    assert metrics["policy/loss"] == near(-(one + 2 * two))


@pytest.mark.parametrize("tokens_per_row", [1, 1000])
def test_a_sequence_ratio_is_clipped_by_the_mean_of_its_own_tokens(tokens_per_row):
    """Log-ratios 0.1 and -0.1 of one answer: its ratio is 1, inside 3e-4 and 4e-4, though both tokens are far
    outside; those of the other, 0.1 and 0.1, are clipped whole. Recipe grpo-scr."""
    recipe = grpo.PRESETS["grpo-scr"] | dict(old_logp="sampler", tokens_per_row=tokens_per_row)
    policy = Scores({10: -1.0, 11: -1.0, 12: -1.0, 13: -1.0})
    batch = [
        episode([1, 10, 11], [0, 1, 1], logprobs=[0, -1.1, -0.9]),
        episode([1, 12, 13], [0, 1, 1], logprobs=[0, -1.1, -1.1]),
    ]
    metrics = update(policy, batch, **recipe)
    assert policy.change(10, 11, 12, 13) == near([0.25, 0.25, 0, 0])
    assert metrics["policy/clip_high"] == near(0.5)


@pytest.mark.parametrize("estimator, slope", [("k2", 0.3), ("k1", 0.3), ("k3", 1 - math.exp(-0.3))])
def test_the_kl_term_pulls_a_token_back_to_the_reference(estimator, slope):
    """d = 0.3, no advantage, weight 0.1, one of two policy tokens; tool tokens are not pulled."""
    policy, ref = Scores({10: -1.0, 11: -1.0, 5: -1.0}), Scores({10: -1.3, 11: -1.0, 5: -9.0})
    batch = [episode([1, 10, 5, 11], [0, 1, 0, 1], advantage=0.0)]
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    config = settings(kl=0.1, kl_estimator=estimator)
    metrics = grpo.update(policy, optimizer, batch, config, seed=0, ref=ref)
    assert policy.change(10, 11, 5) == near([-0.1 * slope / 2, 0, 0])
    value = {"k1": 0.3, "k2": 0.045, "k3": math.exp(-0.3) - 1 + 0.3}[estimator]
    assert metrics["policy/kl_ref"] == near(value / 2)
    assert ref.logp.grad is None


def test_the_entropy_bonus_raises_the_entropy_of_the_policys_own_tokens():
    """Minus the bonus times the mean entropy over policy tokens, tool tokens apart."""
    policy = Scores({10: -1.0}, entropy={10: 2.0, 5: 7.0, 11: 1.0})
    policy.entropy.requires_grad_()
    metrics = update(policy, [episode([1, 10, 5, 11], [0, 1, 0, 1], advantage=0.0)], entropy=0.1)
    assert metrics["policy/loss"] == near(-0.1 * 1.5)
    assert policy.entropy.grad[[10, 5, 11]].tolist() == near([-0.05, 0, -0.05])


def test_every_recipe_of_the_paper_can_be_laid_over_a_size():
    """grpo-t: symmetric clip, KL, no overlong shaping; grpo-tcr: the default; grpo-scr: ratio and mean of
    whole sequences, clipped at 3e-4 and 4e-4."""

    def config(line):
        return parse_args(grpo.Config, line.split(), presets=grpo.PRESETS)

    t, tcr, scr = (config(f"--preset qwen3-4b+grpo-{name}") for name in ("t", "tcr", "scr"))
    assert (t.clip_low, t.clip_high, t.kl, t.overlong_buffer) == (0.2, 0.2, 0.001, 0)
    assert replace(tcr, preset="") == replace(config("--preset qwen3-4b"), preset="")
    assert (scr.clip_low, scr.clip_high, scr.ratio, scr.loss_mean) == (3e-4, 4e-4, "sequence", "sequence")
    assert scr.overlong_buffer == 4096 and scr.kl == 0
    assert config("--preset tiny+grpo-scr --clip_high 0.5").clip_high == 0.5
    assert config("--preset tiny+grpo-t").max_new_tokens == grpo.PRESETS["tiny"]["max_new_tokens"]


# ---- groups that teach nothing -----------------------------------------------------------------------------


class Dice:
    """Agents whose episodes of a problem earn what the problem says: a list of rewards."""

    def __init__(self):
        self.asked, self.seconds = [], {"time/rollout": 2.0, "time/reward": 0.5}

    def sample(self, problems, n, seed):
        self.asked.append((len(problems), seed))
        return [
            {
                "prompt_index": i, "sample_index": j, "reward": r, "correct": r > 0, "family": "f",
                "mask": [0, 1], "ids": [1, 2], "prompt_len": 1, "finish": "stop", "tool_results": [],
                "reward_parts": {"tool": 0.0, "overlong": 0.0},
            }
            for i, rewards in enumerate(problems) for j, r in enumerate(rewards)
        ]  # fmt: skip


def resampled(problems, refills, resample):
    """(rewards by group, metrics, agents, how many were asked for in place of flat ones)."""
    agents, wanted = Dice(), []

    def others(data, seed, n):
        wanted.append(n)
        return [refills.pop(0) for _ in range(n)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo, "draw_others", others)
        episodes, row = grpo.sample(agents, problems, [], settings(group=2, batch=6, resample=resample), 7)
    order = [(e["prompt_index"], e["sample_index"]) for e in episodes]
    assert order == [(i, j) for i in range(3) for j in range(2)]
    return [[e["reward"] for e in episodes[i : i + 2]] for i in (0, 2, 4)], row, agents, wanted


def test_groups_of_equal_rewards_are_replaced_until_they_differ():
    """DAPO: a batch full of groups that teach. Groups 0 and 2 are flat, then one of the new ones is."""
    flat, mixed = [-1, -1], [1, -1]
    found, row, agents, wanted = resampled([[1, 1], mixed, flat], [[-1, 1], flat, [1, -1]], resample=5)
    assert found == [[-1, 1], mixed, [1, -1]]
    assert wanted == [2, 1] and row["group/resampled"] == 3
    assert len({seed for _, seed in agents.asked}) == 3  # the same seed would draw the same again
    assert row["time/rollout"] == 6.0 and row["speed/tokens_per_s"] == near((6 + 4 + 2) / 6)


def test_replacing_ends_at_its_bound_and_trains_on_what_is_there():
    """Problems that are all solved would keep it for ever (BytedTsinghua-SIA/DAPO#22, #28)."""
    solved = [1, 1]
    found, row, agents, wanted = resampled([solved] * 3, [solved] * 6, resample=2)
    assert found == [solved] * 3 and wanted == [3, 3] and row["group/zero_variance"] == 1
    assert resampled([solved] * 3, [], resample=0)[3] == []


def test_metrics_are_of_the_problems_asked_for_not_of_the_chosen():
    """Half of each kept group is right by construction: a curve of what was kept shows the choice, not the
    policy."""
    _, row, _, _ = resampled([[1, 1], [1, 1], [1, 1]], [[-1, 1]] * 3, resample=1)
    assert row["reward/correct"] == 1.0 and row["group/zero_variance"] == 1.0


# ---- what the run tells ------------------------------------------------------------------------------------

FINE = {
    "policy/entropy": 0.3, "reward/correct": 0.5, "sampler/gap_mean": 1e-6, "tool/used": 0.6,
    "group/zero_variance": 0.3, "length/truncated": 0.1,
}  # fmt: skip


@pytest.mark.parametrize(
    "change, words",
    [
        ({"policy/entropy": 0.02}, ["fell from 0.300 to 0.020", "50%", "--clip_high"]),
        ({"policy/entropy": 1.2}, ["rose from 0.300 to 1.200", "--lr"]),
        ({"tool/used": 0.01}, ["1% of the episodes call the tool"]),
        ({"group/zero_variance": 1.0}, ["all samples earned the same", "pass rate"]),
        ({"sampler/gap_mean": 0.01}, ["1.0e-02"]),
        ({"length/truncated": 0.8}, ["80%", "--max_new_tokens"]),
    ],
)
def test_what_goes_wrong_is_said_in_plain_words(change, words):
    """A collapsed or exploding entropy, an unlearned tool, a batch without signal and two policies that have
    drifted apart are in everybody's metrics and in nobody's eye."""
    assert alarms({**FINE, **change}, [{"step": 0}, FINE], exact=True).keys() == change.keys()
    (said,) = alarms({**FINE, **change}, [{"step": 0}, FINE], exact=True).values()
    assert all(w in said for w in words), said


def test_a_healthy_run_is_not_alarmed():
    """Entropy that falls because nearly everything is right is what is wanted; bfloat16 rounds."""
    assert alarms(FINE, [], exact=True) == {}
    solved = {**FINE, "policy/entropy": 0.005, "reward/correct": 0.97}
    assert alarms(solved, [FINE], exact=True) == {}
    assert alarms({**FINE, "sampler/gap_mean": 0.01}, [FINE], exact=False) == {}


def test_a_loss_that_is_not_finite_names_the_layer_where_it_begins():
    """The bare word NaN after hours tells nothing. A weight of the second layer's MLP is broken: the first
    output that is not finite is that module's, not the last layer's."""
    hf = small_model("qwen3")
    policy = Policy(hf)
    with torch.no_grad():
        hf.base_model.layers[1].mlp.up_proj.weight[3, 3] = NAN
    with pytest.raises(FloatingPointError, match=r"layers\.1\.mlp\.up_proj"):
        update(policy, [episode([1, 10, 11], [0, 1, 1])])


def test_a_gradient_that_is_not_finite_is_traced_to_the_first_weight_that_has_one_in_the_backward():
    """Outputs are finite and one weight's gradient is not: clipping by a NaN norm would make all of them NaN,
    and then the name is that of any."""
    hf = small_model("qwen3", num_hidden_layers=3)
    hf.model.layers[1].self_attn.k_proj.weight.register_hook(lambda gradient: gradient * torch.nan)
    with pytest.raises(
        FloatingPointError, match=r"the gradient of \S*layers\.1\.self_attn\.k_proj\.weight is not"
    ):
        update(Policy(hf), [episode([1, 10, 11], [0, 1, 1])])


# ---- reward and metrics of an episode ----------------------------------------------------------------------


def rewarded(tokenizer, turns, tools=(), prompt="q", answer="16", context=10**6, **more) -> dict:
    """Agents.reward of an episode with these turns of the policy and texts of the tool in between."""
    ids = tokenizer.encode(prompt)
    mask, prompt_len = [0] * len(ids), len(ids)
    for i, turn in enumerate(turns):
        for text, m in [(turn + "<|im_end|>", 1), *((t, 0) for t in tools[i : i + 1])]:
            new = tokenizer.encode(text)
            ids, mask = ids + new, mask + [m] * len(new)
    results = [ToolResult(t, "ok", 0.1) for t in tools]
    trajectory = Trajectory(ids, mask, [0.0] * len(ids), prompt_len, results, "stop", 3, 1)
    problem = Problem([{"role": "user", "content": prompt}], answer, "math", "mod", "p")
    sampler = SimpleNamespace(max_len=context)
    agents = SimpleNamespace(tokenizer=tokenizer, tool=None, config=grpo.Config(**more), sampler=sampler)
    return Agents.reward(agents, trajectory, problem)


def test_a_right_answer_earns_one_and_a_wrong_one_minus_one_plus_a_tenth_a_round(tokenizer):
    """One more than the rounds is the number of turns. The published code lost the number on its way and paid
    every wrong answer -1.1 (Gen-Verse/Open-AgentRL#13)."""
    right, wrong = "It is \\boxed{16}.", "It is \\boxed{17}."
    assert rewarded(tokenizer, [right])["reward"] == 1.0
    assert rewarded(tokenizer, ["Use Python.", right], ["16"])["reward"] == 1.0
    for rounds, reward in [(0, -1.0), (1, -0.9), (2, -0.8), (4, -0.6), (7, -0.6)]:
        found = rewarded(tokenizer, ["Use Python."] * rounds + [wrong], ["16"] * rounds)
        assert found["reward"] == near(reward) and found["correct"] is False
        assert found["reward_parts"] == {"correct": -1.0, "tool": near(reward + 1.0), "overlong": 0.0}
        off = rewarded(tokenizer, ["Use Python."] * rounds + [wrong], ["16"] * rounds, tool_reward=False)
        assert off["reward"] == -1.0
    kept = rewarded(tokenizer, ["Use Python.", right], ["16"])
    assert (kept["family"], kept["answer"], kept["prompt_index"], kept["sample_index"]) == ("mod", "16", 3, 1)
    assert kept["tool_results"] == [{"output": "16", "status": "ok", "seconds": 0.1, "stdout": ""}]
    json.dumps(kept)


def test_an_infinite_bound_is_none_and_is_accepted():
    """clip_norm, stall and tis: nothing is clipped, watched or capped."""
    none = dict(clip_norm=float("inf"), stall=float("inf"), tis=float("inf"))
    grpo.check(replace(grpo.Config(), preset="x", model="m", data="d", **none))


def test_the_policy_reads_and_calls_the_tool_by_its_name(tokenizer):
    """The published models were cold-started on calls of code_interpreter: asked for python, they are told at
    every call that there is no such tool."""
    more = dict(vocab_size=len(tokenizer), num_hidden_layers=2, max_position_embeddings=1000)
    hf = small_model("qwen3", **more)
    tool = SimpleNamespace(schema=PythonTool.described("code_interpreter"))
    agents = Agents(hf, tokenizer, tool, settings(max_prompt=2000, tool_name="code_interpreter"))
    asked = tokenizer.decode(
        agents.prompt(Problem([{"role": "user", "content": "q"}], "16", "math", "mod", "p"))
    )
    assert '"name": "code_interpreter"' in asked and '"name": "python"' not in asked
    assert list(agents.tools) == ["code_interpreter"]
    for preset in ("qwen3-4b", "qwen2.5-7b"):
        assert grpo.PRESETS[preset]["tool_name"] == "code_interpreter"


def test_training_samples_from_the_whole_law(tokenizer):
    """With top-p or top-k on, the tail is neither sampled nor trained, and the stored log-prob is not the
    trainer's (huggingface/trl#6789; karpathy/nanochat's chat_rl.py samples the 50 likeliest tokens). Each one
    here is that of the model's plain softmax."""
    hf = small_model("qwen3", vocab_size=len(tokenizer), num_hidden_layers=2)
    limits = dict(max_prompt=40, max_new_tokens=12, overlong_buffer=0, describe_tool=False)
    agents = Agents(hf, tokenizer, None, settings(**limits))
    problem = Problem([{"role": "user", "content": "q"}], "16", "math", "mod", "p")
    for e in agents.sample([problem], 8, seed=0):
        right = [lp * m for lp, m in zip(own_logp(hf, e["ids"]).tolist(), e["mask"])]
        assert e["logprobs"] == near(right, 1e-4)


def test_only_the_policys_last_turn_is_the_answer(tokenizer):
    """What the tool prints, the question, or a turn before is not an answer; an episode without a turn is
    wrong."""
    assert not rewarded(tokenizer, ["Use Python.", "I see."], ["\\boxed{16}"])["correct"]
    assert not rewarded(tokenizer, ["\\boxed{16}", "No."], ["1"])["correct"]
    assert not rewarded(tokenizer, ["No."], prompt="\\boxed{16}")["correct"]
    empty = rewarded(tokenizer, [])
    assert (empty["correct"], empty["reward"]) == (False, -1.0)


@pytest.mark.parametrize("beyond, penalty", [(0, 0.0), (1, -0.1), (5, -0.5), (10, -1.0)])
def test_the_overlong_penalty_counts_the_tools_tokens_and_not_the_prompt(tokenizer, beyond, penalty):
    """Begun at the wrong place (NovaSky-AI/SkyRL#755) or over characters (modelscope/ms-swift#3353). The last
    10 tokens of the budget cost a tenth each."""
    said, told, asked = ["Use Python.", "It is \\boxed{16}."], ["1 2 3 4 5 6 7 8 9"], "q " * 30
    length = sum(len(tokenizer.encode(t)) for t in [*said, *told]) + len(said)  # an end token for each turn
    more = dict(max_new_tokens=length - beyond + 10, overlong_buffer=10)
    found = rewarded(tokenizer, said, told, asked, **more)
    assert found["reward_parts"]["overlong"] == near(penalty)
    assert found["reward"] == near(1.0 + penalty)
    assert found["reward"] == near(sum(found["reward_parts"].values()))
    # where the model's context leaves less than max_new_tokens, that is the limit
    context = len(tokenizer.encode(asked)) + length - beyond + 10
    more = dict(max_new_tokens=9999, overlong_buffer=10, context=context)
    assert rewarded(tokenizer, said, told, asked, **more)["reward_parts"]["overlong"] == near(penalty)


def test_episodes_of_all_ranks_are_sorted_and_whole():
    """Who sampled what must not matter to anything later."""
    found = [
        {
            "prompt_index": i,
            "sample_index": j,
            "ids": [i, j, 70000],
            "mask": [0, 1, 1],
            "logprobs": [0.0, -0.5, -2.0],
        }
        for i, j in [(1, 1), (0, 0), (1, 0), (0, 1)]
    ]
    before = copy.deepcopy(found)
    assert gather(found) == sorted(before, key=lambda e: (e["prompt_index"], e["sample_index"]))


def test_every_metric_of_a_batch_by_hand():
    """Length metrics that count the tool's text (THUDM/slime#365), success over trajectories that never
    called, or a logged reward that is not the one used (huggingface/trl#5353)."""

    def stored(group, family, mask, prompt_len, statuses, finish, right, tool=0.0, overlong=0.0):
        return {
            "prompt_index": group, "family": family, "ids": [5] * len(mask), "mask": mask,
            "prompt_len": prompt_len,
            "tool_results": [{"status": s, "seconds": 0.5 * (i + 1)} for i, s in enumerate(statuses)],
            "finish": finish, "correct": right, "reward": (1.0 if right else -1.0) + tool + overlong,
            "reward_parts": {"correct": 1.0 if right else -1.0, "tool": tool, "overlong": overlong},
        }  # fmt: skip

    found = measure([
        stored(0, "mod", [0, 0, 1, 1, 0, 0, 0, 1], 2, ["error", "ok"], "stop", True, overlong=-0.5),
        stored(0, "bits", [0, 1], 1, [], "stop", False),
        stored(1, "mod", [0, 0, 0, 1, 0, 1], 3, ["ok", "timeout"], "length", False, tool=0.2),
        stored(1, "mod", [0, 0, 0, 1, 0, 1], 3, ["killed", "error"], "turns", False, tool=0.2),
    ])  # fmt: skip
    assert found == {
        "reward/mean": near((0.5 - 1 - 0.8 - 0.8) / 4),
        "reward/correct": 0.25,
        "reward/tool": near(0.1),
        "reward/overlong": near(-0.125),
        "correct/mod": near(1 / 3),
        "correct/bits": 0.0,
        "length/policy_tokens": near((3 + 1 + 2 + 2) / 4),
        "length/tool_tokens": near((3 + 0 + 1 + 1) / 4),
        "length/truncated": 0.5,  # ended by length or by turns
        "tool/calls": 1.5,
        "tool/used": 0.75,
        "tool/success": near(1 / 3),  # of the six calls
        "tool/repaired": 0.25,  # a failed call, and the next one ran
        "tool/seconds": 0.75,
        "group/zero_variance": 0.5,
    }
    alone = measure([stored(0, "mod", [0, 1], 1, [], "stop", True)])
    assert not {"tool/success", "tool/seconds"} & alone.keys()  # no call is not a failed call


def test_the_share_of_right_answers_has_wilsons_interval():
    """8 of 10: 0.490 to 0.943 (the normal interval would reach 1.05); 0 of 10 still has a width."""

    def score(right):
        episodes = [
            {"prompt_index": i, "family": "mod", "ids": [1, 2], "mask": [0, 1], "prompt_len": 1,
             "tool_results": [], "finish": "stop", "correct": i < right, "reward": 0.0,
             "reward_parts": {"tool": 0.0, "overlong": 0.0}}
            for i in range(10)
        ]  # fmt: skip
        return evaluate_policy(SimpleNamespace(sample=lambda problems, n, seed: episodes), [None] * 10, 0)

    found = score(8)
    assert [found[f"eval/{k}"] for k in ("correct", "low", "high")] == near([0.8, 0.4902, 0.9433], 1e-4)
    assert found["eval/correct/mod"] == 0.8
    assert score(0)["eval/low"] == near(0.0) and score(0)["eval/high"] == near(0.2775, 1e-4)


# ---- settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, words",
    [
        (["--group", "1"], ["--group 1", "at least 2"]),
        (["--group", "0"], ["--group 0"]),
        (["--batch", "6", "--group", "4"], ["6", "4 or 8"]),
        (["--batch", "2", "--group", "4"], ["--batch 2", "take 4"]),
        (["--batch", "0"], ["--batch 0"]),
        (["--mini-batches", "0"], ["--mini_batches 0"]),
        (["--mini-batches", "257"], ["--mini_batches 257", "256"]),
        (["--steps", "0"], ["--steps 0"]),
        (["--overlong-buffer", "151"], ["--overlong_buffer 151", "150"]),
        (["--overlong-buffer", "-1"], ["--overlong_buffer -1"]),
        (["--dual-clip", "1"], ["--dual_clip 1.0", "more than 1"]),
        (["--scale", "mean"], ["--scale mean", "std or none"]),
        (["--old-logp", "both"], ["--old_logp both", "trainer or sampler"]),
        (["--temperature", "0"], ["--temperature 0.0"]),
        (["--save-every", "0"], ["--save_every 0"]),
        (["--lr", "-1"], ["--lr -1.0"]),
        (["--lr", "inf"], ["--lr inf: take a finite number"]),
        (["--beta2", "1"], ["--beta2 1.0: take 0 to below 1"]),
        (["--weight_decay", "-1"], ["--weight_decay -1.0: take 0 or more"]),
        (["--entropy", "nan"], ["--entropy nan: take a finite number"]),
        (["--dual_clip", "nan"], ["--dual_clip nan"]),
        (["--tool_name", ""], ["--tool_name is empty"]),
        (["--tool_name", "code_interpreter"], ["--tool_name code_interpreter: the laptop"]),
        (["--tool_seconds", "295"], ["--stall 300: a tool call may take --tool_seconds 295"]),
        (["--max-rows", "0"], ["--max_rows 0"]),
        (["--tool-seconds", "0"], ["--tool_seconds 0.0"]),
        (["--cache-tokens", "64"], ["--cache_tokens 64", "214"]),
        (["--eval-every", "-1"], ["--eval_every"]),
        (["--tis", "2"], ["--tis", "--old_logp trainer"]),
        (["--kl", "-1"], ["--kl -1.0", "0 or more"]),
        (["--kl", "nan"], ["--kl nan", "0 or more"]),
        (["--kl-estimator", "k4"], ["--kl_estimator k4", "k1 or k2 or k3"]),
        (["--loss-mean", "mean"], ["--loss_mean mean", "token or sequence or constant"]),
        (["--ratio", "gspo"], ["--ratio gspo", "token or sequence"]),
        (["--resample", "-1"], ["--resample -1"]),
        (["--preset", "grpo-scr"], ["--model", "tiny+"]),
        (["--preset", "qwen3-4b", "--model", ""], ["--model"]),
    ],
)
def test_settings_that_cannot_work_are_refused_before_the_run(given, words, capsys):
    """A batch that the group does not divide made broken groups (huggingface/trl#2858, #2776,
    modelscope/ms-swift#3980), a group of one trained on nothing (OpenRLHF/OpenRLHF#1250): one sentence with
    the value and the way out, exit code 2."""
    config = parse_args(grpo.Config, given, presets=grpo.PRESETS)
    with pytest.raises(SystemExit) as end:
        grpo.check(config)
    said = capsys.readouterr().err.strip()
    assert end.value.code == 2
    assert said.count("\n") == 0 and all(w in said for w in words), said


@pytest.mark.parametrize("preset", grpo.PRESETS)
def test_every_preset_is_accepted(preset):
    """And so are its neighbours at the limits of what is allowed."""
    name = preset if "grpo" not in preset else f"qwen3-4b+{preset}"
    config = parse_args(grpo.Config, ["--preset", name], presets=grpo.PRESETS)
    grpo.check(config)
    grpo.check(
        replace(
            config, batch=2, group=2, mini_batches=2, steps=1, dual_clip=0.0, overlong_buffer=0, scale="none"
        )
    )


@pytest.mark.parametrize("module", [grpo, sft, evaluate])
def test_every_field_of_a_configuration_is_read(module):
    """An option that changes nothing is worse than none: the dynamic sampling of the published script was set
    and never passed on."""
    read, names = set(), ("c", "cfg", "config")
    folder, name = Path(module.__file__).parent, Path(module.__file__).name
    files = [name, "episodes.py"] if module is grpo else [name]  # what only config.py checks changes nothing
    for part in ast.parse("\n".join((folder / f).read_text() for f in files)).body:
        nodes = list(ast.walk(part))
        for node in nodes:  # config.x, self.config.x; and in the same function as getattr(config, name), "x"
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                base = node.value
                if getattr(base, "id", None) in names or getattr(base, "attr", None) in names:
                    read.add(node.attr)
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr":
                if getattr(node.args[0], "id", None) in names:
                    read |= {n.value for n in nodes if isinstance(n, ast.Constant)}
    assert {f.name for f in fields(module.Config)} - read == set()
