"""Which rows are computed together: micro-batches of one rank, and shares of ranks balanced by cost (SPEC T4).

A plan depends on the sequences alone (lengths and ids), never on the order in which they arrived. Knows lengths, not
tokens. A row of n ids is a segment of n - 1 inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from etude.records.errors import BadInput
from etude.trainer.sequence import TrainSequence


@dataclass(frozen=True)
class Segment:
    """Row `row` of sequence `sequence` (an index into the planned sequences); `length` inputs."""

    sequence: int
    row: int
    length: int


Row = tuple[Segment, ...]
"""Segments laid one after another in one row of a micro-batch."""
MicroBatchPlan = tuple[Row, ...]


@dataclass(frozen=True)
class CostModel:
    """Cost of a segment of length L: linear * L + quadratic * L^2 (attention)."""

    linear: float
    quadratic: float

    def segment(self, length: int) -> float:
        """Cost of one segment."""
        return self.linear * length + self.quadratic * length * length

    def sequence(self, sequence: TrainSequence) -> float:
        """Cost of all rows of a rollout."""
        return sum(self.segment(row.length - 1) for row in sequence.rows if row.length > 1)


def canonical_order(sequences: Sequence[TrainSequence]) -> tuple[TrainSequence, ...]:
    """By group and rollout id, so that nothing depends on arrival. Raises BadInput when an id occurs twice."""
    ordered = sorted(sequences, key=lambda sequence: (sequence.group_id, sequence.id))
    for before, after in pairwise(ordered):
        if (before.group_id, before.id) == (after.group_id, after.id):
            raise BadInput("batch", "rollout id", after.id, "each rollout once: a sampled token is trained on once")
    return tuple(ordered)


def balance(costs: Sequence[float], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Indices of each rank's share, longest first onto the least loaded rank; ties go to lower index and rank.

    The heaviest rank carries at most 4/3 of the optimum (Graham's bound).
    """
    if ranks < 1:
        raise BadInput("packing", "ranks", ranks, "at least 1")
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(ranks), key=lambda r: (loads[r], r))
        shares[rank].append(index)
        loads[rank] += costs[index]
    return tuple(tuple(sorted(share)) for share in shares)


def plan_micro_batches(
    sequences: Sequence[TrainSequence],
    token_budget: int,
    layout: Literal["padded", "packed"],
    *,
    whole_chains: bool,
) -> tuple[MicroBatchPlan, ...]:
    """Every row that holds a sampled token, once.

    `padded`: a row a segment, rows of similar length together, rows x longest <= budget. `packed`: first-fit-decreasing
    into rows of `token_budget`, one row a micro-batch. A segment longer than the budget stands alone. `whole_chains`
    keeps the rows of a rollout in one micro-batch (needed when a token answers for later rows).
    """
    units: list[Row] = []
    for index, sequence in enumerate(sequences):
        row_segments = [
            Segment(index, r, row.length - 1) for r, row in enumerate(sequence.rows) if bool(row.sampled.any())
        ]
        if whole_chains and row_segments:
            units.append(tuple(row_segments))
        else:
            units.extend((segment,) for segment in row_segments)
    units.sort(key=lambda unit: (-_longest(unit), unit[0].sequence, unit[0].row))
    return _padded(units, token_budget) if layout == "padded" else _packed(units, token_budget)


def padding_fraction(plan: Sequence[MicroBatchPlan]) -> float:
    """Share of token slots of a plan that hold no input."""
    slots = sum(len(batch) * max(_width(row) for row in batch) for batch in plan)
    inputs = sum(_width(row) for batch in plan for row in batch)
    return 1.0 - inputs / slots if slots else 0.0


def _padded(units: Sequence[Row], budget: int) -> tuple[MicroBatchPlan, ...]:
    batches: list[list[Row]] = []
    width = 0
    for unit in units:
        rows: list[Row] = [(segment,) for segment in unit]
        if batches and (len(batches[-1]) + len(rows)) * width <= budget:
            batches[-1].extend(rows)
        else:
            batches.append(rows)
            width = _longest(unit)  # units come longest first
    return tuple(tuple(batch) for batch in batches)


def _packed(units: Sequence[Row], budget: int) -> tuple[MicroBatchPlan, ...]:
    bins: list[list[Segment]] = []
    filled: list[int] = []
    for unit in units:
        length = _width(unit)
        place = next((i for i, used in enumerate(filled) if used + length <= budget), None)
        if place is None:
            bins.append(list(unit))
            filled.append(length)
        else:
            bins[place].extend(unit)
            filled[place] += length
    return tuple((tuple(segments),) for segments in bins)


def _longest(unit: Row) -> int:
    return max(segment.length for segment in unit)


def _width(row: Row) -> int:
    return sum(segment.length for segment in row)
