"""A group is whole or void: infrastructure faults are repaired, policy failures scored, nothing is trained short."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.coordinator.slots import GroupSlots, GroupStatus, SlotState
from etude.records.errors import IntegrityError
from etude.records.rollout import CauseClass


def test_a_group_is_whole_only_when_every_place_is_done() -> None:
    group = GroupSlots(0, 2, tries=3)
    for place in (0, 1):
        assert group.status is GroupStatus.OPEN
        assert group.start(place) == 1
        group.verify(place)
        group.finish(place)
    assert group.status is GroupStatus.WHOLE


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(1, 4))
def test_a_place_is_void_exactly_when_the_infrastructure_failed_every_try(fails: list[bool], tries: int) -> None:
    group = GroupSlots(0, 1, tries)
    for fail in fails:
        group.start(0)
        if not fail:
            group.finish(0)
            break
        if group.fail(0) is SlotState.VOID:
            break
    leading = next((i for i, fail in enumerate(fails) if not fail), len(fails))
    expected = GroupStatus.VOID if leading >= tries else GroupStatus.WHOLE if leading < len(fails) else GroupStatus.OPEN
    assert group.status is expected
    assert group.started[0] <= tries


def test_causes_do_not_mix() -> None:
    """rllm-org/rllm#710: infrastructure failures became reward 0."""
    group = GroupSlots(4, 1, tries=2)
    group.start(0)
    with pytest.raises(IntegrityError, match="group 4, slot 0"):
        group.finish(0, CauseClass.INFRASTRUCTURE)
    with pytest.raises(IntegrityError, match="scored, not repaired"):
        group.fail(0, CauseClass.POLICY)


@pytest.mark.parametrize("moves", [["done"], ["verifying"], ["acting", "done", "acting"], ["void", "waiting"]])
def test_illegal_moves_are_named(moves: list[str]) -> None:
    group = GroupSlots(0, 1, tries=1)
    for move in moves[:-1]:
        group.move(0, SlotState(move))
    with pytest.raises(IntegrityError, match=f"cannot become {moves[-1]}"):
        group.move(0, SlotState(moves[-1]))
    with pytest.raises(IntegrityError, match="no slot 1"):
        group.move(1, SlotState.ACTING)


def test_a_group_given_up_is_void() -> None:
    group = GroupSlots(0, 2, tries=1)
    group.start(0)
    group.give_up()
    assert group.status is GroupStatus.VOID
