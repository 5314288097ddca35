"""The policy-gradient loss and the distribution it takes log-probabilities of."""

from __future__ import annotations

import pytest
import torch

from etude.rl.loss import (
    importance_weights,
    policy_gradient_loss,
    sampled_logprobs,
    weight_statistics,
)


def _case(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, 11, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, 11, (6,), generator=generator)
    allowed = torch.rand(6, 11, generator=generator) < 0.4
    allowed[torch.arange(6), ids] = True
    return logits, ids, allowed


def test_masked_logprob_is_that_of_the_renormalised_distribution() -> None:
    logits, ids, allowed = _case()
    temperature = torch.full((6,), 0.6)
    got = sampled_logprobs(logits, ids, temperature, allowed)
    weights = (logits / torch.tensor(0.6).double()).exp() * allowed
    p = weights / weights.sum(-1, keepdim=True)
    assert torch.allclose(got.logp_N, p.gather(-1, ids[:, None])[:, 0].log(), atol=1e-12)
    entropy = torch.stack([-(row[row > 0] * row[row > 0].log()).sum() for row in p])
    assert torch.allclose(got.entropy_N, entropy, atol=1e-12)


def test_forbidden_tokens_get_no_gradient_and_none_is_nan() -> None:
    logits, ids, allowed = _case()
    logits.requires_grad_()
    sampled_logprobs(logits, ids, torch.ones(6), allowed).logp_N.sum().backward()
    assert logits.grad is not None and torch.isfinite(logits.grad).all()
    assert (logits.grad[~allowed] == 0).all()


def test_temperature_divides_logits_not_logprobs() -> None:
    logits, ids, _ = _case()
    got = sampled_logprobs(logits, ids, torch.full((6,), 0.5, dtype=torch.float64)).logp_N
    assert torch.allclose(got, torch.log_softmax(2 * logits, -1).gather(-1, ids[:, None])[:, 0])


def test_temperature_zero_is_recorded_at_one() -> None:
    logits, ids, _ = _case()
    at_zero = sampled_logprobs(logits, ids, torch.zeros(6)).logp_N
    assert torch.equal(at_zero, sampled_logprobs(logits, ids, torch.ones(6)).logp_N)


def test_gradient_is_minus_advantage_over_the_constant_with_weight_detached_and_capped() -> None:
    logp = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    mu = torch.tensor([-1.0, -4.0, -0.4], dtype=torch.float64)
    weight = importance_weights(logp, mu, cap=2.0)
    assert not weight.requires_grad
    advantage = torch.tensor([0.5, -0.25, 1.0], dtype=torch.float64)
    policy_gradient_loss(logp, weight, advantage, 10.0).backward()
    expected_weight = torch.tensor([1.0, 2.0, torch.tensor(-0.1, dtype=torch.float64).exp()], dtype=torch.float64)
    assert logp.grad is not None
    assert torch.allclose(logp.grad, -expected_weight * advantage / 10.0, atol=1e-15)


def test_statistics_count_what_was_clipped() -> None:
    logp, mu = torch.tensor([0.0, 3.0, -1.0]), torch.tensor([0.0, 0.0, 0.0])
    weight = importance_weights(logp, mu, cap=5.0)
    got = weight_statistics(logp, mu, weight, cap=5.0)
    assert (got.count, got.clipped, got.largest) == (3, 1, 5.0)
    assert got.total == pytest.approx(1 + 5 + 0.36787944)
