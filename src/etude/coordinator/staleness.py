"""Admission by staleness: which prompts may be drawn and which batch may be formed (DESIGN decision 6).

A group whose oldest token is of step v is due at step v + S: the update that begins at trainer step v + S is the last one
that may train it. `base` is the step at which the next batch's update begins. Two rules hold at every instant:

(a) no draw while in flight + queued >= (S + 1) x batch;
(b) for every j >= 0, at most j batches of the live groups outside a formed batch are due before step base + j.

Rule (b) is what makes waiting enough: the earliest deadlines can always still be met, so nothing needs to be dropped. A
batch is formed only if it holds afterwards, and, because engines lag behind the trainer, a prompt is drawn only if it holds
with that group due at the *serving* step + S. Pure and clockless; knows draws and steps, nothing of tasks or tokens.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

from etude.records.errors import IntegrityError


@dataclass(frozen=True)
class Refusal:
    """Why nothing is drawn or formed now: `rule` is `a`, `b` or `ready`; `why` has the numbers."""

    rule: str
    why: str


class Admission:
    """The live groups of a run by deadline, with the two rules. Costs O(S) a question, O(log live) a change."""

    def __init__(self, staleness: int, batch_groups: int, step: int = 0) -> None:
        if staleness < 0 or batch_groups < 1:
            raise IntegrityError(f"admission: staleness {staleness} and batches of {batch_groups} groups make no rule")
        self.staleness, self.batch_groups = staleness, batch_groups
        self.step = step
        """Committed trainer steps."""
        self.formed: tuple[int, ...] = ()
        """Draws of the batch that is being trained."""
        self._oldest: dict[int, int] = {}
        self._due: dict[int, int] = {}
        self._ready: dict[int, list[int]] = {}

    @property
    def base(self) -> int:
        """Step at which the next batch's update begins."""
        return self.step + (1 if self.formed else 0)

    @property
    def live(self) -> int:
        """Groups in flight or queued; a formed batch is queued until its step is committed."""
        return len(self._oldest)

    @property
    def ready(self) -> int:
        """Queued groups outside a formed batch."""
        return sum(map(len, self._ready.values()))

    # -- questions -------------------------------------------------------------------------------------------------

    def refuses_draw(self, serving_step: int) -> Refusal | None:
        """Why no prompt may be drawn now, or None. `serving_step`: the smallest step that a live engine serves."""
        bound = (self.staleness + 1) * self.batch_groups
        if self.live >= bound:
            return Refusal("a", f"{self.live} groups in flight and queued; the bound is {bound}")
        due = serving_step + self.staleness
        if (found := self._crowded(self._due, self.base, due)) is not None:
            return Refusal("b", f"a group sampled at step {serving_step} is due at step {due}, but {found}")
        return None

    def may_draw(self, serving_step: int) -> bool:
        """Whether a prompt may be drawn now."""
        return self.refuses_draw(serving_step) is None

    def next_batch(self, final: bool = False) -> tuple[int, ...] | Refusal:
        """Draws of the batch that may be formed now (earliest due first, then in the order drawn), or why the trainer waits.

        If this choice breaks rule (b) every other does: it leaves the fewest groups due before any step. `final` allows a
        short batch once nothing is in flight (the prompts have run out).
        """
        if self.formed:
            return Refusal("ready", f"the batch of step {self.step + 1} is being trained")
        chosen: list[int] = []
        left = dict(self._due)
        for due in sorted(self._ready):
            taken = self._ready[due][: self.batch_groups - len(chosen)]
            chosen += taken
            left[due] -= len(taken)
        short = len(chosen) < self.batch_groups
        if not chosen or (short and not (final and self.ready == self.live)):
            return Refusal("ready", f"{len(chosen)} of {self.batch_groups} groups are ready")
        if (found := self._crowded(left, self.step + 1)) is not None:
            return Refusal("b", f"after this batch {found}")
        return tuple(chosen)

    def refuses_batch(self, draws: Iterable[int]) -> Refusal | None:
        """Why these draws may not be formed to a batch now, or None."""
        wanted = list(draws)
        if self.formed:
            return Refusal("ready", f"the batch of step {self.step + 1} is being trained")
        if not 0 < len(set(wanted)) == len(wanted) <= self.batch_groups:
            return Refusal("ready", f"{len(wanted)} draws ({len(set(wanted))} distinct) for {self.batch_groups} groups")
        left = dict(self._due)
        for draw in wanted:
            if not self._is_ready(draw):
                return Refusal("ready", f"group {draw} is not ready")
            left[self.due(draw)] -= 1
        if (found := self._crowded(left, self.step + 1)) is not None:
            return Refusal("b", f"after this batch {found}")
        return None

    def due(self, draw: int) -> int:
        """Last step at which an update may begin that trains the group. Raises IntegrityError for no live group."""
        if draw not in self._oldest:
            raise IntegrityError(f"admission: group {draw} is not live")
        return self._oldest[draw] + self.staleness

    def waited_for(self, within: int = 1) -> tuple[int, ...]:
        """Groups in flight that are due before step base + `within`, most urgent first: whom the trainer waits for."""
        formed = set(self.formed)
        urgent = [
            (self.due(draw), draw)
            for draw in self._oldest
            if draw not in formed and self.due(draw) < self.base + within and not self._is_ready(draw)
        ]
        return tuple(draw for _, draw in sorted(urgent))

    def overdue(self) -> tuple[int, ...]:
        """Live groups that no batch may hold any more: empty unless the rules were tightened; to be voided visibly."""
        formed = set(self.formed)
        return tuple(sorted(d for d in self._oldest if d not in formed and self.due(d) < self.base))

    # -- changes ---------------------------------------------------------------------------------------------------

    def draw(self, draw: int, serving_step: int) -> None:
        """A prompt is drawn: its tokens will be of `serving_step` or later. Raises IntegrityError when it may not be."""
        if draw in self._oldest:
            raise IntegrityError(f"admission: group {draw} is drawn twice")
        if (refusal := self.refuses_draw(serving_step)) is not None:
            raise IntegrityError(f"admission rule ({refusal.rule}) broken by draw {draw}: {refusal.why}")
        self._add(draw, serving_step)

    def seal(self, draw: int, oldest_step: int) -> None:
        """The group's oldest token is known. Raises IntegrityError when it is older than was promised at the draw."""
        promised = self.due(draw) - self.staleness
        if oldest_step < promised:
            raise IntegrityError(
                f"group {draw} was drawn at serving step {promised}, but holds a token of {oldest_step}"
            )
        self._count(promised + self.staleness, -1)
        self._oldest[draw] = oldest_step
        self._count(oldest_step + self.staleness, 1)

    def queue(self, draw: int) -> None:
        """The sealed group may enter a batch."""
        insort(self._ready.setdefault(self.due(draw), []), draw)

    def void(self, draw: int) -> None:
        """The group is given up, in flight or queued. Raises IntegrityError when it is being trained."""
        if draw in self.formed:
            raise IntegrityError(f"admission: group {draw} is in the batch of step {self.step + 1}; it cannot be void")
        if self._is_ready(draw):
            self._unready(draw)
        self._count(self.due(draw), -1)
        del self._oldest[draw]

    def form(self, draws: Iterable[int]) -> None:
        """A batch is formed. Raises IntegrityError when it may not be."""
        batch = tuple(draws)
        if (refusal := self.refuses_batch(batch)) is not None:
            raise IntegrityError(f"batch rule ({refusal.rule}) broken at step {self.step}: {refusal.why}")
        for draw in batch:
            self._unready(draw)
            self._count(self.due(draw), -1)
        self.formed = batch

    def give_back(self) -> None:
        """The formed batch will not be trained after all: its groups are queued again."""
        batch, self.formed = self.formed, ()
        for draw in batch:
            self._count(self.due(draw), 1)
            self.queue(draw)

    def commit(self) -> None:
        """The formed batch is trained: the step is done."""
        if not self.formed:
            raise IntegrityError(f"admission: no batch is formed at step {self.step}")
        for draw in self.formed:
            del self._oldest[draw]
        self.formed = ()
        self.step += 1

    def restore(self, draw: int, oldest_step: int, queued: bool) -> None:
        """Adds a live group found by replay; the rules are not asked."""
        self._add(draw, oldest_step)
        if queued:
            self.queue(draw)

    # -- books -----------------------------------------------------------------------------------------------------

    def _add(self, draw: int, oldest_step: int) -> None:
        self._oldest[draw] = oldest_step
        self._count(oldest_step + self.staleness, 1)

    def _count(self, due: int, change: int) -> None:
        self._due[due] = self._due.get(due, 0) + change
        if not self._due[due]:
            del self._due[due]

    def _is_ready(self, draw: int) -> bool:
        row = self._ready.get(self.due(draw), [])
        place = bisect_left(row, draw)
        return place < len(row) and row[place] == draw

    def _unready(self, draw: int) -> None:
        due = self.due(draw)
        row = self._ready[due]
        del row[bisect_left(row, draw)]
        if not row:
            del self._ready[due]

    def _crowded(self, due: dict[int, int], base: int, extra: int | None = None) -> str | None:
        groups = 0
        for day in sorted(due.keys() | ({extra} if extra is not None else set())):
            groups += due.get(day, 0) + (day == extra)
            room = max(0, day - base + 1) * self.batch_groups
            if groups > room:
                return f"{groups} groups would be due by step {day}, where {room} can be trained from step {base} on"
        return None
