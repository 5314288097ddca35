"""Muon against the singular value decomposition; the split of parameters; the schedule."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from etude.model.decoder import Decoder
from etude.pretrain.optimizer import Muon, OptimizerPair, is_matrix, orthogonalize, schedule
from etude.pretrain.starter import starter_config

torch.set_num_threads(1)


@given(rows=st.integers(2, 24), columns=st.integers(2, 24), seed=st.integers(0, 1000))
def test_orthogonalize_keeps_singular_vectors_and_brings_values_near_one(rows: int, columns: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    rank = min(rows, columns)
    left = torch.linalg.qr(torch.randn(3, rows, rank, generator=random, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(3, columns, rank, generator=random, dtype=torch.float64)).Q
    values = torch.rand(3, rank, generator=random, dtype=torch.float64) * 0.9 + 0.1
    matrices = left * values[:, None] @ right.transpose(1, 2)
    inner = left.transpose(1, 2) @ orthogonalize(matrices) @ right
    diagonal = inner.diagonal(dim1=1, dim2=2)
    assert (inner - torch.diag_embed(diagonal)).abs().max() < 1e-8
    assert 0.6 < diagonal.min() and diagonal.max() < 1.3


def test_a_zero_gradient_moves_nothing() -> None:
    assert not orthogonalize(torch.zeros(2, 4, 6)).any()


def test_stacked_experts_are_orthogonalised_one_by_one() -> None:
    torch.manual_seed(0)
    stacked, grads = nn.Parameter(torch.zeros(3, 8, 5)), torch.randn(3, 8, 5)
    singles = [nn.Parameter(torch.zeros(4, 5)) for _ in range(6)]
    stacked.grad = grads.clone()
    for parameter, grad in zip(singles, grads.reshape(6, 4, 5), strict=True):
        parameter.grad = grad.clone()
    Muon([stacked], 0.1, stacked=[2]).step()
    Muon(singles, 0.1).step()
    torch.testing.assert_close(stacked.detach().reshape(6, 4, 5), torch.stack([p.detach() for p in singles]))


def test_embeddings_norms_and_routers_are_not_muons() -> None:
    decoder = Decoder(starter_config(512))
    adams = {name for name, parameter in decoder.named_parameters() if not is_matrix(name, parameter)}
    assert "embed_tokens.weight" in adams
    assert {name for name in adams if name.endswith("mlp.gate.weight")} == {
        f"layers.{layer}.mlp.gate.weight" for layer in range(1, 5)
    }
    assert not any("proj" in name for name in adams)
    pair = OptimizerPair(decoder, muon_lr=0.005, adam_lr=1e-3, adam_betas=(0.9, 0.95))
    shared = [len(o.param_groups[0]["params"]) for o in (pair.muon, pair.adam)]
    assert sum(shared) == len(list(decoder.parameters())) and shared[1] == len(adams)


@given(step=st.integers(0, 400))
def test_the_schedule_warms_up_stays_flat_and_falls_to_its_floor(step: int) -> None:
    scale = schedule(step, warmup=10, decay_start=100, decay_steps=50, floor=0.1)
    if step < 10:
        assert scale == pytest.approx((step + 1) / 10)
    elif step < 100:
        assert scale == 1.0
    elif step >= 149:
        assert scale == pytest.approx(0.1)
    else:
        assert 0.1 < scale < 1.0
