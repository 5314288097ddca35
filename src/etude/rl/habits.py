"""Monitors of habits that a reward can teach by accident (SPEC R7, DESIGN decision 4).

The one here: *gives up sooner in groups that all fail*. A group in which every rollout fails has no signal but the
length penalty, which then pays for doing less. It reads sealed groups and changes nothing.
"""

from __future__ import annotations

from collections import deque
from statistics import fmean

import msgspec

from etude.records.rollout import Group, Rollout


class HabitAlarm(msgspec.Struct, frozen=True, kw_only=True):
    """Turns where all rollouts fail, relative to turns elsewhere: at the start of the run and now."""

    baseline_ratio: float
    recent_ratio: float
    groups_seen: int

    def __str__(self) -> str:
        return (
            f"turns in groups that all fail fell from {self.baseline_ratio:.2f} to {self.recent_ratio:.2f} times those "
            f"of other groups ({self.groups_seen} groups seen): the length penalty may be teaching the policy to give up"
        )


class GivesUpMonitor:
    """Compares mean turns of all-fail groups with those of the others: first `window` of each kind against the last.

    The comparison with other groups keeps a policy that becomes quicker everywhere from raising the alarm.
    """

    def __init__(self, window: int, alarm_ratio: float) -> None:
        self._window, self._alarm_ratio = window, alarm_ratio
        self._first: dict[bool, list[float]] = {True: [], False: []}
        self._recent: dict[bool, deque[float]] = {True: deque(maxlen=window), False: deque(maxlen=window)}
        self._seen = 0

    def observe(self, group: Group) -> HabitAlarm | None:
        """Takes one sealed group in; returns an alarm while the recent ratio is too low."""
        all_fail = not any(_succeeded(rollout) for rollout in group.rollouts)
        turns = fmean(rollout.effort.turns for rollout in group.rollouts)
        self._seen += 1
        if len(self._first[all_fail]) < self._window:
            self._first[all_fail].append(turns)
        else:
            self._recent[all_fail].append(turns)
        baseline, recent = self.baseline_ratio, self.recent_ratio
        if baseline is None or recent is None or recent >= self._alarm_ratio * baseline:
            return None
        return HabitAlarm(baseline_ratio=baseline, recent_ratio=recent, groups_seen=self._seen)

    @property
    def baseline_ratio(self) -> float | None:
        """Turns of all-fail groups over those of others among the first `window` of each; None until both are full."""
        if min(len(values) for values in self._first.values()) < self._window:
            return None
        return _ratio_of_means(self._first[True], self._first[False])

    @property
    def recent_ratio(self) -> float | None:
        """The same among the last `window` of each; None until both are full."""
        if min(len(values) for values in self._recent.values()) < self._window:
            return None
        return _ratio_of_means(list(self._recent[True]), list(self._recent[False]))


def distinct_solutions(group: Group) -> int:
    """Number of different successful diffs in the group: what is left of its variety (DESIGN decision 3)."""
    return len({tuple(sorted(r.diff.items())) for r in group.rollouts if _succeeded(r)})


def _succeeded(rollout: Rollout) -> bool:
    return rollout.verdict is not None and rollout.verdict.success


def _ratio_of_means(numerator: list[float], denominator: list[float]) -> float:
    below = fmean(denominator)
    return fmean(numerator) / below if below > 0 else 1.0
