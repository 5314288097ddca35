"""`make starter`: the starter policy from source code, all stages in order, each skipped when its output is there.

Corpus and splits (tasks), tokenizer, pretraining, demonstrations by the scripted solver in real pods, fine-tuning
(pretrain), then the gate on dev tasks. Only joins the rooms; the recipe is `docs/starter.md`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

from etude.agent.solver import demonstrations
from etude.bench.evaluate import choose_tasks, evaluate, successes, well_formed
from etude.bench.quickstart import Job
from etude.chat.tokenizer import Tokenizer
from etude.coordinator.actors import open_pods
from etude.environments.config import EnvironmentsConfig
from etude.pretrain.config import PretrainConfig
from etude.pretrain.starter import make_starter
from etude.records.rollout import Rollout
from etude.records.task import Split, Task
from etude.tasks import corpus
from etude.tasks.archive import TaskSet
from etude.tasks.make import make_tasks

Say = Callable[[str], None]
DEMONSTRATIONS = 2600
GATE_SUCCESS = (0.15, 0.60)
GATE_WELL_FORMED = 0.85


def make_policy(config: PretrainConfig, environments: EnvironmentsConfig, say: Say) -> Path:
    """Every stage up to the fine-tuned policy; returns its Hugging Face folder."""
    folder = Path(config.corpus)
    if not all(path.exists() for path in corpus.paths(folder).values()):
        say(f"corpus: fetching the pinned sources and scanning them into {folder}")
        corpus.build(folder, folder.with_name("sources"), progress=say)

    def demonstrate(tokenizer: Tokenizer, aside: frozenset[tuple[str, str]]) -> list[Rollout]:
        tasks = [task for task in make_tasks(folder, Split.SFT) if (task.module, task.function) not in aside]
        random.Random(config.seed).shuffle(tasks)
        return asyncio.run(_demonstrate(tasks, tokenizer, environments, config.seed, say))

    return make_starter(config, demonstrate, say)


async def _demonstrate(
    tasks: list[Task], tokenizer: Tokenizer, environments: EnvironmentsConfig, seed: int, say: Say
) -> list[Rollout]:
    def progress(done: int, total: int) -> None:
        if done % 200 == 0:
            say(f"demonstrations: {done} of {total}")

    pods = await open_pods(environments)
    try:
        return await demonstrations(
            tasks, tokenizer=tokenizer, pods=pods, n=DEMONSTRATIONS, seed=seed, progress=progress
        )
    finally:
        await pods.aclose()


async def gate(job: Job, say: Say) -> bool:
    """Measures `job.model` on dev tasks and says whether it may start RL: 15-60% success, at least 85% well-formed."""
    tasks = choose_tasks(TaskSet.open(job.tasks).split(Split.DEV), 60, job.evaluation.per_module, job.evaluation.seed)
    async with job.fleet() as fleet:
        record = await evaluate(
            fleet.workers,
            tasks,
            attempts=4,
            temperature=1.0,
            seed=job.evaluation.seed,
            weights_digest=fleet.engine.digest,
            policy_version=0,
        )
    success, formed = float(successes(record).mean()), float(well_formed(record).mean())
    passed = GATE_SUCCESS[0] <= success <= GATE_SUCCESS[1] and formed >= GATE_WELL_FORMED
    say(
        f"gate: {success:.1%} success a dev attempt (bar 15-60%), {formed:.1%} well-formed (bar 85%): "
        + ("passed" if passed else "MISSED")
    )
    return passed
