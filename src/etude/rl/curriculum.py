"""Which prompt is drawn next: uniform or by signal, always single epoch (SPEC R1, R9).

Knows prompt ids only. The ledger is the truth about what was drawn and trained; this is its order.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping
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

    def observe(self, prompt_id: str, mixed: bool) -> None:
        """A group of the prompt was sealed; `mixed`: it holds both a success and a failure."""
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

    def observe(self, prompt_id: str, mixed: bool) -> None:
        """Outcomes do not change a uniform order."""

    @property
    def remaining(self) -> int:
        """Prompts that can still be drawn."""
        return len(self._queue)


class SignalEpoch:
    """Each prompt once, categories in proportion to how often their groups were mixed so far (SPEC R9).

    A group whose rollouts all end alike has no group advantage, so a category that is always or never solved teaches nothing.
    Every category keeps a floor: its estimate starts at 1/2 with the weight of two groups and never reaches 0. `categories`
    maps each prompt id to its category. Draws depend on the seed and on what was observed before them alone.
    """

    def __init__(self, categories: Mapping[str, str], seed: int, drawn: Iterable[str] = ()) -> None:
        self._categories = dict(categories)
        taken = list(drawn)
        self._queues = {
            name: UniformEpoch(
                [prompt for prompt, category in categories.items() if category == name],
                seed,
                [prompt for prompt in taken if categories.get(prompt) == name],
            )
            for name in sorted(set(categories.values()))
        }
        self._mixed = dict.fromkeys(self._queues, 1)
        self._seen = dict.fromkeys(self._queues, 2)
        self._seed, self._draws = seed, 0

    def draw(self) -> str | None:
        """The next prompt id, or None when the epoch is over."""
        live = [name for name, queue in self._queues.items() if queue.remaining]
        if not live:
            return None
        rates = [self._mixed[name] / self._seen[name] for name in live]
        place = int.from_bytes(_place(f"draw {self._draws}", self._seed)[:8], "big") / 2**64 * math.fsum(rates)
        self._draws += 1
        for name, rate in zip(live, rates):
            place -= rate
            if place < 0:
                return self._queues[name].draw()
        return self._queues[live[-1]].draw()

    def give_back(self, prompt_id: str) -> None:
        """See `UniformEpoch.give_back`."""
        self._queues[self._categories[prompt_id]].give_back(prompt_id)

    def observe(self, prompt_id: str, mixed: bool) -> None:
        """Counts the outcome for the prompt's category."""
        name = self._categories[prompt_id]
        self._seen[name] += 1
        self._mixed[name] += mixed

    @property
    def remaining(self) -> int:
        """Prompts that can still be drawn."""
        return sum(queue.remaining for queue in self._queues.values())


def _place(prompt_id: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}\0{prompt_id}".encode()).digest()
