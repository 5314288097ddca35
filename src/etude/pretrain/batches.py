"""Batches of similar length from a stream of episodes, as a pure function of (maker, seed, cursor).

Episodes are drawn a pool at a time, sorted by length, cut into batches of about `batch_tokens` (padding included) and shuffled, so
rows need little padding and no attention mask: right padding is never seen by a causal row. `Cursor` is all that a resumed
run needs. Knows nothing of optimisation.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from etude.records.errors import BadInput


@dataclass(frozen=True)
class Cursor:
    """Where the data stream stands: the pool, and the batches of it already used."""

    pool: int = 0
    batch: int = 0


@dataclass
class Episode:
    """`weights[i]` is the loss weight of predicting `ids[i]`; `edit[i]` marks tokens of a right edit, for the report."""

    domain: str
    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    edit: list[bool] = field(default_factory=list)

    def add(self, ids: Sequence[int], weight: float | Sequence[float], *, edit: bool = False) -> None:
        self.ids.extend(ids)
        self.weights.extend([weight] * len(ids) if isinstance(weight, float) else weight)
        self.edit.extend([edit] * len(ids))


class PoolSource(Protocol):
    """Episodes by pool number."""

    def pool(self, number: int) -> list[Episode]:
        """The episodes of one pool; a pure function of the number."""
        ...


@dataclass(frozen=True)
class Batch:
    """Right-padded rows. `weights_BT[b, t]` is the loss weight of predicting `ids_BT[b, t]` (0 at t = 0 and on padding)."""

    ids_BT: npt.NDArray[np.int64]
    weights_BT: npt.NDArray[np.float32]
    edit_BT: npt.NDArray[np.bool_]
    domains: tuple[str, ...]
    tokens: int
    """Tokens without padding."""


def pad(episodes: Sequence[Episode], pad_id: int) -> Batch:
    """Puts episodes into one batch, as wide as the longest."""
    rows, width = len(episodes), max(len(episode.ids) for episode in episodes)
    ids = np.full((rows, width), pad_id, np.int64)
    weights, edit = np.zeros((rows, width), np.float32), np.zeros((rows, width), np.bool_)
    for row, episode in enumerate(episodes):
        length = len(episode.ids)
        ids[row, :length], weights[row, :length], edit[row, :length] = episode.ids, episode.weights, episode.edit
    weights[:, 0] = 0.0
    return Batch(ids, weights, edit, tuple(e.domain for e in episodes), sum(len(e.ids) for e in episodes))


def bucket(episodes: Sequence[Episode], batch_tokens: int) -> list[list[Episode]]:
    """Cuts episodes, longest first, into batches whose padded size stays within `batch_tokens` (one long row may exceed it)."""
    batches: list[list[Episode]] = []
    width = 0
    for episode in sorted(episodes, key=lambda episode: -len(episode.ids)):
        if not batches or (len(batches[-1]) + 1) * width > batch_tokens:
            batches.append([])
            width = len(episode.ids)
        batches[-1].append(episode)
    return batches


class Stream:
    """Endless batches. `source(pool)` gives the pool's episodes; the same cursor always gives the same batch."""

    def __init__(self, source: PoolSource, *, seed: int, batch_tokens: int, pad_id: int, cursor: Cursor) -> None:
        self._source, self._seed, self._batch_tokens, self._pad_id = source, seed, batch_tokens, pad_id
        self.cursor = cursor
        self._pool: list[list[Episode]] | None = None

    def next(self) -> Batch:
        """The batch at the cursor; moves the cursor on."""
        if self._pool is None:
            self._pool = self._load()
            if self.cursor.batch >= len(self._pool):  # the mix has changed since the cursor was saved
                self.cursor = Cursor(self.cursor.pool + 1)
                self._pool = self._load()
        batch = pad(self._pool[self.cursor.batch], self._pad_id)
        self.cursor = Cursor(self.cursor.pool, self.cursor.batch + 1)
        if self.cursor.batch == len(self._pool):
            self.cursor, self._pool = Cursor(self.cursor.pool + 1), None
        return batch

    def _load(self) -> list[list[Episode]]:
        pool = bucket(self._source.pool(self.cursor.pool), self._batch_tokens)
        if not pool:
            raise BadInput("training data", "episodes", 0, "at least one episode in a pool")
        random.Random(f"{self._seed}/batches/{self.cursor.pool}").shuffle(pool)
        return pool

    def refresh(self) -> None:
        """Leaves the rest of the current pool: the next batch comes from the next one (the mix of episodes has changed)."""
        if self.cursor.batch:
            self.cursor, self._pool = Cursor(self.cursor.pool + 1), None


def batches_of(episodes: Sequence[Episode], batch_tokens: int, pad_id: int) -> Iterator[Batch]:
    """Fixed batches for evaluation, longest first."""
    for members in bucket(episodes, batch_tokens):
        yield pad(members, pad_id)
