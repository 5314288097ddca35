"""Plans of micro-batches and shares of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.records.errors import BadInput
from etude.trainer.batch import build_micro_batch
from etude.trainer.packing import CostModel, balance, canonical_order, padding_fraction, plan_micro_batches
from etude.trainer.sequence import TokenRow, TrainSequence

Make = Callable[..., tuple[TrainSequence, ...]]
lengths = st.lists(st.lists(st.integers(2, 50), min_size=1, max_size=3), min_size=1, max_size=10)


def _sequence(name: str, row_lengths: list[int]) -> TrainSequence:
    rows = tuple(
        TokenRow(
            ids=np.arange(n),
            sampled=np.arange(n) == n - 1,
            mu=np.zeros(n),
            versions=np.zeros(n, np.uint32),
            temperature=np.ones(n, np.float32),
            routes=None,
            routes_valid=np.zeros(n - 1, bool),
            masks=None,
        )
        for n in row_lengths
    )
    return TrainSequence(name, "g", rows, 1.0)


@given(lengths, st.integers(1, 200), st.sampled_from(["padded", "packed"]), st.booleans())
def test_every_row_is_planned_once_within_the_budget(
    shape: list[list[int]], budget: int, layout: Literal["padded", "packed"], whole: bool
) -> None:
    sequences = [_sequence(f"r{i}", rows) for i, rows in enumerate(shape)]
    plan = plan_micro_batches(sequences, budget, layout, whole_chains=whole)
    seen = Counter((s.sequence, s.row) for batch in plan for row in batch for s in row)
    assert seen == Counter((i, r) for i, rows in enumerate(shape) for r in range(len(rows)))
    for batch in plan:
        width = max(sum(s.length for s in row) for row in batch)
        alone = len({s.sequence for row in batch for s in row}) == 1 if whole else sum(map(len, batch)) == 1
        assert len(batch) * width <= budget or alone
    if whole:
        homes = {(s.sequence, b) for b, batch in enumerate(plan) for row in batch for s in row}
        assert len(homes) == len(sequences)
    assert 0.0 <= padding_fraction(plan) < 1.0


def test_rows_without_a_sampled_token_are_not_computed() -> None:
    sequence = _sequence("r", [5, 9])
    sequence.rows[0].sampled[:] = False
    plan = plan_micro_batches([sequence], 100, "padded", whole_chains=False)
    assert [(s.row, s.length) for batch in plan for row in batch for s in row] == [(1, 8)]


def test_order_of_arrival_does_not_matter_and_a_rollout_comes_once(make_sequences: Make) -> None:
    sequences = make_sequences()
    assert canonical_order(sequences[::-1]) == canonical_order(sequences)
    with pytest.raises(BadInput, match="each rollout once"):
        canonical_order((*sequences, sequences[0]))


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=40), st.integers(1, 6))
def test_shares_are_a_partition_balanced_within_grahams_bound(costs: list[float], ranks: int) -> None:
    shares = balance(costs, ranks)
    assert sorted(i for share in shares for i in share) == list(range(len(costs)))
    loads = [sum(costs[i] for i in share) for share in shares]
    assert max(loads) <= sum(costs) / ranks + max(costs) + 1e-9


def test_cost_counts_attention_so_one_long_weighs_more_than_many_short() -> None:
    cost = CostModel(linear=10.0, quadratic=1.0)
    long, short = _sequence("a", [101]), _sequence("b", [11])
    assert cost.sequence(long) == 10 * 100 + 100**2
    assert cost.sequence(long) > 10 * cost.sequence(short)


def test_a_batch_predicts_each_sampled_id_from_the_input_before_it(make_sequences: Make) -> None:
    sequences = make_sequences()
    for layout in ("padded", "packed"):
        taken: list[tuple[int, ...]] = []
        for plan in plan_micro_batches(sequences, 90, layout, whole_chains=True):
            batch = build_micro_batch(sequences, plan)
            assert bool((batch.segments_BT.flatten()[batch.at_N] >= 0).all())
            allowed = batch.allowed_NV(61)
            assert allowed is None or bool(allowed.gather(1, batch.target_N[:, None]).all())
            for start, end in batch.chains:
                taken.append(tuple(batch.target_N[start:end].tolist()))
        want = [tuple(int(i) for row in s.rows for i in row.ids[row.sampled]) for s in sequences]
        assert sorted(taken) == sorted(want)
