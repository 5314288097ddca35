"""Which prompt is drawn next: uniform, single epoch (SPEC R1). The seam for over-sampling hard prompts (SPEC R9).

Knows prompt ids only. The ledger is the truth about what was drawn and trained; this is its order.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Collection, Iterable
from typing import Protocol

from etude.records.errors import BadInput, IntegrityError


class Curriculum(Protocol):
    """Draws prompt ids; a prompt comes again only after it was given back."""

    def draw(self) -> str | None:
        """The next prompt id, or None when all are out."""
        ...

    def give_back(self, prompt_id: str) -> None:
        """Returns the prompt of a void group; it comes again after those never drawn."""
        ...

    @property
    def remaining(self) -> int:
        """Prompts that can still be drawn."""
        ...


def epoch_order(prompt_ids: Collection[str], seed: int) -> tuple[str, ...]:
    """All ids, each once, in an order that depends on the seed and the set alone (each id's place by its hash).

    Raises BadInput when an id occurs twice.
    """
    if len(set(prompt_ids)) != len(prompt_ids):
        raise BadInput("curriculum", "prompt_ids", len(prompt_ids), "ids that each occur once")
    return tuple(sorted(prompt_ids, key=lambda prompt_id: (_place(prompt_id, seed), prompt_id)))


class UniformEpoch:
    """Every prompt equally likely at every place, each drawn once. `drawn` are ids already out, when a run resumes."""

    def __init__(self, prompt_ids: Collection[str], seed: int, drawn: Iterable[str] = ()) -> None:
        order = epoch_order(prompt_ids, seed)
        self._known = frozenset(order)
        self._out = set(drawn)
        unknown = self._out - self._known
        if unknown:
            raise BadInput("curriculum", "drawn", sorted(unknown)[0], "a prompt id of this task set")
        self._queue = deque(prompt_id for prompt_id in order if prompt_id not in self._out)

    def draw(self) -> str | None:
        """The next prompt id, or None when the epoch is over."""
        if not self._queue:
            return None
        prompt_id = self._queue.popleft()
        self._out.add(prompt_id)
        return prompt_id

    def give_back(self, prompt_id: str) -> None:
        """Puts a void group's prompt at the end of the queue. Raises IntegrityError when it was not out."""
        if prompt_id not in self._out:
            raise IntegrityError(f"curriculum: prompt {prompt_id!r} was given back but is not out")
        self._out.remove(prompt_id)
        self._queue.append(prompt_id)

    @property
    def remaining(self) -> int:
        """Prompts that can still be drawn."""
        return len(self._queue)


def _place(prompt_id: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}\0{prompt_id}".encode()).digest()
