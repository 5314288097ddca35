"""The log is what happened: replay equals the live state, one coordinator writes, damage is found, nothing is lost."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.coordinator.entries import (
    BatchFormed,
    BatchReturned,
    EngineLeft,
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
from etude.coordinator.ledger import Fenced, Ledger, LedgerObject, _pack, _unpack, replay
from etude.coordinator.run_state import Counts, RunState
from etude.coordinator.slots import SlotState
from etude.records.errors import InfrastructureError, IntegrityError
from etude.records.rollout import GroupState
from etude.weightsync.store import ObjectStore, StoreError, open_store

RUN = "run/test"
RULES = Rules(staleness=2, batch_groups=2, group_size=2)


class Life:
    """Makes one legal step of a run after another, from the state alone."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def next(self, state: RunState) -> list[Record]:
        rng, admission = self.rng, state.admission
        if state.newest_version < 0:
            return [self._publish(state, 1, 0), self._apply(1)]
        unpublished = [v for v, known in state.versions.items() if not known.manifest_key]
        if unpublished and rng.random() < 0.7:
            return [self._publish(state, v, state.versions[v].step) for v in unpublished]
        ready = max(v for v, known in state.versions.items() if known.manifest_key)
        if state.engines.get("e0") != ready and rng.random() < 0.7:
            return [self._apply(ready)]
        if admission.formed:
            if rng.random() < 0.1:
                return [BatchReturned(step=state.step + 1, reason="trainer lost")]
            version = state.newest_version + 1
            return [
                StepCommitted(
                    step=state.step + 1, draws=admission.formed, policy_version=version, digest=f"{version:064x}"
                )
            ]
        batch = admission.next_batch()
        if isinstance(batch, tuple) and rng.random() < 0.6:
            return [BatchFormed(step=state.step + 1, draws=batch)]
        flying = state.in_state(GroupState.IN_FLIGHT)
        if flying and rng.random() < 0.6:
            draw = rng.choice(flying)
            if rng.random() < 0.15:
                return [GroupVoided(draw=draw, reason=rng.choice(["pods lost", "deadline"]))]
            if draw not in state.slots:
                return [
                    SlotMoved(draw=draw, place=p, state=s) for p in (0, 1) for s in (SlotState.ACTING, SlotState.DONE)
                ]
            step = state.draws[draw].oldest_step
            oldest = max(v for v, known in state.versions.items() if known.manifest_key and known.step >= step)
            return [
                GroupSealed(draw=draw, rollouts=(f"{draw}.0", f"{draw}.1"), oldest_version=oldest, digest=f"g{draw}"),
                GroupQueued(draw=draw),
            ]
        serving = state.serving_step
        if serving is not None and admission.may_draw(serving):
            return [PromptDrawn(draw=len(state.draws), task_id=f"t{len(state.draws)}", serving_step=serving)]
        if "l" in state.leases:
            return [LeaseReleased(lease="l")]
        return [LeaseTaken(lease="l", holder="eval", subject="e0"), EngineLeft(engine="spare", reason="drained")]

    @staticmethod
    def _publish(state: RunState, version: int, step: int) -> VersionPublished:
        digest = state.versions[version].digest if version in state.versions else f"{version:064x}"
        return VersionPublished(policy_version=version, step=step, digest=digest, manifest_key=f"m/{version}")

    @staticmethod
    def _apply(version: int) -> VersionApplied:
        return VersionApplied(engine="e0", policy_version=version, digest=f"{version:064x}")


async def live(ledger: Ledger, life: Life, steps: int, check: Callable[[RunState], None] = lambda state: None) -> None:
    for _ in range(steps):
        ledger.record(*life.next(ledger.state))
        check(ledger.state)
        if life.rng.random() < 0.2:
            await ledger.flush()
    await ledger.flush()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**9), st.lists(st.integers(1, 60), min_size=1, max_size=3), st.sampled_from([4, 1000]))
def test_replay_equals_the_live_state_and_conservation_holds_at_every_record(
    tmp_path_factory: pytest.TempPathFactory, seed: int, epochs: list[int], snapshot_every: int
) -> None:
    store, life = open_store(tmp_path_factory.mktemp("bucket")), Life(seed)

    def check(state: RunState) -> None:
        counts = state.check()
        assert counts.draws == counts.in_flight + counts.queued + counts.trained + counts.void
        assert RunState.of(state.image()).image() == state.image()

    async def run() -> None:
        for number, steps in enumerate(epochs):
            before = replay(store, RUN).state
            resumed = before.step - (before.step > 1 and life.rng.random() < 0.5)
            async with await Ledger.open(
                store, RUN, RULES, resumed_step=resumed, window_s=0.0, snapshot_every=snapshot_every
            ) as ledger:
                assert (ledger.state.epoch, ledger.state.step) == (number + 1, resumed)
                if number:  # unfinished groups return their prompt, the resumed weights are published anew
                    flying = ledger.state.in_state(GroupState.IN_FLIGHT)
                    await ledger.append(*[GroupVoided(draw=draw, reason="restart") for draw in flying])
                    version = ledger.state.newest_version + 1
                    await ledger.append(life._publish(ledger.state, version, resumed), life._apply(version))
                await live(ledger, life, steps, check)
                assert replay(store, RUN).state.image() == ledger.state.image()

    asyncio.run(run())
    tasks = [info.task_id for info in replay(store, RUN).state.draws.values() if info.state is GroupState.TRAINED]
    assert len(tasks) == len(set(tasks))


async def test_a_replay_from_a_snapshot_reads_only_what_came_after_and_equals_the_full_one(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    async with await Ledger.open(store, RUN, RULES, window_s=0.0, snapshot_every=10) as ledger:
        await live(ledger, Life(1), 120)
    short = replay(store, RUN)
    assert short.replayed < 12
    newest = store.list(f"{RUN}/snapshot")[-1]
    data = store.get(newest)
    store.put(newest, data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    longer = replay(store, RUN)
    assert longer.replayed > short.replayed, "a damaged snapshot is passed over"
    for key in store.list(f"{RUN}/snapshot"):
        store.delete(key)
    full = replay(store, RUN)
    assert full.replayed == full.number + 1
    assert full.state.image() == longer.state.image() == short.state.image() == ledger.state.image()


async def test_of_two_coordinators_the_older_commits_nothing_and_stops(tmp_path: Path) -> None:
    store, life = open_store(tmp_path), Life(2)
    old = await Ledger.open(store, RUN, RULES)
    await live(old, life, 20)
    new = await Ledger.open(store, RUN, RULES)
    objects = store.list(f"{RUN}/ledger")
    late = old.record(RunEnded(reason="still here"))
    with pytest.raises(Fenced, match="written by epoch 2; epoch 1 stops"):
        await late
    with pytest.raises(IntegrityError, match="epoch 1 stops"):
        old.record(RunEnded(reason="again"))
    assert await asyncio.wait_for(old.stopped(), 5) is old.error
    assert store.list(f"{RUN}/ledger") == objects
    flying = new.state.in_state(GroupState.IN_FLIGHT)
    await new.append(*[GroupVoided(draw=draw, reason="restart") for draw in flying], RunEnded(reason="new"))
    await old.close()
    await new.close()
    assert replay(store, RUN).state.image() == new.state.image()


async def test_an_object_that_slips_in_before_the_first_act_is_taken_in(tmp_path: Path) -> None:
    store, life = open_store(tmp_path), Life(3)
    old = await Ledger.open(store, RUN, RULES)
    await live(old, life, 5)
    slipped = []

    class Slow(ObjectStore):
        def put_if_absent(self, key: str, data: bytes) -> None:
            if "/ledger/" in key and not slipped:
                slipped.append(key)
                asyncio.run_coroutine_threadsafe(old.append(*life.next(old.state)), loop).result(10)
            super().put_if_absent(key, data)

    loop = asyncio.get_running_loop()
    new = await Ledger.open(Slow(store._backend, store.url), RUN, RULES)
    assert slipped and new.state.epoch == 2
    assert replay(store, RUN).state.image() == new.state.image()
    await new.close()
    await old.close()


async def test_a_stale_epoch_that_never_began_is_fenced(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    first = await Ledger.open(store, RUN, RULES)
    at = replay(store, RUN)
    late = Ledger(store, RUN, at, epoch=1, writer="late")
    with pytest.raises(Fenced):
        await late._begin(RULES, None)
    await first.close()


@pytest.mark.parametrize("damage", ["flip", "cut", "gap", "swap"])
async def test_every_kind_of_damage_to_the_log_is_found(tmp_path: Path, damage: str) -> None:
    store = open_store(tmp_path)
    async with await Ledger.open(store, RUN, RULES, window_s=0.0) as ledger:
        await live(ledger, Life(4), 40)
    keys = store.list(f"{RUN}/ledger")
    key, data = keys[5], store.get(keys[5])
    digest = data.find(b"digest")
    if damage == "flip":
        place = digest + 12 if digest > 0 else len(data) // 2
        store.put(key, data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    elif damage == "cut":
        store.put(key, data[:-1])
    elif damage == "gap":
        store.delete(key)
    else:
        store.put(key, store.get(keys[6]))
    with pytest.raises(IntegrityError, match="ledger/"):
        replay(store, RUN)
    with pytest.raises(IntegrityError):
        await Ledger.open(store, RUN, RULES)


@pytest.mark.parametrize(
    ("place", "change", "named"),
    [
        (5, {"at": 0.0}, "follows an object"),
        (-1, {"counts": Counts(3, 1, 1, 0, 0)}, "its records give"),
        (-1, {"epoch": 7}, "written by epoch 7 during epoch 1"),
        (-1, {"number": 99}, "gap"),
        (-1, {"version": 9}, "has format 9; expected 1"),
    ],
)
async def test_a_forged_object_with_a_right_digest_of_its_own_is_found(
    tmp_path: Path, place: int, change: dict[str, object], named: str
) -> None:
    store = open_store(tmp_path)
    async with await Ledger.open(store, RUN, RULES, window_s=0.0) as ledger:
        await live(ledger, Life(4), 40)
    key = store.list(f"{RUN}/ledger")[place]
    store.put(key, _pack(msgspec.structs.replace(_unpack(store.get(key), LedgerObject, key), **change)))
    with pytest.raises(IntegrityError, match=named):
        replay(store, RUN)


async def test_an_illegal_record_stops_the_run_and_never_reaches_the_log(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    ledger = await Ledger.open(store, RUN, RULES, window_s=0.05)
    legal = ledger.record(*Life(5).next(ledger.state))
    wrong = VersionApplied(engine="e0", policy_version=1, digest=f"{1 ^ 4:064x}")
    with pytest.raises(IntegrityError, match="the trainer recorded"):
        ledger.record(PromptDrawn(draw=0, task_id="t0", serving_step=0), wrong)
    with pytest.raises(IntegrityError, match="the trainer recorded"):
        ledger.record(RunEnded(reason="x"))
    await asyncio.wait_for(legal, 5)
    assert isinstance(await asyncio.wait_for(ledger.stopped(), 5), IntegrityError)
    await ledger.close()
    assert len(replay(store, RUN).state.draws) == 0, "what was legal before is committed, nothing else is"
    assert replay(store, RUN).state.newest_version == 1


class FlakyStore(ObjectStore):
    """Fails the first `failures` creations of ledger objects; `lost` ones were written all the same."""

    def __init__(self, good: ObjectStore, failures: int, lost: bool) -> None:
        super().__init__(good._backend, good.url)
        self.failures, self.lost = failures, lost

    def put_if_absent(self, key: str, data: bytes) -> None:
        if "/ledger/" in key and self.failures:
            self.failures -= 1
            if self.lost:
                super().put_if_absent(key, data)
            raise StoreError(key)
        super().put_if_absent(key, data)


@pytest.mark.parametrize("lost", [False, True])
async def test_a_put_without_an_answer_is_tried_again_and_committed_once(tmp_path: Path, lost: bool) -> None:
    good = open_store(tmp_path)
    async with await Ledger.open(FlakyStore(good, 1, lost), RUN, RULES) as ledger:
        await live(ledger, Life(6), 10)
        assert replay(good, RUN).state.image() == ledger.state.image()


async def test_a_store_that_stays_down_stops_the_ledger_and_says_so(tmp_path: Path) -> None:
    store = FlakyStore(open_store(tmp_path), 0, False)
    ledger = await Ledger.open(store, RUN, RULES)
    ledger.attempts, store.failures = 2, 99
    with pytest.raises(StoreError, match="2 attempts"):
        await ledger.append(RunEnded(reason="x"))
    with pytest.raises(StoreError):
        ledger.record(RunEnded(reason="x"))
    await ledger.close()


async def test_records_are_committed_in_batches_within_the_window(tmp_path: Path) -> None:
    store, life = open_store(tmp_path), Life(7)
    async with await Ledger.open(store, RUN, RULES, window_s=0.01) as ledger:
        before, start = len(store.list(f"{RUN}/ledger")), time.perf_counter()
        waiters = [ledger.record(*life.next(ledger.state)) for _ in range(50)]
        await asyncio.wait_for(asyncio.gather(*waiters), 5)
        seconds = time.perf_counter() - start
        assert len(store.list(f"{RUN}/ledger")) == before + 1
    assert seconds < 1.0
    with pytest.raises(InfrastructureError, match="closed"):
        ledger.record(RunEnded(reason="x"))


async def test_a_cancelled_wait_does_not_undo_the_record(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    async with await Ledger.open(store, RUN, RULES, window_s=0.05) as ledger:
        waiting = asyncio.create_task(ledger.append(RunEnded(reason="kept")))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert replay(store, RUN).state.ended == "kept"
