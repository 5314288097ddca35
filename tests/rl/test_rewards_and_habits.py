"""Combining components, and the monitor of giving up."""

from __future__ import annotations

import pytest

from etude.records.errors import BadInput
from etude.records.rollout import Effort, Group, Rollout, StopReason, Verdict
from etude.rl.habits import GivesUpMonitor, HabitAlarm, distinct_solutions
from etude.rl.rewards import combine_rewards


def _group(turns: int, successes: int, size: int = 4, diffs: tuple[str, ...] = ()) -> Group:
    rollouts = tuple(
        Rollout(
            id=f"r{i}",
            task_id="t",
            attempt=i,
            seed=i,
            generations=(),
            tool_calls=(),
            stop_reason=StopReason.FINISH,
            verdict=Verdict(success=i < successes, passed=0, total=1),
            effort=Effort(turns=turns),
            diff={"m.py": diffs[i]} if i < len(diffs) else {},
        )
        for i in range(size)
    )
    return Group(id="g", draw=0, task_id="t", rollouts=rollouts, advantages=(0.0,) * size, oldest_version=0)


def test_total_is_the_weighted_sum_and_components_stay() -> None:
    got = combine_rewards({"success": 1.0, "effort": 0.4, "style": 7.0}, {"success": 1, "effort": -0.05, "style": 0})
    assert got["total"] == pytest.approx(0.98)
    assert got["style"] == 7.0


@pytest.mark.parametrize("components", [{"sucess": 1.0}, {"total": 1.0}, {"success": float("inf")}])
def test_a_component_that_cannot_count_is_refused(components: dict[str, float]) -> None:
    with pytest.raises(BadInput, match="rewards"):
        combine_rewards(components, {"success": 1.0, "total": 1.0})


def _alarms(monitor: GivesUpMonitor, late_fail_turns: int, late_other_turns: int) -> list[HabitAlarm]:
    found = []
    for all_fail_turns, other_turns in [(6, 4)] * 5 + [(late_fail_turns, late_other_turns)] * 5:
        for group in (_group(all_fail_turns, 0), _group(other_turns, 2)):
            alarm = monitor.observe(group)
            if alarm is not None:
                found.append(alarm)
    return found


def test_alarm_when_turns_fall_only_where_all_fail() -> None:
    alarms = _alarms(GivesUpMonitor(window=5, alarm_ratio=0.7), 2, 4)
    assert alarms and alarms[-1].recent_ratio == pytest.approx(0.5)
    assert "give up" in str(alarms[-1])


def test_no_alarm_when_the_policy_becomes_quicker_everywhere_or_stays() -> None:
    assert not _alarms(GivesUpMonitor(window=5, alarm_ratio=0.7), 3, 2)
    assert not _alarms(GivesUpMonitor(window=5, alarm_ratio=0.7), 6, 4)


def test_distinct_solutions_counts_different_successful_diffs() -> None:
    assert distinct_solutions(_group(1, 3, diffs=("a", "b", "a", "c"))) == 2
