"""Runs a policy on tasks and records what it pins: weights, harness, tool set, tasks, seeds (SPEC B2, B5).

Drives the same agent, pods and verifier as training does, through rollout workers. Attempt seeds depend on the
evaluation seed, the task and the attempt alone, so that before and after are paired. An attempt that infrastructure
broke is run again; it never counts as a failure of the policy.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from itertools import cycle

import numpy as np

from etude.bench.metrics import Bools
from etude.coordinator.messages import RolloutJob, WorkerHandle
from etude.coordinator.metrics import solved
from etude.coordinator.run import first_cause
from etude.coordinator.seeds import rollout_seed
from etude.records.errors import BadInput, InfrastructureError
from etude.records.rollout import HARNESS_VERSION, CauseClass, EvaluationRecord, Rollout
from etude.records.task import Task

_ATTEMPTS_AT_ONE = 4


def choose_tasks(tasks: Sequence[Task], count: int, per_module: int, seed: int) -> list[Task]:
    """`count` tasks, at most one of a function and `per_module` of a module, in an order that the seed decides.

    Raises BadInput when the split does not hold as many.
    """

    def place(task: Task) -> bytes:
        return hashlib.sha256(f"{seed}:{task.id}".encode()).digest()

    chosen: list[Task] = []
    functions: set[tuple[str, str]] = set()
    modules: dict[str, int] = {}
    for task in sorted(tasks, key=place):
        if len(chosen) == count:
            break
        if (task.module, task.function) in functions or modules.get(task.module, 0) >= per_module:
            continue
        functions.add((task.module, task.function))
        modules[task.module] = modules.get(task.module, 0) + 1
        chosen.append(task)
    if len(chosen) < count:
        raise BadInput(
            "evaluation", "tasks", count, f"at most {len(chosen)}, what the split holds at {per_module} a module"
        )
    return chosen


async def evaluate(
    workers: Sequence[WorkerHandle],
    tasks: Sequence[Task],
    *,
    attempts: int,
    temperature: float,
    seed: int,
    weights_digest: str,
    policy_version: int,
    force_retry: bool = False,
    progress: Callable[[int, int, float], None] = lambda done, total, mean: None,
    keep: Callable[[Rollout], None] = lambda rollout: None,
) -> EvaluationRecord:
    """All attempts at all tasks, spread over the workers. `progress` gets (done, total, mean so far).

    Raises InfrastructureError when an attempt fails for infrastructure several times in a row.
    """
    total = len(tasks) * attempts
    wins: dict[tuple[int, int], Rollout] = {}

    async def one(place: tuple[int, int], worker: WorkerHandle) -> None:
        task, attempt = tasks[place[0]], place[1]
        job = RolloutJob(
            task_id=task.id,
            attempt=attempt,
            seed=rollout_seed(seed, task.id, attempt),
            temperature=temperature,
            keep_blobs=False,
            force_retry=force_retry,
        )
        fault = ""
        for _ in range(_ATTEMPTS_AT_ONE):
            try:
                rollout = (await worker.run(job)).rollout
            except InfrastructureError as error:
                fault = str(error)
                continue
            fault = rollout.error
            if rollout.cause is CauseClass.POLICY:
                wins[place] = rollout
                keep(rollout)
                progress(len(wins), total, sum(map(solved, wins.values())) / len(wins))
                return
        raise InfrastructureError(f"evaluation of {task.name}, {_ATTEMPTS_AT_ONE} tries: {fault}")

    order = [(index, attempt) for index in range(len(tasks)) for attempt in range(attempts)]
    try:
        async with asyncio.TaskGroup() as group:
            for place, worker in zip(order, cycle(workers)):
                group.create_task(one(place, worker))
    except BaseExceptionGroup as errors:
        raise first_cause(errors) from errors
    some = next(iter(wins.values()))
    return EvaluationRecord(
        id=hashlib.sha256(f"{weights_digest}:{seed}:{temperature}:{attempts}:{force_retry}".encode()).hexdigest()[:16],
        weights_digest=weights_digest,
        policy_version=policy_version,
        harness_version=HARNESS_VERSION,
        toolset_id=some.toolset_id,
        task_ids=tuple(task.id for task in tasks),
        attempts=attempts,
        seed=seed,
        temperature=temperature,
        successes=tuple(tuple(solved(wins[i, a]) for a in range(attempts)) for i in range(len(tasks))),
        well_formed=tuple(tuple(wins[i, a].well_formed for a in range(attempts)) for i in range(len(tasks))),
    )


def successes(record: EvaluationRecord) -> Bools:
    """bool [tasks, attempts]."""
    return np.array(record.successes, dtype=np.bool_)


def well_formed(record: EvaluationRecord) -> Bools:
    """bool [tasks, attempts]."""
    return np.array(record.well_formed, dtype=np.bool_)
