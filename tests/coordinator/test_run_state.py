"""Every record keeps the books or stops the run, naming the numbers."""

from __future__ import annotations

import pytest

from etude.coordinator.entries import (
    BatchFormed,
    EngineLeft,
    EpochStarted,
    GroupQueued,
    GroupSealed,
    GroupVoided,
    LeaseReleased,
    LeaseTaken,
    PromptDrawn,
    Record,
    Rules,
    RunEnded,
    SlotMoved,
    StepCommitted,
    VersionApplied,
    VersionPublished,
)
from etude.coordinator.run_state import Counts, RunState
from etude.coordinator.slots import SlotState
from etude.records.errors import IntegrityError
from etude.records.rollout import GroupState

RULES = Rules(staleness=1, batch_groups=1, group_size=2)
DIGEST = "d1" * 32


def published(version: int, step: int, digest: str = DIGEST) -> VersionPublished:
    return VersionPublished(policy_version=version, step=step, digest=digest, manifest_key=f"manifest/{version}")


def drawn(draw: int, task: str, step: int = 0) -> PromptDrawn:
    return PromptDrawn(draw=draw, task_id=task, serving_step=step)


def sealed(draw: int, version: int = 1) -> GroupSealed:
    return GroupSealed(draw=draw, rollouts=("r0", "r1"), oldest_version=version, digest="g")


def committed(step: int, draws: tuple[int, ...], version: int) -> StepCommitted:
    return StepCommitted(step=step, draws=draws, policy_version=version, digest=DIGEST)


START: list[Record] = [
    EpochStarted(epoch=1, incarnation=1, resumed_step=0, rules=RULES),
    published(1, 0),
    VersionApplied(engine="e0", policy_version=1, digest=DIGEST),
]
TWO_DRAWS: list[Record] = [*START, drawn(0, "a"), drawn(1, "b")]
ONE_TRAINED: list[Record] = [*TWO_DRAWS, sealed(0), GroupQueued(draw=0), committed(1, (0,), 2)]


def state_of(*records: Record) -> RunState:
    state = RunState()
    for record in records:
        state.apply(record)
        state.check()
    return state


def test_a_whole_life_is_counted() -> None:
    state = state_of(*ONE_TRAINED, GroupVoided(draw=1, reason="pods lost"), published(2, 1))
    assert state.counts == Counts(2, 0, 0, 1, 1)
    assert (state.step, state.newest_version, state.void_reasons["pods lost"]) == (1, 2, 1)
    state.apply(VersionApplied(engine="e0", policy_version=2, digest=DIGEST))
    assert state.serving_step == 1
    state.apply(drawn(2, "b", step=1))
    assert state.in_state(GroupState.IN_FLIGHT) == (2,), "a void prompt is drawn again"


@pytest.mark.parametrize(
    ("before", "bad", "named"),
    [
        (ONE_TRAINED, drawn(2, "a"), "draw 0 of it was trained"),
        ([*START, drawn(0, "a")], drawn(1, "a"), "draw 0 of it is in_flight"),
        (START, drawn(1, "a"), "draw 1 follows 0 draws"),
        (TWO_DRAWS, drawn(2, "c"), r"rule \(a\).*2 groups in flight and queued; the bound is 2"),
        (START, drawn(0, "a", step=1), "promises step 1, but an engine serves step 0"),
        (TWO_DRAWS, sealed(7), "group 7 is sealed but was never drawn"),
        (TWO_DRAWS, sealed(0, version=5), "tokens of version 5, which is not published"),
        (TWO_DRAWS, GroupQueued(draw=0), "was not sealed"),
        (TWO_DRAWS, GroupSealed(draw=0, rollouts=("r0",), oldest_version=1, digest="g"), "1 rollouts of 2"),
        (TWO_DRAWS, committed(1, (0,), 2), "group 0 is trained at step 1 while it is in_flight"),
        ([*TWO_DRAWS, sealed(0), GroupQueued(draw=0)], committed(2, (0,), 2), "step 2 follows step 0"),
        ([*TWO_DRAWS, sealed(0), GroupQueued(draw=0)], committed(1, (0,), 1), "version 1; 1 was used"),
        ([*TWO_DRAWS, sealed(0), GroupQueued(draw=0)], committed(1, (0, 0), 2), "2 draws"),
        (ONE_TRAINED, committed(2, (0,), 3), "group 0 is trained at step 2 while it is trained"),
        (ONE_TRAINED, GroupVoided(draw=0, reason="late"), "void while it is trained"),
        (ONE_TRAINED, published(2, 1, "d2" * 32), "d2d2.*the trainer recorded step 1, digest d1d1"),
        (START, published(1, 0), "published twice"),
        (ONE_TRAINED, VersionApplied(engine="e0", policy_version=2, digest=DIGEST), "which is not published"),
        (START, EpochStarted(epoch=1, incarnation=2, resumed_step=0, rules=RULES), "epoch 1 .* follows epoch 1"),
        (START, EpochStarted(epoch=2, incarnation=2, resumed_step=4, rules=RULES), "step 4, but 0 steps"),
        (START, LeaseReleased(lease="l"), "released but not held"),
        (
            [*START, LeaseTaken(lease="l", holder="x", subject="e0")],
            LeaseTaken(lease="l", holder="y", subject="e0"),
            "x",
        ),
        (TWO_DRAWS, SlotMoved(draw=0, place=0, state=SlotState.DONE), "waiting cannot become done"),
        ([*TWO_DRAWS, SlotMoved(draw=0, place=0, state=SlotState.ACTING)], sealed(0), "its slots are"),
    ],
)
def test_a_record_that_breaks_an_invariant_is_refused_with_the_numbers(
    before: list[Record], bad: Record, named: str
) -> None:
    state = state_of(*before)
    with pytest.raises(IntegrityError, match=named):
        state.apply(bad)


@pytest.mark.parametrize("bit", [0, 77, 255])
def test_one_flipped_bit_in_the_engines_digest_stops_the_run(bit: int) -> None:
    flipped = f"{int(DIGEST, 16) ^ (1 << bit):064x}"
    state = state_of(*START[:2])
    with pytest.raises(IntegrityError, match=f"{flipped} as version 1; the trainer recorded {DIGEST}"):
        state.apply(VersionApplied(engine="e0", policy_version=1, digest=flipped))


@pytest.mark.parametrize("book", ["lost", "invented"])
def test_a_group_lost_or_invented_behind_the_ledgers_back_is_found_at_the_next_record(book: str) -> None:
    """THUDM/slime#2238: completed groups beyond the batch were thrown away."""
    state = state_of(*TWO_DRAWS)
    if book == "lost":
        del state.draws[1]
    else:
        state.draws[9] = state.draws[1]
    with pytest.raises(IntegrityError, match=r"draws [13] are not in flight 2 \+ queued 0 \+ trained 0 \+ void 0"):
        state.apply(EngineLeft(engine="e0", reason="test"))


def test_a_restart_from_an_older_checkpoint_queues_what_later_steps_trained() -> None:
    trained_twice = [
        *ONE_TRAINED,
        published(2, 1),
        VersionApplied(engine="e0", policy_version=2, digest=DIGEST),
        sealed(1),
        GroupQueued(draw=1),
        BatchFormed(step=2, draws=(1,)),
        committed(2, (1,), 3),
        drawn(2, "c", step=1),
        RunEnded(reason="test"),
    ]
    state = state_of(*trained_twice)
    assert state.counts == Counts(3, 1, 0, 2, 0) and state.ended == "test"
    state.apply(EpochStarted(epoch=2, incarnation=2, resumed_step=1, rules=RULES))
    state.check()
    assert state.counts == Counts(3, 1, 1, 1, 0) and (state.step, state.ended) == (1, "")
    assert state.serving_step is None, "engines report anew"
    state.apply(published(4, 1))
    state.apply(committed(2, (1,), 5))
    assert state.check() == Counts(3, 1, 0, 2, 0)
    assert state.trained_tasks == {"a": 0, "b": 1}


def test_a_batch_must_be_trained_as_it_was_formed() -> None:
    state = state_of(*TWO_DRAWS, sealed(0), GroupQueued(draw=0), sealed(1), GroupQueued(draw=1))
    state.apply(BatchFormed(step=1, draws=(0,)))
    with pytest.raises(IntegrityError, match=r"trained draws \(1,\); its batch was \(0,\)"):
        state.apply(committed(1, (1,), 2))
