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
        self, logits_BV: Doubles, temperature_B: Doubles, uniform_B: Doubles, allowed_BV: Bools | None, rows: Sequence[SampleRow]
    ) -> tuple[Ints, Doubles]:
        """Token ids int64 [B] and their log-probabilities float64 [B]."""
        ...


def log_probs(logits_BV: Doubles, temperature_B: Doubles, allowed_BV: Bools | None) -> Doubles:
    """float64 [B, V] log-probabilities of the sampling distribution; -inf where masked. Temperature 0 counts as 1 here."""
    scale_B = np.where(temperature_B > 0, temperature_B, 1.0)
    scaled_BV = logits_BV / scale_B[:, None]
    if allowed_BV is not None:
        scaled_BV = np.where(allowed_BV, scaled_BV, -np.inf)
    scaled_BV -= scaled_BV.max(axis=1, keepdims=True)
    return scaled_BV - np.log(np.exp(scaled_BV).sum(axis=1, keepdims=True))


def draw(logp_BV: Doubles, uniform_B: Doubles) -> Ints:
    """Inverse CDF: the first id whose cumulative probability exceeds the uniform; int64 [B]."""
    cumulative_BV = np.exp(logp_BV).cumsum(axis=1)
    target_B = uniform_B * cumulative_BV[:, -1]
    # Clipped to the first id that reaches the total, so that rounding never picks an id of probability 0.
    last_B = (cumulative_BV < cumulative_BV[:, -1:]).sum(axis=1)
    return np.minimum((cumulative_BV <= target_B[:, None]).sum(axis=1), last_B).astype(np.int64)


class CategoricalSampler:
    """Seeded sampling; greedy (first of equals) at temperature 0."""

    def sample(
        self, logits_BV: Doubles, temperature_B: Doubles, uniform_B: Doubles, allowed_BV: Bools | None, rows: Sequence[SampleRow]
    ) -> tuple[Ints, Doubles]:
        """See `Sampler.sample`."""
        logp_BV = log_probs(logits_BV, temperature_B, allowed_BV)
        ids_B = draw(logp_BV, uniform_B)
        greedy_B = temperature_B <= 0
        if greedy_B.any():
            ids_B[greedy_B] = logp_BV[greedy_B].argmax(axis=1)
        return ids_B, logp_BV[np.arange(len(ids_B)), ids_B]


class ScriptedSampler:
    """Forces the ids that `script` names and draws where it gives None; log-probabilities stay the model's own.

    Raises BadInput when a forced id is outside the vocabulary or masked.
    """

    def __init__(self, script: Callable[[SampleRow], int | None]) -> None:
        self._script = script
        self._free = CategoricalSampler()

    def sample(
        self, logits_BV: Doubles, temperature_B: Doubles, uniform_B: Doubles, allowed_BV: Bools | None, rows: Sequence[SampleRow]
    ) -> tuple[Ints, Doubles]:
        """See `Sampler.sample`."""
        ids_B, logp_B = self._free.sample(logits_BV, temperature_B, uniform_B, allowed_BV, rows)
        logp_BV = log_probs(logits_BV, temperature_B, allowed_BV)
        for i, row in enumerate(rows):
            forced = self._script(row)
            if forced is None:
                continue
            if not 0 <= forced < logits_BV.shape[1] or not np.isfinite(logp_BV[i, forced]):
                raise BadInput(row.request_id, f"scripted token {row.index}", forced, "an id that the masks allow")
            ids_B[i], logp_B[i] = forced, logp_BV[i, forced]
        return ids_B, logp_B
