import asyncio
from pathlib import Path

import pytest

from etude.bench.evaluate import choose_tasks, evaluate, successes
from etude.coordinator.messages import RolloutJob, RolloutResult
from etude.coordinator.seeds import rollout_seed
from etude.records.errors import BadInput, InfrastructureError
from etude.records.rollout import CauseClass, Rollout, StopReason, Verdict
from etude.records.task import Split, Task
from etude.tasks.archive import TaskSet

TASKS = TaskSet.open(Path(__file__).parents[2] / "data" / "tasks.tar.zst").split(Split.HELD_OUT)


class Answers:
    """A worker whose policy solves on even seeds; `faults` first calls are broken by infrastructure."""

    def __init__(self, faults: int = 0) -> None:
        self.jobs: list[RolloutJob] = []
        self._faults = faults

    async def run(self, job: RolloutJob) -> RolloutResult:
        self.jobs.append(job)
        await asyncio.sleep(0)
        broken = len(self.jobs) <= self._faults
        return RolloutResult(
            rollout=Rollout(
                id="r",
                task_id=job.task_id,
                attempt=job.attempt,
                seed=job.seed,
                generations=(),
                tool_calls=(),
                stop_reason=StopReason.INFRASTRUCTURE if broken else StopReason.FINISH,
                cause=CauseClass.INFRASTRUCTURE if broken else CauseClass.POLICY,
                verdict=None if broken else Verdict(success=job.seed % 2 == 0, passed=1, total=1),
            )
        )


def measured(worker: Answers, tasks: list[Task], attempts: int = 3) -> list[list[bool]]:
    record = asyncio.run(
        evaluate([worker], tasks, attempts=attempts, temperature=1.0, seed=5, weights_digest="d", policy_version=0)
    )
    return successes(record).tolist()


def test_chosen_tasks_keep_the_limits_and_depend_on_the_seed_alone() -> None:
    chosen = choose_tasks(TASKS, 150, 4, 1)
    assert chosen == choose_tasks(list(reversed(TASKS)), 150, 4, 1) != choose_tasks(TASKS, 150, 4, 2)
    assert len({(task.module, task.function) for task in chosen}) == 150
    modules = [task.module for task in chosen]
    assert len(set(modules)) >= 40 and max(map(modules.count, modules)) <= 4
    with pytest.raises(BadInput, match="at most"):
        choose_tasks(TASKS, 10**6, 4, 1)


def test_attempts_are_paired_by_seed_and_infrastructure_never_counts_as_failure() -> None:
    tasks = choose_tasks(TASKS, 4, 4, 1)
    expected = [[rollout_seed(5, task.id, attempt) % 2 == 0 for attempt in range(3)] for task in tasks]
    assert measured(Answers(), tasks) == expected
    assert measured(Answers(faults=3), tasks) == expected


def test_infrastructure_that_never_works_is_an_error() -> None:
    with pytest.raises(InfrastructureError, match="tries"):
        measured(Answers(faults=10**6), choose_tasks(TASKS, 1, 4, 1), attempts=1)
