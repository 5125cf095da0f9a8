"""A token drawn from logits, with random numbers that belong to a trajectory and not to its batch.

A generator of random numbers gives each row what its neighbours have left over: then a trajectory depends on
the batch. Here a number is a function of (seed, prompt, sample, position), so samples can be repeated whoever
shares the batch, and rows may come, go and be fed again. The token is that of the inverse distribution
function, and its log-prob that of the distribution really drawn from.

Left out: penalties, min-p, top-k per row. To copy into another project: this file; torch and numpy.
"""

import functools
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def mix(x):
    """splitmix64 (Steele et al. 2014): a bijection of 64-bit integers that scrambles every bit. x: uint64
    array or int."""
    with np.errstate(over="ignore"):
        x = np.uint64(x) if np.isscalar(x) else x
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def random_key(*parts: int) -> int:
    """A 64-bit key that belongs to (seed, prompt, sample, ...): in any order of work the same."""
    key = np.uint64(0)
    for part in parts:
        key = mix(int(key) ^ int(part) % 2**64)
    return int(key)


@functools.lru_cache(maxsize=2)
def shuffled(n: int, seed: int, epoch: int) -> list[int]:
    """0 to n-1 in the order of an epoch: of the seed alone, so a run that is continued sees the same."""
    generator = torch.Generator().manual_seed(seed * 1000 + epoch)
    return torch.randperm(n, generator=generator).tolist()


def uniforms(keys, positions) -> np.ndarray:
    """Uniform numbers in [0, 1) [B] float64, one for each (key, position); 52 bits: u * total < total."""
    keys, positions = np.asarray(keys, np.uint64), np.asarray(positions, np.uint64)
    return (mix(keys ^ mix(positions)) >> np.uint64(12)).astype(np.float64) * 2.0**-52


PART = 256  # tokens of the vocabulary that are summed together


def draw_tokens(
    logits: Tensor, uniform: Tensor, temperature=1.0, top_p: float = 1.0, top_k: int = 0
) -> tuple[Tensor, Tensor]:
    """(token [B] int64, logprob [B] float32) from logits [B, V] and uniform [B]; top_k 0 and top_p 1 are off.

    The log-prob is that of the distribution really sampled from: after temperature, top-k and top-p,
    renormalised. Temperature 0 takes the most likely token and reports its log-prob at temperature 1. A row
    of NaN or +inf logits gets the log-prob NaN, for `refuse_broken`: nothing here reads from the device,
    which a CUDA graph could not record.
    """
    logits = logits.float()
    z = logits - logits.amax(-1, keepdim=True)
    if temperature not in (0, 1):  # each pass over [B, V] counts
        z /= temperature
    if top_k and top_k < z.shape[1]:
        z = z.masked_fill(z < z.topk(top_k).values[:, -1:], -torch.inf)
    if top_p < 1:
        ranked, order = torch.softmax(z, -1).sort(dim=-1, descending=True, stable=True)
        drop = ranked.cumsum(-1) - ranked >= top_p  # the token that crosses top_p stays
        z = z.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), -torch.inf)
    # Two steps, as a cumulative sum over the vocabulary costs ten times its sum: a part, then a token in it.
    p = F.pad(z.exp(), (0, -z.shape[1] % PART)).view(len(z), -1, PART)  # [B, V/PART, PART]
    mass = p.sum(-1)  # [B, V/PART]
    cdf = mass.cumsum(-1, dtype=torch.float64)
    target = uniform.to(cdf)[:, None] * cdf[:, -1:]
    # [B, 1] the part that the target falls into, never one of mass 0; clamp: NaN falls into none
    part = torch.searchsorted(cdf, target, right=True).clamp_(max=mass.shape[1] - 1)
    mass = mass.gather(1, part)
    # [B, 1] how far into that part, from 0 to 1
    share = ((target - cdf.gather(1, part) + mass) / mass).clamp(0, 1 - 2.0**-52)
    inner = p[torch.arange(len(p), device=p.device), part[:, 0]].cumsum(-1, dtype=torch.float64)  # [B, PART]
    token = (part * PART + torch.searchsorted(inner, share * inner[:, -1:], right=True))[:, 0]
    token = token.clamp_(max=z.shape[1] - 1)
    if temperature == 0:
        token = logits.argmax(-1)
    logprob = z.gather(1, token[:, None])[:, 0] - cdf[:, -1].log().float()
    return token, logprob


def refuse_broken(logprobs: list[float]) -> None:
    """Raises FloatingPointError if one is not finite. Other samplers go on, and print token 0, "!!!!"."""
    if bad := sum(not math.isfinite(lp) for lp in logprobs):
        raise FloatingPointError(
            f"{bad} of {len(logprobs)} rows have NaN or inf logits: are the weights broken?"
        )
