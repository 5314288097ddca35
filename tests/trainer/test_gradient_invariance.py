"""The gradient of the full loss does not depend on micro-batches, packing or ranks (issue item 5), and is the right one.

Faults of this kind: prime-rl#2358, SkyRL#1296, AReaL#1273 (per-rank and per-micro-batch means).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from etude.model.decoder import Decoder, RouteReplay
from etude.trainer.config import TrainerConfig
from etude.trainer.sequence import TrainSequence
from etude.trainer.step import PolicyTrainer, StepSums

Gradients = dict[str, Tensor]
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5}
Make = Callable[..., object]


def _gradients(trainer: PolicyTrainer, sequences: tuple[TrainSequence, ...]) -> tuple[Gradients, StepSums]:
    totals = trainer.compute_gradients(sequences)
    found = {}
    for name, parameter in trainer.decoder.named_parameters():
        assert parameter.grad is not None
        found[name] = parameter.grad.clone()
    return found, totals


def _assert_close(got: Gradients, want: Gradients, bound: float) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert want[name].norm() > 0, name
        error = float((got[name].double() - want[name].double()).norm() / want[name].double().norm())
        assert error <= bound, f"{name}: relative error {error:.2e}"


def _plain_gradient(
    decoder: Decoder, reference: Decoder, config: TrainerConfig, sequences: tuple[TrainSequence, ...]
) -> Gradients:
    """The loss as the report writes it, one row at a time, nothing shared with the trainer but the decoder."""
    decoder.zero_grad()
    for sequence in sequences:
        logps, refs, mus = [], [], []
        for row in sequence.rows:
            for model, into in ((decoder, logps), (reference, refs)):
                assert row.routes is not None
                replay = RouteReplay(
                    torch.from_numpy(row.routes)[None],
                    config.plausibility_alpha,
                    torch.from_numpy(row.routes_valid)[None],
                )
                logits = model.logits(model(torch.from_numpy(row.ids[:-1])[None], replay=replay).hidden[0])
                logits = logits / torch.from_numpy(row.temperature[1:, None]).to(logits.dtype)
                taken = 0
                for position in np.flatnonzero(row.sampled):
                    weights = logits[position - 1].exp()
                    if row.masks is not None:
                        allowed = np.unpackbits(row.masks[taken], count=len(weights)).astype(bool)
                        weights = weights * torch.from_numpy(allowed)
                    into.append((weights[row.ids[position]] / weights.sum()).log())
                    taken += 1
            mus.extend(row.mu[row.sampled])
        logp, ref = torch.stack(logps), torch.stack(refs).detach()
        k = (logp - ref).detach()
        if config.kl_horizon == "sequence":
            k = torch.stack([k[t:].sum() for t in range(len(k))])
        advantage = sequence.advantage - config.kl_beta * k
        ratio = (logp.detach() - torch.tensor(mus, dtype=logp.dtype)).exp()
        loss = -(ratio.clamp(max=config.importance_cap) * advantage * logp).sum() / (1 * 8 * 16.0)
        loss.backward()
    return {name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("horizon", ["token", "sequence"])
def test_gradient_is_that_of_the_loss_written_out(
    horizon: str, make_decoder: Make, make_sequences: Make, make_config: Make
) -> None:
    config = make_config(kl_horizon=horizon)
    trainer = PolicyTrainer(make_decoder(dtype=torch.float64), config, reference=make_decoder(1, torch.float64))
    got, _ = _gradients(trainer, make_sequences())
    reference = make_decoder(1, torch.float64)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(parameter.bfloat16())
    _assert_close(got, _plain_gradient(trainer.decoder, reference, config, make_sequences()), 1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("horizon", ["token", "sequence"])
def test_gradient_is_the_same_for_any_micro_batches_and_packing(
    horizon: str, dtype: torch.dtype, make_decoder: Make, make_sequences: Make, make_config: Make
) -> None:
    sequences = make_sequences()
    whole: tuple[Gradients, StepSums] | None = None
    counts = set()
    for layout in ("padded", "packed"):
        for budget in (100_000, 128, 60, 1):
            config = make_config(kl_horizon=horizon, layout=layout, micro_batch_tokens=budget)
            trainer = PolicyTrainer(make_decoder(dtype=dtype), config, reference=make_decoder(1, dtype))
            found = _gradients(trainer, sequences)
            counts.add(int(found[1].sums["micro_batches"]))
            if whole is None:
                whole = found
            _assert_close(found[0], whole[0], BOUNDS[dtype])
            for name in ("loss", "kl", "entropy", "weight", "gap", "tokens", "clipped", "replaced", "considered"):
                assert found[1].sums[name] == pytest.approx(whole[1].sums[name], rel=1e-4), name
    assert {1, 10 if horizon == "token" else 8} <= counts and len(counts) > 3


def test_gradient_of_parts_adds_up_to_that_of_the_whole(
    make_decoder: Make, make_sequences: Make, make_config: Make
) -> None:
    sequences = make_sequences()
    trainer = PolicyTrainer(make_decoder(dtype=torch.float64), make_config(), reference=make_decoder(1, torch.float64))
    whole, _ = _gradients(trainer, sequences)
    parts = [_gradients(trainer, part)[0] for part in (sequences[:1], sequences[1:3], sequences[3:])]
    _assert_close({name: sum(part[name] for part in parts) for name in whole}, whole, 1e-10)


def test_order_of_arrival_changes_no_bit(make_decoder: Make, make_sequences: Make, make_config: Make) -> None:
    trainer = PolicyTrainer(make_decoder(), make_config(), reference=make_decoder(1))
    forward, _ = _gradients(trainer, make_sequences())
    backward, _ = _gradients(trainer, make_sequences()[::-1])
    assert all(torch.equal(forward[name], backward[name]) for name in forward)


def test_gradient_is_the_same_on_one_and_two_ranks(
    tmp_path: Path, make_decoder: Make, make_sequences: Make, make_config: Make
) -> None:
    output = tmp_path / "out"
    command = [sys.executable, str(Path(__file__).with_name("rank_worker.py"))]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2", str(tmp_path / "meet"), str(output)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=90)
            assert rank.returncode == 0, errors[-2000:]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    zero, one = (torch.load(f"{output}.{rank}") for rank in range(2))
    for dtype, bound in BOUNDS.items():
        for horizon in ("token", "sequence"):
            trainer = PolicyTrainer(
                make_decoder(dtype=dtype), make_config(kl_horizon=horizon), reference=make_decoder(1, dtype)
            )
            want, totals = _gradients(trainer, make_sequences())
            for found in (zero, one):
                got = found[f"{dtype}/{horizon}"]
                _assert_close(got["gradients"], want, bound)
                assert got["sums"]["tokens"] == totals.sums["tokens"]
                assert got["sums"]["loss"] == pytest.approx(totals.sums["loss"], rel=1e-4)
                assert got["maxima"]["gap"] == pytest.approx(totals.maxima["gap"], rel=1e-4)
    for name, master in zero["step"]["masters"].items():
        assert torch.equal(master, one["step"]["masters"][name]), name
    alone = PolicyTrainer(make_decoder(), make_config(), reference=make_decoder(1)).step([make_sequences()])
    assert zero["step"]["grad_norm"] == pytest.approx(alone.grad_norm, rel=1e-5)
    assert zero["step"]["tokens"] == alone.tokens == sum(s.sampled_tokens for s in make_sequences())
