"""KL to a reference policy: the estimators k1, k2, k3 and the per-token advantage term (report section 4.1; SPEC R5).

Shapes: T sampled or other positions of one chain, in order; `logp` and `logp_ref` are log-probabilities of the taken
tokens under the policy q and the reference p, r = p / q. DESIGN decision 2 says why k1 is never a loss.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from etude.records.errors import BadInput
from etude.rl.config import KLHorizon

Estimator = Literal["k1", "k2", "k3"]

K1_AS_LOSS = (
    "k2 or k3 as a loss, or k1 as an advantage term (kl_advantage): differentiated as a loss on on-policy samples, k1 "
    "has an expected gradient of exactly zero, E[grad log q] = 0, and regularises nothing"
)


def k1(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """-log r: unbiased, its variance grows with the distance; may be negative."""
    return logp - logp_ref


def k2(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """(log r)^2 / 2: biased as a value, right as a gradient on-policy."""
    return 0.5 * (logp_ref - logp).square()


def k3(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """(r - 1) - log r: unbiased and never negative as a value, biased as a gradient, unbounded variance when far."""
    log_r = logp_ref - logp
    return torch.expm1(log_r) - log_r


def estimate(kind: Estimator, logp: Tensor, logp_ref: Tensor) -> Tensor:
    """Value of the named estimator, elementwise. Raises BadInput for another name."""
    if kind == "k1":
        return k1(logp, logp_ref)
    if kind == "k2":
        return k2(logp, logp_ref)
    if kind == "k3":
        return k3(logp, logp_ref)
    raise BadInput("kl", "estimator", kind, "k1, k2 or k3")


def kl_loss(kind: Estimator, logp: Tensor, logp_ref: Tensor) -> Tensor:
    """Differentiable loss per token, for the study of figure 4; the reference is detached. Refuses k1."""
    if kind == "k1":
        raise BadInput("kl", "loss estimator", kind, K1_AS_LOSS)
    return estimate(kind, logp, logp_ref.detach())


def kl_advantage(k_T: Tensor, sampled_T: Tensor, horizon: KLHorizon, beta: float) -> Tensor:
    """Term to add to the advantage of each token of one chain, detached; 0 where `sampled_T` (bool) is False.

    `token`: -beta k_t, the gradient of the per-token KL at the visited states, their distribution held fixed.
    `sequence`: -beta sum_{t' >= t} k_t' over the sampled tokens, the gradient of KL(policy || reference) over chains.
    Leading dimensions are independent chains. Raises BadInput for another horizon or for shapes that differ.
    """
    if k_T.shape != sampled_T.shape:
        raise BadInput("kl", "sampled shape", tuple(sampled_T.shape), f"the shape of k, {tuple(k_T.shape)}")
    kept_T = torch.where(sampled_T, k_T.detach(), torch.zeros_like(k_T))
    if horizon == "token":
        return -beta * kept_T
    if horizon == "sequence":
        to_go_T = kept_T.flip(-1).cumsum(-1).flip(-1)
        return -beta * torch.where(sampled_T, to_go_T, torch.zeros_like(k_T))
    raise BadInput("kl", "kl_horizon", horizon, "token or sequence")
