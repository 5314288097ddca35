"""The places of a group: one small state machine per rollout, and what they make of the group (DESIGN decision 4).

Pure: knows the states and who may cause a move, nothing of pods, engines or clocks. A policy's failure is scored and so
ends as `DONE`; only what the infrastructure caused starts a fresh rollout, and only when those are spent is the group void.
"""

from __future__ import annotations

from enum import StrEnum

from etude.records.errors import IntegrityError
from etude.records.rollout import CauseClass


class SlotState(StrEnum):
    """Where one rollout of a group is."""

    WAITING = "waiting"
    """No worker has it."""
    ACTING = "acting"
    """The agent loop runs."""
    VERIFYING = "verifying"
    """The loop has ended; the verifier runs."""
    DONE = "done"
    """Scored and recorded."""
    VOID = "void"
    """The infrastructure failed it too often, or its group is given up."""


_NEXT = {
    SlotState.WAITING: {SlotState.ACTING, SlotState.VOID},
    SlotState.ACTING: {SlotState.VERIFYING, SlotState.DONE, SlotState.WAITING, SlotState.VOID},
    SlotState.VERIFYING: {SlotState.DONE, SlotState.WAITING, SlotState.VOID},
    SlotState.DONE: {SlotState.VOID},
    SlotState.VOID: set(),
}


class GroupStatus(StrEnum):
    """What its slots make of a group: only a whole one may be sealed."""

    OPEN = "open"
    WHOLE = "whole"
    VOID = "void"


class GroupSlots:
    """The slots of one drawn group. `tries` bounds the fresh rollouts of one place (at least 1)."""

    def __init__(self, draw: int, size: int, tries: int) -> None:
        self.draw, self.tries = draw, tries
        self.states = [SlotState.WAITING] * size
        self.started = [0] * size

    @property
    def status(self) -> GroupStatus:
        """Whole when every slot is done, void when one is."""
        if SlotState.VOID in self.states:
            return GroupStatus.VOID
        return GroupStatus.WHOLE if all(s is SlotState.DONE for s in self.states) else GroupStatus.OPEN

    def start(self, place: int) -> int:
        """A worker takes the place; returns which try this is, from 1."""
        self.move(place, SlotState.ACTING)
        return self.started[place]

    def verify(self, place: int) -> None:
        """The agent loop ended by the policy's own doing; the verifier starts."""
        self.move(place, SlotState.VERIFYING)

    def finish(self, place: int, cause: CauseClass = CauseClass.POLICY) -> None:
        """The rollout is scored. Raises IntegrityError for an infrastructure cause: that is never scored."""
        if cause is not CauseClass.POLICY:
            raise IntegrityError(f"group {self.draw}, slot {place}: an end caused by {cause} cannot be scored")
        self.move(place, SlotState.DONE)

    def fail(self, place: int, cause: CauseClass = CauseClass.INFRASTRUCTURE) -> SlotState:
        """The infrastructure failed the place: WAITING for a fresh rollout, or VOID when its tries are spent.

        Raises IntegrityError for a policy cause: that is scored, never repaired.
        """
        if cause is not CauseClass.INFRASTRUCTURE:
            raise IntegrityError(f"group {self.draw}, slot {place}: an end caused by {cause} is scored, not repaired")
        spent = self.started[place] >= self.tries
        self.move(place, SlotState.VOID if spent else SlotState.WAITING)
        return self.states[place]

    def give_up(self) -> None:
        """Every slot becomes void: the group's end of another cause (a deadline, the run's end)."""
        self.states = [SlotState.VOID] * len(self.states)

    def move(self, place: int, to: SlotState) -> None:
        """One legal move. Raises IntegrityError for any other."""
        if not 0 <= place < len(self.states):
            raise IntegrityError(f"group {self.draw} has no slot {place} (it has {len(self.states)})")
        if to not in _NEXT[self.states[place]]:
            raise IntegrityError(f"group {self.draw}, slot {place}: {self.states[place]} cannot become {to}")
        self.states[place] = to
        self.started[place] += to is SlotState.ACTING
