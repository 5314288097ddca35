"""What the infrastructure causes never becomes a reward: it is repaired or voids a whole group, visibly; and a run that is
stopped, cut off or overtaken by its own publisher ends with nothing in flight."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from etude.coordinator.entries import GroupVoided, PromptDrawn, SlotMoved, VersionApplied, VersionPublished
from etude.coordinator.ledger import replay
from etude.coordinator.metrics import ProbeMetrics
from etude.coordinator.run import RUN_PREFIX
from etude.coordinator.slots import SlotState
from etude.records.errors import BadInput, InfrastructureError, PodLost
from etude.records.rollout import CauseClass, GroupState


class FailingPods:
    """A backend around another: starts for the task with that number fail while `failures` last, then every `nth` start."""

    def __init__(self, inner, *, number: int = -1, failures: int = 0, nth: int = 0) -> None:
        self._inner, self.name = inner, inner.name
        self._source, self._failures, self._nth = f" - {number}\n".encode(), failures, nth
        self._created = 0

    async def create(self, spec):
        self._created += 1
        if self._failures and spec.files["m.py"].endswith(self._source):
            self._failures -= 1
            raise InfrastructureError("no room for another pod")
        if self._nth and self._created % self._nth == 0:
            raise PodLost("the pod's process is gone")
        return await self._inner.create(spec)


async def check_faulty_run(small_run, folder, plan, pods, **settings) -> None:
    async with small_run(
        folder, plan=plan, pods=pods, agent={"pod_attempts": 1}, rollout_attempts=2, staleness=1, **settings
    ) as it:
        outcome = await it.outcome()
        records, groups = it.records(), it.groups()
        health = await it.engine.health()
    victim = it.tasks[1].id
    state = replay(it.store, RUN_PREFIX).state
    assert outcome.groups_void == state.check().void == 1
    assert state.counts.in_flight == 0 and health.sessions == health.running == 0
    (void,) = [record for record in records if isinstance(record, GroupVoided)]
    assert "no room for another pod" in void.reason
    draws = [record for record in records if isinstance(record, PromptDrawn) and record.task_id == victim]
    assert draws[0].draw == void.draw and len(draws) == 2
    assert state.draws[draws[1].draw].state is GroupState.TRAINED
    assert state.trained_tasks.keys() == {task.id for task in it.tasks}
    for group, _ in groups:
        assert [rollout.attempt for rollout in group.rollouts] == [0, 1]
        assert all(r.cause is CauseClass.POLICY and r.verdict is not None and r.rewards for r in group.rollouts)
    repaired = [r for r in records if isinstance(r, SlotMoved) and r.state is SlotState.WAITING]
    assert repaired and all(record.detail for record in repaired)


async def test_failing_pods_are_repaired_or_void_a_whole_group_whose_prompt_comes_again(
    tmp_path, small_run, halves, memory_pods
):
    inner = memory_pods()
    pods = FailingPods(inner, number=3, failures=4, nth=9)
    await check_faulty_run(small_run, tmp_path, halves, pods, tasks=6, steps=6)
    assert not inner.alive


@pytest.mark.pods
async def test_failing_starts_of_real_pods_are_repaired_too(tmp_path, small_run, halves, real_pods):
    await check_faulty_run(small_run, tmp_path, halves, FailingPods(real_pods, number=3, failures=4), tasks=2, steps=2)


async def test_a_machine_on_which_no_pod_starts_ends_the_run_with_the_reason(tmp_path, small_run, halves, memory_pods):
    pods = FailingPods(memory_pods(), nth=1)
    async with small_run(tmp_path, plan=halves, pods=pods, void_limit=3, rollout_attempts=1) as it:
        with pytest.raises(InfrastructureError, match=r"3 groups in a row are void; .*the pod's process is gone"):
            await it.outcome()
    assert replay(it.store, RUN_PREFIX).state.check().trained == 0


async def test_a_lost_worker_is_named_when_nothing_works_any_more(tmp_path, small_run, halves):
    class Lost:
        async def run(self, job):
            raise InfrastructureError("an actor is lost: worker 0")

    async with small_run(tmp_path, plan=halves, around_worker=lambda worker: Lost(), void_limit=2) as it:
        with pytest.raises(InfrastructureError, match="2 groups in a row are void; the last: an actor is lost"):
            await it.outcome()
    assert set(replay(it.store, RUN_PREFIX).state.void_reasons) == {"an actor is lost: worker 0"}


async def test_a_probe_counts_what_ran_and_never_ends_the_run(tmp_path, small_run, halves, memory_pods):
    class LosesSecondAttempts:
        def __init__(self, inner) -> None:
            self._inner = inner

        async def run(self, job):
            if not job.keep_blobs and job.attempt == 1:
                raise InfrastructureError("an actor is lost")
            return await self._inner.run(job)

    async def second_group_waits_for_the_probe(pod) -> None:
        async with asyncio.timeout(20):
            while pod.original["m.py"].endswith(b" - 3\n") and not probes():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    def probes() -> list[ProbeMetrics]:
        return [row for row in it.rows if isinstance(row, ProbeMetrics)]

    pods = memory_pods(on_call=second_group_waits_for_the_probe)
    settings = {"probes": 1, "probe_every": 1, "probe_attempts": 2, "around_worker": LosesSecondAttempts}
    async with small_run(tmp_path, tasks=2, plan=halves, pods=pods, staleness=0, **settings) as it:
        outcome = await it.outcome()
    assert outcome.steps == 2
    assert [(row.step, row.tasks, row.mean, row.best_of_k) for row in probes()] == [(1, 1, 1.0, 1.0)]


class Gate:
    """Lets the tool calls of the first `free` tasks pass and holds all others."""

    def __init__(self, free: int) -> None:
        self._free = [f" - {number + 2}\n".encode() for number in range(free)]
        self.held = 0

    async def __call__(self, pod) -> None:
        if not pod.original["m.py"].endswith(tuple(self._free)):
            self.held += 1
            await asyncio.Event().wait()


async def test_stop_ends_after_the_step_at_hand_and_leaves_nothing_in_flight(tmp_path, small_run, halves, memory_pods):
    gate = Gate(free=6)
    pods = memory_pods(on_call=gate)
    async with small_run(
        tmp_path, tasks=9, plan=halves, pods=pods, steps=50, staleness=2, on_row=lambda it, row: it.run.stop()
    ) as it:
        before = asyncio.all_tasks()
        outcome = await it.outcome()
        assert asyncio.all_tasks() <= before
        health = await it.engine.health()
    assert outcome.reason == "stopped" and outcome.steps == 1 == len(it.rows)
    state = replay(it.store, RUN_PREFIX).state
    assert state.ended == "stopped" and state.check().in_flight == 0
    assert it.run.progress.in_flight == 0 and it.run.progress.ended == "stopped"
    assert outcome.groups_void == state.void_reasons["run ended: stopped"] == state.counts.void
    assert not pods.alive and health.sessions == health.running == health.waiting == 0
    assert outcome.policy_version == health.policy_version == 1


@pytest.mark.parametrize("cut_off", [False, True])
async def test_a_run_that_waits_for_rollouts_can_be_stopped_and_cut_off(
    tmp_path, small_run, halves, memory_pods, cut_off
):
    gate = Gate(free=0)
    pods = memory_pods(on_call=gate)
    async with small_run(tmp_path, plan=halves, pods=pods, staleness=0) as it:
        before = asyncio.all_tasks()
        running = asyncio.create_task(it.outcome())
        async with asyncio.timeout(20):
            while gate.held < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        if cut_off:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
            assert running.cancelled()
        else:
            it.run.stop("budget")
            assert (await running).reason == "budget"
        assert asyncio.all_tasks() <= before
        assert not pods.alive and (await it.engine.health()).sessions == 0
    counts = replay(it.store, RUN_PREFIX).state.check()
    assert (counts.draws, counts.in_flight, counts.void) == ((1, 1, 0) if cut_off else (1, 0, 1))


async def test_a_version_that_is_covered_by_a_later_one_before_its_step_is_known_is_passed_over(
    tmp_path, small_run, halves
):
    """The publisher coalesces a backlog; its answer for version 1 may come before the trainer's for step 2."""

    class Coalescing:
        def __init__(self, inner) -> None:
            self._inner = inner
            self._second, self._told = asyncio.Event(), asyncio.Event()

        async def publish_first(self):
            return await self._inner.publish_first()

        async def step(self, groups, blobs, policy_version: int):
            report = await self._inner.step(groups, blobs, policy_version)
            if policy_version == 2:
                self._later = await self._inner.published(2)
                self._second.set()
                await self._told.wait()
                await asyncio.sleep(0.05)
            return report

        async def published(self, policy_version: int):
            if policy_version > 2:
                return await self._inner.published(policy_version)
            await self._second.wait()
            self._told.set()
            return self._later

    async with small_run(tmp_path, plan=halves, steps=3, staleness=2, around_trainer=Coalescing) as it:
        outcome = await it.outcome()
        records = it.records()
    assert outcome.steps == outcome.policy_version == 3
    for kind in (VersionPublished, VersionApplied):
        assert [record.policy_version for record in records if isinstance(record, kind)] == [0, 2, 3]


async def test_deterministic_mode_refuses_staleness(tmp_path, small_run):
    with pytest.raises(BadInput, match="deterministic"):
        async with small_run(tmp_path, staleness=1, deterministic=True):
            pass
