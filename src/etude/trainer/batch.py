"""A micro-batch as tensors: what the decoder reads, and what the loss reads at the sampled positions.

Shapes: B rows, T input positions, L MoE layers, k experts a token, N sampled tokens, V vocabulary. Knows nothing of
losses; input position t of a row predicts the id at t + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from etude.records.errors import IntegrityError
from etude.trainer.packing import MicroBatchPlan
from etude.trainer.sequence import TrainSequence


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward. The N sampled tokens are ordered by sequence, row and position."""

    ids_BT: Tensor
    """int64, 0 where padded."""
    segments_BT: Tensor
    """int64: number of the segment within its row, -1 where padded."""
    routes_BTLk: Tensor | None
    """The sampler's experts, in the dtype recorded; 0 where not valid."""
    routes_valid_BT: Tensor
    """bool."""
    at_N: Tensor
    """int64 indices into B * T of the inputs that predict sampled tokens."""
    target_N: Tensor
    mu_N: Tensor
    """float64."""
    temperature_N: Tensor
    """float32."""
    advantage_N: Tensor
    """float64."""
    masks_NW: Tensor | None
    """uint8 packed bits of allowed ids, W = ceil(V / 8)."""
    chains: tuple[tuple[int, int], ...]
    """[start, end) within N of each rollout's tokens."""

    def allowed_NV(self, vocab_size: int) -> Tensor | None:
        """bool mask of allowed ids, or None when nothing was masked. Raises IntegrityError when the width is not V's."""
        if self.masks_NW is None:
            return None
        width = (vocab_size + 7) // 8
        if self.masks_NW.shape[1] != width:
            raise IntegrityError(f"token masks are {self.masks_NW.shape[1]} bytes wide; {vocab_size} ids need {width}")
        return torch.from_numpy(np.unpackbits(self.masks_NW.numpy(), axis=1, count=vocab_size).view(np.bool_))


def build_micro_batch(sequences: Sequence[TrainSequence], plan: MicroBatchPlan) -> MicroBatch:
    """Lays out the planned rows. `plan` holds indices into `sequences`."""
    rows = len(plan)
    width = max(sum(segment.length for segment in row) for row in plan)
    ids = np.zeros((rows, width), dtype=np.int64)
    segments = np.full((rows, width), -1, dtype=np.int64)
    valid = np.zeros((rows, width), dtype=np.bool_)
    routes = _empty_routes(sequences, plan, rows, width)
    parts = []
    for b, row in enumerate(plan):
        start = 0
        for number, segment in enumerate(row):
            source = sequences[segment.sequence].rows[segment.row]
            span = slice(start, start + segment.length)
            ids[b, span] = source.ids[:-1]
            segments[b, span] = number
            if routes is not None and source.routes is not None:
                routes[b, span] = source.routes
                valid[b, span] = source.routes_valid
            parts.append((segment.sequence, segment.row, b * width + start))
            start += segment.length
    parts.sort()
    at, target, mu, temperature, advantage = [], [], [], [], []
    chains: list[tuple[int, int, int]] = []
    count = 0
    for index, r, offset in parts:
        source = sequences[index].rows[r]
        positions = np.flatnonzero(source.sampled)
        at.append(offset + positions - 1)
        target.append(source.ids[positions])
        mu.append(source.mu[positions])
        temperature.append(source.temperature[positions])
        advantage.append(np.full(len(positions), sequences[index].advantage))
        if chains and chains[-1][0] == index:
            chains[-1] = (index, chains[-1][1], count + len(positions))
        else:
            chains.append((index, count, count + len(positions)))
        count += len(positions)
    return MicroBatch(
        ids_BT=torch.from_numpy(ids),
        segments_BT=torch.from_numpy(segments),
        routes_BTLk=None if routes is None else torch.from_numpy(routes),
        routes_valid_BT=torch.from_numpy(valid),
        at_N=torch.from_numpy(np.concatenate(at)),
        target_N=torch.from_numpy(np.concatenate(target)),
        mu_N=torch.from_numpy(np.concatenate(mu)),
        temperature_N=torch.from_numpy(np.concatenate(temperature)),
        advantage_N=torch.from_numpy(np.concatenate(advantage)),
        masks_NW=_masks(sequences, [(index, r) for index, r, _ in parts]),
        chains=tuple((start, end) for _, start, end in chains),
    )


def _empty_routes(
    sequences: Sequence[TrainSequence], plan: MicroBatchPlan, rows: int, width: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.unsignedinteger]] | None:
    shapes = {}
    for segment in (segment for row in plan for segment in row):
        routes = sequences[segment.sequence].rows[segment.row].routes
        if routes is not None:
            shapes[(routes.shape[1:], routes.dtype)] = sequences[segment.sequence].id
    if not shapes:
        return None
    if len(shapes) > 1:
        raise IntegrityError(f"rollouts of one batch have routes of different kinds: {shapes}")
    ((tail, dtype),) = shapes
    return np.zeros((rows, width, *tail), dtype=dtype)


def _masks(sequences: Sequence[TrainSequence], parts: Sequence[tuple[int, int]]) -> Tensor | None:
    found = [sequences[index].rows[r] for index, r in parts]
    widths = {row.masks.shape[1] for row in found if row.masks is not None}
    if not widths:
        return None
    if len(widths) > 1:
        raise IntegrityError(f"token masks of one batch have different widths {sorted(widths)}")
    width = widths.pop()
    filled = [
        np.full((int(row.sampled.sum()), width), 255, np.uint8) if row.masks is None else row.masks for row in found
    ]
    return torch.from_numpy(np.concatenate(filled))
