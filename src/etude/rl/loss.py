"""The policy-gradient loss over sampled tokens, and the numbers that say how it fares (SPEC R1-R3, DESIGN decision 3).

Shapes: N sampled tokens of any number of rollouts, V vocabulary. Knows nothing of sequences, batches or ranks: the
denominator is a constant that the config fixes, so a sum over any split of the tokens is the same sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from etude.records.errors import BadInput


@dataclass(frozen=True)
class SampledLogprobs:
    """Log-probabilities of the taken tokens [N] (differentiable), entropies of their distributions [N] (detached)."""

    logp_N: Tensor
    entropy_N: Tensor


def sampled_logprobs(
    logits_NV: Tensor, ids_N: Tensor, temperature_N: Tensor, allowed_NV: Tensor | None = None
) -> SampledLogprobs:
    """Of the distribution that was sampled: logits / temperature, then the mask (bool, True = allowed), then softmax.

    A temperature of 0 means greedy sampling, whose log-probabilities are recorded at temperature 1. An id that its mask
    forbids gets -inf.
    """
    scale_N = torch.where(temperature_N > 0, temperature_N, torch.ones_like(temperature_N)).to(logits_NV.dtype)
    scaled_NV = logits_NV / scale_N[:, None]
    if allowed_NV is not None:
        scaled_NV = scaled_NV.masked_fill(~allowed_NV, float("-inf"))
    logp_NV = torch.log_softmax(scaled_NV, dim=-1)
    with torch.no_grad():
        p_NV = logp_NV.exp()
        entropy_N = -torch.where(p_NV > 0, p_NV * logp_NV, torch.zeros_like(p_NV)).sum(-1)
    return SampledLogprobs(logp_NV.gather(-1, ids_N[:, None])[:, 0], entropy_N)


def importance_weights(logp_N: Tensor, mu_N: Tensor, cap: float) -> Tensor:
    """min(pi / mu, cap) per token, detached; `mu_N` are the recorded log-probabilities of the sampling policy."""
    if not cap > 0:
        raise BadInput("loss", "importance_cap", cap, "a number > 0")
    return (logp_N.detach() - mu_N).exp().clamp(max=cap)


def policy_gradient_loss(logp_N: Tensor, weight_N: Tensor, advantage_N: Tensor, denominator: float) -> Tensor:
    """sum over tokens of -w A logp / denominator; gradient flows through logp only."""
    return -(weight_N.detach() * advantage_N.detach() * logp_N).sum() / denominator


@dataclass(frozen=True)
class WeightStatistics:
    """Of the importance weights of some tokens: sums and maxima, so that parts can be added up."""

    count: int
    total: float
    largest: float
    clipped: int
    """How many ratios pi / mu were over the cap."""


def weight_statistics(logp_N: Tensor, mu_N: Tensor, weight_N: Tensor, cap: float) -> WeightStatistics:
    """Sums over the tokens; `largest` is of the weights after the cap, 0 without tokens."""
    if weight_N.numel() == 0:
        return WeightStatistics(0, 0.0, 0.0, 0)
    ratio_N = (logp_N.detach() - mu_N).exp()
    return WeightStatistics(
        weight_N.numel(), float(weight_N.double().sum()), float(weight_N.max()), int((ratio_N > cap).sum())
    )
