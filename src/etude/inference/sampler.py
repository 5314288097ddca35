"""Drawing tokens for a batch of rows at once: temperature, mask, inverse CDF in float64.

The uniform of sampled token i is word i of the Philox stream keyed by the request's seed, so a draw depends on (seed, i)
and the row's own logits only, never on the batch. The returned log-probability is that of the distribution drawn from
(at temperature 0: of the masked distribution at temperature 1). Knows nothing of models, sessions or grammars.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from etude.records.errors import BadInput

Bools = npt.NDArray[np.bool_]
Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_SEED_BITS = 128


def uniforms(seed: int, count: int) -> Doubles:
    """float64 [count] in [0, 1): word i of the Philox stream of `seed`; a longer call has the shorter one as its prefix."""
    words = np.random.Philox(key=seed % (1 << _SEED_BITS)).random_raw(count)
    return (np.asarray(words, dtype=np.uint64) >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What a sampler may know of one row of the batch."""

    request_id: str
    session_id: str
    turn: int
    """Number of this generation within its session, from 0."""
    index: int
    """Number of the token to draw within its generation, from 0."""
    session_ids: Sequence[int]
    """All ids of the session so far; a live list, to read only."""


class Sampler(Protocol):
    """A strategy that picks the next token of each row."""

    def sample(
        self,
        logits_BV: Doubles,
        temperature_B: Doubles,
        uniform_B: Doubles,
        allowed_BV: Bools | None,
        rows: Sequence[SampleRow],
    ) -> tuple[Ints, Doubles]:
        """Token ids int64 [B] and their log-probabilities float64 [B]."""
        ...


def scaled_logits(logits_BV: Doubles, temperature_B: Doubles, allowed_BV: Bools | None) -> Doubles:
    """float64 [B, V]: logits over temperature (0 counts as 1 here), -inf where masked, the largest of a row at 0."""
    scale_B = np.where(temperature_B > 0, temperature_B, 1.0)
    scaled_BV = logits_BV / scale_B[:, None]
    if allowed_BV is not None:
        scaled_BV[~allowed_BV] = -np.inf
    scaled_BV -= scaled_BV.max(axis=1, keepdims=True)
    return scaled_BV


def draw(cumulative_BV: Doubles, uniform_B: Doubles) -> Ints:
    """Inverse CDF: the first id whose cumulative weight exceeds uniform * total; int64 [B]."""
    ids_B = np.empty(len(uniform_B), dtype=np.int64)
    for i, (cumulative_V, uniform) in enumerate(zip(cumulative_BV, uniform_B)):
        total = cumulative_V[-1]
        # Clipped to the first id that reaches the total, so that rounding never picks an id of probability 0.
        ids_B[i] = min(cumulative_V.searchsorted(uniform * total, "right"), cumulative_V.searchsorted(total))
    return ids_B


class CategoricalSampler:
    """Seeded sampling; greedy (first of equals) at temperature 0."""

    def sample(
        self,
        logits_BV: Doubles,
        temperature_B: Doubles,
        uniform_B: Doubles,
        allowed_BV: Bools | None,
        rows: Sequence[SampleRow],
    ) -> tuple[Ints, Doubles]:
        """See `Sampler.sample`."""
        scaled_BV = scaled_logits(logits_BV, temperature_B, allowed_BV)
        cumulative_BV = np.exp(scaled_BV).cumsum(axis=1)
        ids_B = draw(cumulative_BV, uniform_B)
        greedy_B = temperature_B <= 0
        if greedy_B.any():
            ids_B[greedy_B] = scaled_BV[greedy_B].argmax(axis=1)
        return ids_B, scaled_BV[np.arange(len(ids_B)), ids_B] - np.log(cumulative_BV[:, -1])


class ScriptedSampler:
    """Forces the ids that `script` names and draws where it gives None; log-probabilities stay the model's own.

    Raises BadInput when a forced id is outside the vocabulary or masked.
    """

    def __init__(self, script: Callable[[SampleRow], int | None]) -> None:
        self._script = script
        self._free = CategoricalSampler()

    def sample(
        self,
        logits_BV: Doubles,
        temperature_B: Doubles,
        uniform_B: Doubles,
        allowed_BV: Bools | None,
        rows: Sequence[SampleRow],
    ) -> tuple[Ints, Doubles]:
        """See `Sampler.sample`."""
        ids_B, logp_B = self._free.sample(logits_BV, temperature_B, uniform_B, allowed_BV, rows)
        scaled_BV = scaled_logits(logits_BV, temperature_B, allowed_BV)
        for i, row in enumerate(rows):
            forced = self._script(row)
            if forced is None:
                continue
            if not 0 <= forced < logits_BV.shape[1] or scaled_BV[i, forced] == -np.inf:
                raise BadInput(row.request_id, f"scripted token {row.index}", forced, "an id that the masks allow")
            ids_B[i], logp_B[i] = forced, scaled_BV[i, forced] - np.log(np.exp(scaled_BV[i]).sum())
        return ids_B, logp_B
