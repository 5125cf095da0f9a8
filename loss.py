"""The equations of the method: advantages, the clipped loss, the mean over tokens, the KL to a reference.

Each function is one idea of a paper, on plain tensors. Axis letters: N trajectories in group_advantages,
tokens of a packed row elsewhere, position t holding what belongs to one sampled token; B sequences of an
optimizer batch. Logarithms are natural.

Left out: a critic. To copy into another project: this file alone, with torch.
"""

import torch
from torch import Tensor


def group_advantages(rewards, group_ids, scale: str = "std") -> Tensor:
    """Advantage of each trajectory over its own group (arXiv 2402.03300 eq. 3; "none": Dr.GRPO 2503.20783).

    rewards    [N] float
    group_ids  [N] int     trajectories of the same prompt share an id, in any order
    returns    [N] float32 (r - mean) / (std + 1e-6), std unbiased, or r - mean. Exactly 0 in a group of equal
               rewards (rounding must not make a signal out of nothing) and in a group of one
    """
    if scale not in ("std", "none"):
        raise ValueError(f"scale {scale!r}: take 'std' or 'none'")
    rewards = torch.as_tensor(rewards, dtype=torch.float64)
    group_ids = torch.as_tensor(group_ids)
    advantages = torch.zeros_like(rewards)
    for group in group_ids.unique():
        r = rewards[group_ids == group]
        if r.min() < r.max():
            divisor = r.std() + 1e-6 if scale == "std" else 1.0
            advantages[group_ids == group] = (r - r.mean()) / divisor
    return advantages.float()


def policy_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 10.0,
    seq_ids: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped loss of each token (PPO 1707.06347 eq. 7; DAPO 2503.14476 eq. 10; dual clip 1912.09729).

    logp, old_logp, advantages, mask   [N]; mask is 1 on policy tokens
    seq_ids   [N] int: then the ratio is that of the whole sequence, normalised by its length (GSPO 2507.18071
              eq. 7), without dual clip
    returns   loss [N], 0 where mask is 0; and means over the policy tokens: clip_low, clip_high, dual (share
              of tokens whose gradient each bound took away) and kl_old (of old_logp - logp)

    Not summed here: see loss_weights. Nothing at a masked place, NaN included, changes anything. Raises
    ValueError for a dual clip of 1 or less.
    """
    if dual_clip and not dual_clip > 1:
        raise ValueError(
            f"dual_clip {dual_clip} is inside the range that the clip allows; take more than 1, or 0"
        )
    mask = mask.bool()
    # `where`, since NaN * 0 is NaN; the clamp, since exp(100) is inf and inf * 0 is NaN too
    log_ratio = torch.where(mask, logp - old_logp, 0.0).clamp(-20, 20)
    kl_old = -log_ratio.detach()
    if seq_ids is not None:  # ratio = exp(mean over the sequence of log_ratio); gradient: that of each token
        names, seq = torch.unique(seq_ids, return_inverse=True)
        values, zeros = log_ratio.detach(), log_ratio.new_zeros(len(names))
        mean = zeros.index_add(0, seq, values) / zeros.index_add(0, seq, mask.to(values))
        log_ratio = log_ratio - values + torch.where(mask, mean[seq], 0.0)
        dual_clip = None
    ratio = log_ratio.exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high))
    held = torch.zeros_like(mask)  # where the dual clip acts
    if dual_clip:
        held = (advantages < 0) & (ratio > dual_clip)
        loss = torch.where(held, -advantages * dual_clip, loss)
    n = mask.sum().clamp(min=1)
    stats = {
        "clip_low": ((advantages < 0) & (ratio < 1 - clip_low)).sum() / n,
        "clip_high": ((advantages > 0) & (ratio > 1 + clip_high)).sum() / n,
        "dual": held.sum() / n,
        "kl_old": kl_old.sum() / n,
    }
    return torch.where(mask, loss, 0.0), stats


def loss_weights(lengths: list[int], mean: str, longest: int) -> list[float]:
    """Weight of each token's loss, for each of B sequences: the sum of weight x loss is the mean asked for.

    lengths   [B] policy tokens of each sequence; longest: max_new_tokens
    token     1 / sum(lengths): each token weighs the same, long sequences more (DAPO 2503.14476 eq. 12)
    sequence  1 / (B length): each sequence weighs the same, tokens of long ones less (GRPO 2402.03300 eq. 3)
    constant  1 / (B longest): neither the batch's nor the sequence's length matters (Dr.GRPO 2503.20783)
    """
    b = max(len(lengths), 1)
    return {
        "token": [1 / max(sum(lengths), 1)] * len(lengths),
        "sequence": [1 / (b * max(n, 1)) for n in lengths],
        "constant": [1 / (b * longest)] * len(lengths),
    }[mean]


def kl_estimate(logp: Tensor, ref_logp: Tensor, estimator: str) -> Tensor:
    """An estimate of KL(pi || pi_ref) at each sampled token, d = log pi - log pi_ref [N] (Schulman 2020).

    k1 = d (unbiased, noisy), k2 = d^2 / 2 (biased, of least variance near 0), k3 = exp(-d) - 1 + d (unbiased,
    never negative; GRPO 2402.03300 eq. 4). The gradient of the mean is another matter: k2's is that of the KL
    itself, k3's that of KL(pi_ref || pi), and k1's own is 0 on average, so k1 is given k2's. k3 is cut at
    10, and has no gradient from there (d < -2.6): where pi has all but lost a token of pi_ref's, exp(-d)
    would drown every other token of the batch.
    """
    d = (logp - ref_logp).clamp(-20, 20)
    k2, k3 = d.square() / 2, torch.exp(-d) - 1 + d
    return {"k1": d.detach() + k2 - k2.detach(), "k2": k2, "k3": k3.clamp(max=10)}[estimator]
