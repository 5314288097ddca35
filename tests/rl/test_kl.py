"""KL estimators and horizons against closed forms, by exact enumeration: no sampling, float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from etude.records.errors import BadInput
from etude.rl.kl import KLHorizon, estimate, k1, kl_advantage, kl_loss
from etude.rl.loss import policy_gradient_loss

BETA = 0.7
CHOICES = 8


def _logits(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _gradient(loss: Tensor, *leaves: Tensor) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, leaves)])


def _kl(logp: Tensor, logp_ref: Tensor) -> Tensor:
    return (logp.exp() * (logp - logp_ref)).sum(-1)


class Softmax:
    """One decision among 8: every chain has one token."""

    def __init__(self, seed: int) -> None:
        self.theta = _logits(seed, CHOICES).requires_grad_()
        self.leaves = (self.theta,)
        self.reference = torch.log_softmax(_logits(seed + 1000, CHOICES), -1)

    def chains(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of each chain: log-probabilities [T], those of the reference [T], probability (detached)."""
        logp = torch.log_softmax(self.theta, -1)
        return [(logp[a : a + 1], self.reference[a : a + 1], logp[a].detach().exp()) for a in range(CHOICES)]

    def closed_form(self, horizon: KLHorizon) -> Tensor:
        return _gradient(BETA * _kl(torch.log_softmax(self.theta, -1), self.reference), *self.leaves)


class Tree:
    """Two decisions: the first (of 3) picks the state of the second (of 4): visited states depend on the policy."""

    def __init__(self, seed: int) -> None:
        self.root = _logits(seed, 3).requires_grad_()
        self.leaf = _logits(seed + 1, 3, 4).requires_grad_()
        self.leaves = (self.root, self.leaf)
        self.root_ref = torch.log_softmax(_logits(seed + 1000, 3), -1)
        self.leaf_ref = torch.log_softmax(_logits(seed + 1001, 3, 4), -1)

    def chains(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        root, leaf = torch.log_softmax(self.root, -1), torch.log_softmax(self.leaf, -1)
        found = []
        for a in range(3):
            for b in range(4):
                logp = torch.stack((root[a], leaf[a, b]))
                reference = torch.stack((self.root_ref[a], self.leaf_ref[a, b]))
                found.append((logp, reference, logp.detach().sum().exp()))
        return found

    def closed_form(self, horizon: KLHorizon) -> Tensor:
        root, leaf = torch.log_softmax(self.root, -1), torch.log_softmax(self.leaf, -1)
        visited = root.exp() if horizon == "sequence" else root.detach().exp()
        return _gradient(BETA * (_kl(root, self.root_ref) + (visited * _kl(leaf, self.leaf_ref)).sum()), *self.leaves)


def _expected_gradient(world: Softmax | Tree, horizon: KLHorizon) -> Tensor:
    loss = torch.zeros((), dtype=torch.float64)
    for logp, reference, probability in world.chains():
        advantage = kl_advantage(k1(logp, reference), torch.ones(len(logp), dtype=torch.bool), horizon, BETA)
        loss = loss + probability * policy_gradient_loss(logp, torch.ones_like(logp), advantage, 1.0)
    return _gradient(loss, *world.leaves)


def _k1_as_loss_gradient(world: Softmax | Tree) -> Tensor:
    loss = sum(probability * BETA * k1(logp, reference).sum() for logp, reference, probability in world.chains())
    assert isinstance(loss, Tensor)
    return _gradient(loss, *world.leaves)


@pytest.mark.parametrize("horizon", ["token", "sequence"])
@pytest.mark.parametrize("world", [Softmax(3), Tree(5)], ids=["softmax", "tree"])
def test_advantage_form_of_k1_has_exactly_the_closed_form_gradient(world: Softmax | Tree, horizon: KLHorizon) -> None:
    assert torch.allclose(_expected_gradient(world, horizon), world.closed_form(horizon), rtol=0, atol=1e-14)


@pytest.mark.parametrize("horizon", ["token", "sequence"])
@pytest.mark.parametrize("world", [Softmax(3), Tree(5)], ids=["softmax", "tree"])
def test_k1_as_loss_fails_both_closed_forms_because_its_expected_gradient_is_zero(
    world: Softmax | Tree, horizon: KLHorizon
) -> None:
    gradient = _k1_as_loss_gradient(world)
    assert gradient.norm() < 1e-14
    assert world.closed_form(horizon).norm() > 0.1


def test_horizons_agree_on_one_decision_and_differ_on_the_tree() -> None:
    one, tree = Softmax(3), Tree(5)
    assert torch.equal(_expected_gradient(one, "token"), _expected_gradient(one, "sequence"))
    difference = _expected_gradient(tree, "token") - _expected_gradient(tree, "sequence")
    assert difference.norm() > 0.05
    assert difference[3:].norm() < 1e-14  # they differ in the decision that picks the visited state


def test_k1_as_loss_is_refused_with_the_reason() -> None:
    zeros = torch.zeros(2)
    with pytest.raises(BadInput, match="expected gradient of exactly zero"):
        kl_loss("k1", zeros, zeros)


def test_k2_as_loss_is_right_on_policy_and_k3_is_not() -> None:
    world = Softmax(3)
    true = world.closed_form("token")
    found = {}
    for kind in ("k2", "k3"):
        loss = sum(p * BETA * kl_loss(kind, logp, ref).sum() for logp, ref, p in world.chains())
        assert isinstance(loss, Tensor)
        found[kind] = (_gradient(loss, world.theta) - true).norm()
    assert found["k2"] < 1e-14
    assert found["k3"] > 0.05


@given(st.integers(0, 10_000))
def test_k1_and_k3_have_the_kl_as_their_mean_and_k3_is_never_negative(seed: int) -> None:
    logp, reference = torch.log_softmax(_logits(seed, 8), -1), torch.log_softmax(_logits(seed + 1, 8), -1)
    true = _kl(logp, reference)
    for kind in ("k1", "k3"):
        assert torch.allclose((logp.exp() * estimate(kind, logp, reference)).sum(), true, atol=1e-12)
    assert (estimate("k3", logp, reference) >= 0).all()
    assert torch.equal(estimate("k2", logp, reference), 0.5 * k1(logp, reference) ** 2)


def test_sequence_horizon_sums_over_sampled_tokens_only() -> None:
    k = torch.tensor([1.0, 10.0, 100.0, 1000.0])
    sampled = torch.tensor([True, False, True, True])
    assert kl_advantage(k, sampled, "sequence", 1.0).tolist() == [-1101.0, 0.0, -1100.0, -1000.0]
    assert kl_advantage(k, sampled, "token", 2.0).tolist() == [-2.0, 0.0, -200.0, -2000.0]


def test_term_is_detached() -> None:
    k = torch.ones(3, requires_grad=True)
    for horizon in ("token", "sequence"):
        assert not kl_advantage(k, torch.ones(3, dtype=torch.bool), horizon, 0.1).requires_grad


def test_unknown_names_are_refused() -> None:
    zeros = torch.zeros(1)
    with pytest.raises(BadInput, match="k1, k2 or k3"):
        estimate("k4", zeros, zeros)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="token or sequence"):
        kl_advantage(zeros, zeros.bool(), "turn", 1.0)  # type: ignore[arg-type]
