"""Advantages, the loss of a token, its weight in the mean, and the KL term. Values are worked out by hand."""

import math

import pytest
import torch

from loss import group_advantages, kl_estimate, loss_weights, policy_loss

INF, NAN = float("inf"), float("nan")


def near(values, tolerance=1e-5):
    return pytest.approx(values, abs=tolerance)


# ---- advantages --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rewards, scale, advantages",
    [
        ([1, 1, -1, -1], "std", [0.866025, 0.866025, -0.866025, -0.866025]),  # std^2 = 4/3
        ([1, -1.1, -1.1, -1.1], "std", [1.499999, -0.5, -0.5, -0.5]),
        ([1, -1, -0.9, -0.6], "std", [1.474860, -0.670391, -0.563128, -0.241341]),
        ([0.5, 1, -1.1, -2.1], "std", [0.646179, 0.995465, -0.471536, -1.170108]),
        ([1, -1, -1, -1], "none", [1.5, -0.5, -0.5, -0.5]),
        ([0, 1, 1], "std", [-1.154699, 0.577350, 0.577350]),  # std^2 = 1/3
        ([0, 1, 1], "none", [-2 / 3, 1 / 3, 1 / 3]),
    ],
)
def test_an_advantage_is_the_distance_from_the_groups_mean_in_units_of_its_unbiased_std(
    rewards, scale, advantages
):
    """The branches with and without division were swapped (huggingface/trl#3992); the biased std makes groups
    of four 15 % steeper."""
    assert group_advantages(rewards, [7] * len(rewards), scale).tolist() == near(advantages)


@pytest.mark.parametrize(
    "right, up, down",
    [(1, 3.75, -0.25), (4, 1.677051, -0.559017), (8, 0.968246, -0.968246), (15, 0.25, -3.75)],
)
def test_advantages_of_right_and_wrong_depend_on_their_share_alone(right, up, down):
    """sqrt((1-p)/p (G-1)/G) and -sqrt(p/(1-p) (G-1)/G), for rewards +1 and -1 as for 1 and 0."""
    for wrong in (-1.0, 0.0):
        found = group_advantages([1.0] * right + [wrong] * (16 - right), [0] * 16).tolist()
        assert found == near([up] * right + [down] * (16 - right), 2e-5)


@pytest.mark.parametrize("reward", [1.0, 0.1, -0.9, 1 / 3, -1.1 + 0.3])
@pytest.mark.parametrize("scale", ["std", "none"])
def test_equal_rewards_have_exactly_no_advantage(reward, scale):
    """The mean of sixteen times 0.1 is not 0.1 in floating point, and a difference of 1e-17 over a std of
    1e-17 is a signal out of nothing (THUDM/slime#1674, huggingface/trl#7068, verl-project/verl#5228)."""
    for n in (2, 3, 4, 16):
        assert group_advantages([reward] * n, [3] * n, scale).tolist() == [0.0] * n


def test_rounding_between_nearly_equal_rewards_stays_nothing():
    """0.1 + 0.2 is not 0.3: the eps of the divisor keeps the noise at noise."""
    assert group_advantages([0.1 + 0.2, 0.3, 0.3], [0, 0, 0]).abs().max() < 1e-9


def test_a_group_of_one_has_no_advantage():
    """The unbiased std of one number is NaN (ruc-datalab/DeepAnalyze#116, modelscope/ms-swift#3980)."""
    assert group_advantages([1.0], [0]).tolist() == [0.0]
    assert group_advantages([1.0, 0.0, 1.0], [0, 1, 1]).tolist() == near([0.0, -0.707106, 0.707106])


def test_a_group_is_normalised_by_itself_not_by_the_batch():
    """Batch-wide the second group would get 0.4999 each for rewards that are all equal
    (XU-YIJIE/grpo-flat#2, linkedin/Liger-Kernel#553)."""
    assert group_advantages([1, 0, 1, 1], [0, 0, 1, 1]).tolist() == near([0.707106, -0.707106, 0, 0])
    assert group_advantages([1, 0, 1, 1], [0, 0, 1, 1], "none").tolist() == [0.5, -0.5, 0, 0]


def test_a_group_is_found_by_its_id_in_any_order():
    """Reshaping to [prompts, G] takes a, b, a, b for two groups of the wrong members (dllm-reasoning/d1#19),
    and filtered or shuffled rows lose their baseline (NovaSky-AI/SkyRL#1507)."""
    assert group_advantages([1, 1, 0, 1], [5, 2, 5, 2], "none").tolist() == [0.5, 0, -0.5, 0]
    rewards, ids = torch.randn(24, generator=torch.Generator().manual_seed(0)), torch.arange(24) // 6
    shuffle = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        group_advantages(rewards[shuffle], ids[shuffle]), group_advantages(rewards, ids)[shuffle]
    )


def test_an_unknown_scale_is_refused():
    """A typing error must not silently become one of the two."""
    with pytest.raises(ValueError, match="stdd"):
        group_advantages([1.0, 0.0], [0, 0], "stdd")


# ---- the loss of a token -----------------------------------------------------------------------------------


def loss_of(advantages, ratios, mask=None, **options):
    """Losses, d loss / d log-prob, and stats, of tokens with these advantages and ratios."""
    logp = torch.tensor([r if isinstance(r, float) and math.isnan(r) else math.log(r) for r in ratios]) - 1.0
    logp.requires_grad_()
    mask = torch.tensor(mask or [1] * len(ratios))
    loss, stats = policy_loss(logp, torch.full_like(logp, -1.0), torch.tensor(advantages), mask, **options)
    loss.sum().backward()
    return loss.tolist(), logp.grad.tolist(), {k: v.item() for k, v in stats.items()}


@pytest.mark.parametrize(
    "advantage, ratio, loss",
    [
        (1, 2, -1.28), (1, 1.2, -1.2), (1, 0.5, -0.5), (-1, 2, 2), (-1, 0.5, 0.8), (-1, 20, 10),
        (-0.5, 12, 5), (1, 1.25, -1.25), (1, 1.3, -1.28), (1, 0.75, -0.75), (-1, 0.75, 0.8), (-1, 1.3, 1.3),
        (1, 1, -1), (-1, 1, 1),
    ],
)  # fmt: skip
def test_the_clipped_loss_by_hand(advantage, ratio, loss):
    """Which of the two bounds holds for which sign (agentscope-ai/Trinity-RFT#340,
    OpenRLHF/OpenRLHF#1091)."""
    assert loss_of([float(advantage)], [ratio])[0] == near([loss])


@pytest.mark.parametrize(
    "advantage, ratio, loss",
    [(-1, 10, 3), (-1, 2, 2), (-1, 0.5, 0.8), (-2, 4, 6), (1, 10, -1.28), (1, 0.5, -0.5), (1, 1, -1)],
)
def test_the_dual_clip_bounds_the_loss_of_a_negative_advantage_only(advantage, ratio, loss):
    """With the sign lost, a right token at ratio 1 got -3 instead of -1 (thu-ml/tianshou#433,
    verl-project/verl#784)."""
    assert loss_of([float(advantage)], [ratio], dual_clip=3.0)[0] == near([loss])


@pytest.mark.parametrize("dual_clip", [1.0, 0.5, -3.0])
def test_a_dual_clip_inside_the_clip_range_is_refused(dual_clip):
    """c <= 1 would bound tokens whose ratio is still 1 (opendilab/PPOxFamily#95)."""
    with pytest.raises(ValueError, match=str(dual_clip)):
        loss_of([-1.0], [1.0], dual_clip=dual_clip)


@pytest.mark.parametrize("dual_clip", [None, 0.0])
def test_without_a_dual_clip_nothing_bounds_a_negative_advantage(dual_clip):
    """0 on the command line means none, not a bound of 0."""
    losses, gradient, stats = loss_of([-1.0], [20.0], dual_clip=dual_clip)
    assert losses == near([20.0], 1e-4) and gradient == near([20.0], 1e-4) and stats["dual"] == 0


@pytest.mark.parametrize(
    "advantage, ratio, slope",
    [(1, 0.5, -1), (1, 1, -1), (1, 1.5, 0), (-1, 0.5, 0), (-1, 1, 1), (-1, 1.5, 1), (-1, 11, 0), (0, 1.5, 0)],
)
def test_the_gradient_by_the_ratio_by_hand(advantage, ratio, slope):
    """d loss / d ratio is -A where the ratio may still move, 0 where a bound holds. At ratio 1 it is -A
    although the mean loss of a group is 0: "the loss is 0, is it broken?" (huggingface/trl#3452,
    open-r1#239)."""
    _, gradient, _ = loss_of([float(advantage)], [ratio])
    assert gradient == near([slope * ratio])  # d ratio / d log-prob = ratio


def test_the_first_loss_is_minus_the_advantage_and_its_ratio_is_one():
    """On-policy: log-probs equal, so ratio 1, nothing clipped, no KL."""
    losses, gradient, stats = loss_of([2.0, -3.0, 0.0], [1.0, 1.0, 1.0])
    assert losses == [-2.0, 3.0, 0.0] and gradient == [-2.0, 3.0, 0.0]
    assert set(stats.values()) == {0.0}


def test_stats_are_shares_of_the_policy_tokens():
    """Of five policy tokens one is held by each bound; -log ratio is averaged over the five. Masked tokens
    with a huge ratio do not count (THUDM/slime#1372, NovaSky-AI/SkyRL#490)."""
    advantages, ratios = [-1.0, 1.0, -1.0, 1.0, -1.0, 1.0], [0.5, 1.5, 20.0, 1.0, 1.0, 9.0]
    _, _, stats = loss_of(advantages, ratios, mask=[1, 1, 1, 1, 1, 0])
    assert stats == {
        "clip_low": near(0.2),
        "clip_high": near(0.2),
        "dual": near(0.2),
        "kl_old": near(-math.log(0.5 * 1.5 * 20) / 5),
    }


def test_a_far_token_has_a_finite_loss():
    """exp(100) is inf in float32, and inf * 0 is NaN (radixark/miles#1363, huggingface/trl#3015)."""
    logp = torch.tensor([100.0, 100.0, 100.0, -100.0, -100.0], requires_grad=True)
    advantages = torch.tensor([0.0, 1.0, -1.0, 1.0, -1.0])
    for dual_clip in (10.0, None):
        logp.grad = None
        loss, stats = policy_loss(logp, torch.zeros(5), advantages, torch.ones(5), dual_clip=dual_clip)
        loss.sum().backward()
        assert torch.isfinite(loss).all() and torch.isfinite(logp.grad).all()
        assert all(torch.isfinite(v) for v in stats.values())
        assert loss[:2].tolist() == near([0.0, -1.28])


@pytest.mark.parametrize("bad", [NAN, INF, -INF, 1e30])
@pytest.mark.parametrize("where", ["logp", "old_logp", "advantages"])
@pytest.mark.parametrize("seq", [False, True])
def test_nothing_at_a_masked_place_changes_anything(bad, where, seq):
    """NaN times a mask of 0 is NaN (NovaSky-AI/SkyRL#1635), and a placeholder log-prob at tool tokens leaked
    into the ratio (yaof20/Flash-RL#19): loss, gradient and stats must be the same bits."""

    def found(value):
        row = {
            "logp": [-1.0, -2.0, -1.5, -1.0],
            "old_logp": [-1.1, -2.0, -1.0, -1.2],
            "advantages": [1.0, 1.0, -1.0, -1.0],
        }
        row = {k: torch.tensor(v) for k, v in row.items()}
        row[where][1] = value
        row["logp"].requires_grad_()
        ids = torch.tensor([0, 0, 1, 1]) if seq else None
        loss, stats = policy_loss(**row, mask=torch.tensor([1, 0, 1, 1]), seq_ids=ids)
        loss.sum().backward()
        return [loss, row["logp"].grad, *stats.values()]

    for clean, dirty in zip(found(0.0), found(bad)):
        assert torch.equal(clean, dirty)
    assert found(bad)[0][1] == 0 and found(bad)[1][1] == 0


@pytest.mark.parametrize("seq", [False, True])
def test_an_empty_mask_gives_zero_and_backward_works(seq):
    """0/0 when every completion was cut (huggingface/trl#3248, unslothai/unsloth-zoo#1286); the repair
    returned a zero without a graph, and backward crashed (huggingface/trl#5826)."""
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    ids = torch.tensor([0, 1]) if seq else None
    loss, stats = policy_loss(logp, torch.zeros(2), torch.ones(2), torch.zeros(2), seq_ids=ids)
    loss.sum().backward()
    assert loss.tolist() == [0, 0] and logp.grad.tolist() == [0, 0]
    assert all(v.item() == 0 for v in stats.values())


def test_tool_tokens_are_neither_summed_nor_counted():
    """3 policy, 4 tool and 2 policy tokens at ratio 1 and A = 1: the mean over 5 tokens is -1, and the
    gradient at the tool's is 0 (THUDM/slime#1370, verl-project/verl#2368, huggingface/trl#4976)."""
    mask = [1, 1, 1, 0, 0, 0, 0, 1, 1]
    losses, gradient, _ = loss_of([1.0] * 9, [1.0] * 9, mask=mask)
    assert sum(losses) / sum(mask) == -1.0
    assert gradient == [-float(m) for m in mask]


def test_the_ratio_of_a_sequence_is_the_geometric_mean_of_its_tokens():
    """GSPO: log-ratios .1, -.2, .3 give exp(.2 / 3) = 1.068939 for each token, and each gets that gradient
    times -A; taken by the sum instead of the mean the ratio grows with length (huggingface/trl#4772). Another
    sequence in between, and a masked token, have no part in it."""
    log_ratio = torch.tensor([0.1, 0.5, -0.2, 9.0, 0.3, -0.1])
    seq_ids, mask = torch.tensor([4, 1, 4, 4, 4, 1]), torch.tensor([1, 1, 1, 0, 1, 1])
    logp = (log_ratio - 2.0).requires_grad_()
    advantages = torch.tensor([1.0, -2.0, 1.0, 1.0, 1.0, -2.0])
    loss, stats = policy_loss(logp, torch.full((6,), -2.0), advantages, mask, seq_ids=seq_ids)
    other = math.exp(0.4 / 2)
    by_hand = [-1.068939, 2 * other, -1.068939, 0.0, -1.068939, 2 * other]
    assert loss.tolist() == near(by_hand)
    loss.sum().backward()
    assert logp.grad.tolist() == near(by_hand)
    assert stats["kl_old"].item() == near(-(0.1 + 0.5 - 0.2 + 0.3 - 0.1) / 5)


def test_a_sequence_is_clipped_as_a_whole():
    """Beyond its bound none of the tokens has a gradient, whatever its own ratio."""
    logp = torch.tensor([0.004, -0.002, 0.002, 0.0], requires_grad=True)
    ids, advantages = torch.tensor([0, 0, 1, 1]), torch.tensor([1.0, 1.0, -1.0, -1.0])
    loss, stats = policy_loss(logp, torch.zeros(4), advantages, torch.ones(4), 3e-4, 4e-4, seq_ids=ids)
    loss.sum().backward()
    assert loss.tolist() == near([-1.0004, -1.0004, math.exp(0.001), math.exp(0.001)], 1e-6)
    assert logp.grad.tolist() == near([0, 0, math.exp(0.001), math.exp(0.001)], 1e-6)
    assert stats["clip_high"].item() == 0.5


# ---- the mean over tokens ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mean, value", [("token", 3.5), ("sequence", 3.0), ("constant", 2.625)])
def test_each_mean_of_token_losses_by_hand(mean, value):
    """Losses 1, 2 of one sequence and 3, 4, 5, 6 of another: 21/6; (1.5 + 4.5)/2; 21/(2 sequences * 4)."""
    weights = loss_weights([2, 4], mean, longest=4)
    assert weights[0] * (1 + 2) + weights[1] * (3 + 4 + 5 + 6) == near(value)


@pytest.mark.parametrize("mean", ["token", "sequence"])
def test_the_weights_of_a_batch_sum_to_one(mean):
    """A mean, whatever the lengths; a sequence without policy tokens has nothing to weigh."""
    lengths = [7, 1, 130]
    assert sum(w * n for w, n in zip(loss_weights(lengths, mean, 500), lengths)) == near(1.0)
    assert loss_weights([], mean, 500) == []
    assert all(map(math.isfinite, loss_weights([0, 0], mean, 500)))


def test_a_constant_divisor_does_not_favour_short_wrong_answers():
    """Divided by its own length, a token of a short wrong answer is punished harder than one of a long wrong
    answer, and answers that are wrong grow (Dr.GRPO 2503.20783); by a constant they weigh the same."""
    short, long = loss_weights([10, 100], "sequence", 200)
    assert short == near(10 * long)
    short, long = loss_weights([10, 100], "constant", 200)
    assert short == long == near(1 / 400)


# ---- the KL term -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "logp, ref, k1, k2, k3",
    [(-1.2, -0.9, -0.3, 0.045, 0.0498588), (-0.5, -2.0, 1.5, 1.125, 0.7231302), (-1.0, -1.0, 0, 0, 0)],
)
def test_the_kl_estimators_by_hand(logp, ref, k1, k2, k3):
    """exp(0.3) - 1 - 0.3 = 0.0498588; exp(-1.5) - 1 + 1.5 = 0.7231302."""
    logp, ref = torch.tensor([logp]), torch.tensor([ref])
    assert [kl_estimate(logp, ref, k).item() for k in ("k1", "k2", "k3")] == near([k1, k2, k3])


PI, REF = (
    torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64),
    torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64),
)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_mean_of_an_unbiased_estimator_is_the_kl_of_the_policy_to_the_reference(estimator):
    """All outcomes of a law of three. With log(ref/pi) for log(pi/ref) k1 is -KL, and k3 estimates
    chi-squared - KL; near 0 nobody sees it."""
    exact = (PI * (PI / REF).log()).sum()
    assert (PI * kl_estimate(PI.log(), REF.log(), estimator)).sum().item() == near(exact.item(), 1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_gradient_of_the_kl_term_is_that_of_a_kl(estimator):
    """Sum over all outcomes of pi * d estimate / d logits, pi held as the sampling law: of k1 and k2 the
    gradient of KL(pi || ref), of k3 that of KL(ref || pi). k1's own would be 0: a term that holds nothing
    (huggingface/trl#3104)."""
    z = PI.log().requires_grad_()
    logp = torch.log_softmax(z, 0)
    (PI * kl_estimate(logp, REF.log(), estimator)).sum().backward()
    found, z.grad = z.grad, None
    p = torch.softmax(z, 0)
    kl = (REF * (REF / p).log()).sum() if estimator == "k3" else (p * (p / REF).log()).sum()
    kl.backward()
    torch.testing.assert_close(found, z.grad)


def test_a_far_reference_gives_a_finite_kl():
    """exp(200) is inf."""
    logp = torch.tensor([-200.0, 0.0], requires_grad=True)
    for estimator in ("k1", "k2", "k3"):
        value = kl_estimate(logp, torch.tensor([0.0, -200.0]), estimator).sum()
        (slope,) = torch.autograd.grad(value, logp)
        assert value.isfinite() and slope.isfinite().all()


def test_one_token_of_k3_does_not_drown_the_batch():
    """A token that the reference likes and the policy has all but lost: e^10 - 11 = 22,015, against about 1
    of any other; after the clipping of the norm the step would be that token's alone."""
    assert kl_estimate(torch.tensor([-12.0]), torch.tensor([-2.0]), "k3").item() == 10
