"""One optimiser step: what moves, what must not, and what the statistics say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from etude.model.decoder import Decoder, RouteReplay
from etude.records.errors import BadInput, Unsupported
from etude.trainer.sequence import TokenRow, TrainSequence
from etude.trainer.step import PolicyTrainer, StepRefused

Make = Callable[..., Any]


def _sampled_by(decoder: Decoder, sequences: tuple[TrainSequence, ...]) -> tuple[TrainSequence, ...]:
    """The same ids with log-probabilities and routes recorded from `decoder` itself, one rollout at a time."""
    found = []
    with torch.no_grad():
        for sequence in sequences:
            rows = []
            for row in sequence.rows:
                output = decoder(torch.from_numpy(row.ids[:-1])[None])
                logits = decoder.logits(output.hidden[0]) / torch.from_numpy(row.temperature[1:, None])
                mu = row.mu.copy()
                for taken, position in enumerate(np.flatnonzero(row.sampled)):
                    score = logits[position - 1].double()
                    if row.masks is not None:
                        allowed = np.unpackbits(row.masks[taken], count=len(score)).astype(bool)
                        score = score.masked_fill(~torch.from_numpy(allowed), -torch.inf)
                    mu[position] = float(torch.log_softmax(score, -1)[row.ids[position]])
                routes = output.routes[0].numpy()
                rows.append(replace(row, mu=mu, routes=routes, routes_valid=np.ones(len(routes), bool)))
            found.append(replace(sequence, rows=tuple(rows)))
    return tuple(found)


def _trainer(make_decoder: Make, make_config: Make, seed: int = 0, **changes: object) -> PolicyTrainer:
    return PolicyTrainer(make_decoder(seed), make_config(**changes))


def test_on_policy_ratio_is_one_at_any_temperature_and_kl_is_exactly_zero_at_step_zero(
    make_decoder: Make, make_sequences: Make, make_config: Make
) -> None:
    trainer = _trainer(make_decoder, make_config)
    sequences = _sampled_by(trainer.decoder, make_sequences())
    assert {float(t) for s in sequences for r in s.rows for t in r.temperature[r.sampled]} == {
        float(np.float32(0.6)),
        1.0,
    }
    stats = trainer.step([sequences])
    assert stats.kl == 0.0
    assert stats.importance_mean == pytest.approx(1.0, abs=1e-5)
    assert stats.logp_gap_max < 1e-5
    assert stats.replaced == stats.reference_replaced == 0.0
    assert stats.importance_clipped == 0.0
    assert stats.tokens == sum(s.sampled_tokens for s in sequences) and stats.sequences == 8
    again = trainer.step([sequences])
    assert again.kl is not None and again.kl != 0.0 and again.step == 2


def test_kl_is_measured_without_being_trained_on(make_decoder: Make, make_sequences: Make, make_config: Make) -> None:
    sequences = make_sequences()
    found = {}
    for measure in (True, False):
        config = make_config(kl_beta=0.0, measure_kl=measure)
        trainer = PolicyTrainer(make_decoder(0), config, reference=make_decoder(1))
        found[measure] = (trainer.step([sequences]), trainer.masters)
    assert found[True][0].kl is not None and found[False][0].kl is None
    assert all(torch.equal(found[True][1][name], found[False][1][name]) for name in found[True][1])


def test_the_reference_filters_routes_by_its_own_scores(
    make_decoder: Make, make_sequences: Make, make_config: Make
) -> None:
    config = make_config(plausibility_alpha=0.98)
    trainer = PolicyTrainer(make_decoder(0), config, reference=make_decoder(1))
    stats = trainer.step([_sampled_by(trainer.decoder, make_sequences())])
    assert stats.replaced == 0.0
    assert 0.0 < stats.reference_replaced < 1.0


def test_own_routes_replayed_give_bit_equal_logits_and_shifted_ones_do_not(make_decoder: Make) -> None:
    decoder = make_decoder()
    ids = torch.randint(0, 61, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = decoder(ids)
        everywhere = torch.ones(2, 20, dtype=torch.bool)
        replayed = decoder(ids, replay=RouteReplay(plain.routes, 1.0, everywhere))
        shifted = decoder(ids, replay=RouteReplay(plain.routes.roll(1, 1), 0.0, everywhere))
    assert torch.equal(plain.hidden, replayed.hidden) and int(replayed.replaced) == 0
    assert not torch.allclose(plain.hidden, shifted.hidden)


def test_packed_neighbours_do_not_change_a_rollouts_loss(
    make_decoder: Make, make_sequences: Make, make_config: Make, make_row: Make
) -> None:
    # NeMo-RL#2105, prime-rl#2392: packed samples attended to each other
    config = make_config(layout="packed", micro_batch_tokens=10_000)
    sequences = make_sequences()
    only = tuple(replace(s, advantage=s.advantage if i == 3 else 0.0) for i, s in enumerate(sequences))
    rng = np.random.default_rng(9)
    others = tuple(
        s if i == 3 else replace(s, rows=tuple(make_row(rng, row.length) for row in s.rows)) for i, s in enumerate(only)
    )
    losses = []
    for batch in (only, others):
        trainer = PolicyTrainer(make_decoder(dtype=torch.float64), config.model_copy(update={"kl_beta": 1e-30}))
        losses.append(trainer.compute_gradients(batch).sums["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


def test_a_tiny_learning_rate_moves_fp32_masters_that_bf16_would_not_show(
    make_decoder: Make, make_sequences: Make, make_config: Make
) -> None:
    # AReaL#1292, NeMo-RL#2322: updates of 1e-6 rounded away
    trainer = _trainer(make_decoder, make_config, learning_rate=1e-6, kl_beta=0.0)
    before = {name: master.clone() for name, master in trainer.masters.items()}
    live = {name: p.detach().clone() for name, p in trainer.decoder.named_parameters()}
    for _ in range(3):
        trainer.step([make_sequences()])
    moved = torch.cat([(trainer.masters[name] != before[name]).flatten() for name in before])
    shown = torch.cat([(p != live[name]).flatten() for name, p in trainer.decoder.named_parameters()])
    assert moved.float().mean() > 0.95
    assert 0.0 < shown.float().mean() < 0.2
    largest = max(float((trainer.masters[name] - before[name]).abs().max()) for name in before)
    assert largest < 3.5e-6


def test_live_and_published_weights_are_the_rounded_masters_and_router_biases_stay(
    make_decoder: Make, make_sequences: Make, make_config: Make
) -> None:
    trainer = _trainer(make_decoder, make_config)
    for name, buffer in trainer.decoder.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(len(buffer), generator=torch.Generator().manual_seed(1)))
    biases = {n: b.clone() for n, b in trainer.decoder.named_buffers() if n.endswith("e_score_correction_bias")}
    assert biases
    trainer.step([make_sequences()])
    for name, live in trainer.decoder.named_parameters():
        assert torch.equal(live, trainer.masters[name].bfloat16().float())
    state = trainer.published_state()
    for name, tensor in state.items():
        assert tensor.dtype == (torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16)
    assert torch.equal(state["model.embed_tokens.weight"], trainer.masters["embed_tokens.weight"].bfloat16())
    for name, bias in biases.items():
        assert torch.equal(dict(trainer.decoder.named_buffers())[name], bias)
        assert torch.equal(state[f"model.{name}"], bias)


def test_two_runs_end_bit_equal(make_decoder: Make, make_sequences: Make, make_config: Make) -> None:
    ends = []
    for _ in range(2):
        trainer = _trainer(make_decoder, make_config)
        stats = [trainer.step([make_sequences(seed)]) for seed in range(3)]
        ends.append((trainer.masters, [replace_seconds(s) for s in stats]))
    assert ends[0][1] == ends[1][1]
    assert all(torch.equal(ends[0][0][name], ends[1][0][name]) for name in ends[0][0])


def replace_seconds(stats: Any) -> Any:
    return type(stats)(**{f: 0.0 if f == "seconds" else getattr(stats, f) for f in stats.__struct_fields__})


def test_gradients_are_clipped_by_the_global_norm(make_decoder: Make, make_sequences: Make, make_config: Make) -> None:
    # Adam's first step does not depend on the scale; its moments do
    norms = {}
    for bound in (1e-3, 1e9):
        trainer = _trainer(make_decoder, make_config, max_grad_norm=bound)
        stats = trainer.step([make_sequences()])
        moments = torch.cat([t.flatten() for n, t in trainer.state().tensors.items() if n.startswith("adam.exp_avg/")])
        norms[bound] = float(moments.norm()) / (1 - trainer.config.beta1)
        assert stats.grad_norm > 1e-3
    assert norms[1e-3] == pytest.approx(1e-3, rel=1e-4)
    assert norms[1e9] == pytest.approx(stats.grad_norm, rel=1e-4)


def test_a_gradient_that_is_not_finite_is_refused_and_nothing_changes(
    make_decoder: Make, make_sequences: Make, make_config: Make
) -> None:
    trainer = _trainer(make_decoder, make_config)
    trainer.step([make_sequences()])
    before = trainer.state()
    good = make_sequences()
    bad = replace(good[0], advantage=float("inf"))
    with pytest.raises(StepRefused, match=r"trainer step 2: .* not finite"):
        trainer.step([(bad, *good[1:])])
    after = trainer.state()
    assert after.steps_done == 1
    assert all(torch.equal(before.tensors[name], after.tensors[name]) for name in before.tensors)
    assert trainer.step([good]).step == 2


def test_sequences_without_advantage_are_skipped_only_without_kl_and_change_no_gradient(
    make_decoder: Make, make_sequences: Make, make_config: Make
) -> None:
    sequences = tuple(replace(s, advantage=0.0) if i % 2 else s for i, s in enumerate(make_sequences()))
    trainer = PolicyTrainer(make_decoder(dtype=torch.float64), make_config(kl_beta=0.0))
    totals = trainer.compute_gradients(sequences)
    skipping = {n: p.grad.clone() for n, p in trainer.decoder.named_parameters() if p.grad is not None}
    assert totals.sums["skipped"] == 4 and totals.sums["computed_tokens"] < totals.sums["tokens"]
    assert totals.sums["tokens"] == sum(s.sampled_tokens for s in sequences)
    tiny = tuple(replace(s, advantage=1e-300) if s.advantage == 0.0 else s for s in sequences)
    computed = trainer.compute_gradients(tiny)
    assert computed.sums["skipped"] == 0
    for name, parameter in trainer.decoder.named_parameters():
        assert parameter.grad is not None
        assert float((parameter.grad - skipping[name]).norm() / skipping[name].norm()) < 1e-12
    with_kl = PolicyTrainer(make_decoder(), make_config())
    assert with_kl.compute_gradients(sequences).sums["skipped"] == 0


def test_overlong_and_malformed_rollouts_are_not_masked(
    make_decoder: Make, make_sequences: Make, make_config: Make
) -> None:
    # SPEC R3: every sampled token of every rollout counts, whatever ended it; the trainer cannot even see the reason
    totals = _trainer(make_decoder, make_config).compute_gradients(make_sequences())
    assert totals.sums["computed_tokens"] == sum(s.sampled_tokens for s in make_sequences())
    assert "stop_reason" not in TrainSequence.__dataclass_fields__ | TokenRow.__dataclass_fields__


def test_a_step_wants_whole_groups_in_the_number_that_the_denominator_counts_on(
    make_decoder: Make, make_sequences: Make, make_config: Make
) -> None:
    trainer = _trainer(make_decoder, make_config)
    with pytest.raises(BadInput, match="group size is 7"):
        trainer.step([make_sequences()[:7]])
    with pytest.raises(BadInput, match="groups is 2"):
        trainer.step([make_sequences(), make_sequences(1)])


def test_updating_router_biases_is_refused_by_name(make_decoder: Make, make_config: Make) -> None:
    with pytest.raises(Unsupported, match="freeze_router_bias"):
        PolicyTrainer(make_decoder(), make_config(freeze_router_bias=False))


def test_steps_raise_the_probability_of_what_was_rewarded(
    make_decoder: Make, make_sequences: Make, make_config: Make
) -> None:
    trainer = _trainer(make_decoder, make_config, kl_beta=0.0, learning_rate=1e-3)
    base = make_sequences()
    good = tuple(replace(s, advantage=1.0 if i < 4 else -1.0) for i, s in enumerate(base))

    def mean_logp() -> tuple[float, float]:
        with torch.no_grad():
            now = _sampled_by(trainer.decoder, good)
        means = [np.mean([row.mu[row.sampled].mean() for row in s.rows]) for s in now]
        return float(np.mean(means[:4])), float(np.mean(means[4:]))

    before = mean_logp()
    for _ in range(5):
        trainer.step([_sampled_by(trainer.decoder, good)])
    after = mean_logp()
    assert after[0] > before[0] + 0.05 and after[1] < before[1]
