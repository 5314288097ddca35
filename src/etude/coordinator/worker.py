"""A rollout worker: runs agent rollouts against one engine and this node's pods, many at once. Plain asyncio, no torch.

Ray runs it as an async actor (`actors`); the deterministic mode and the tests run it in process.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging

from etude.agent.config import AgentConfig
from etude.agent.loop import AgentOptions, run_rollout
from etude.chat.tokenizer import Tokenizer
from etude.coordinator.messages import RolloutJob, RolloutResult
from etude.environments.pod import PodBackend
from etude.inference.client import EngineClient
from etude.records.errors import EtudeError, InfrastructureError
from etude.records.rollout import Rollout
from etude.records.task import Task
from etude.rl.config import RLConfig
from etude.tasks.archive import TaskSet

log = logging.getLogger(__name__)


class BlobBox:
    """Keeps what one rollout hands out of line until its record says which of it training needs."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def put(self, data: bytes) -> str:
        """Blob sink of the agent loop: keeps the bytes, returns their sha256 hex."""
        digest = hashlib.sha256(data).hexdigest()
        self.kept[digest] = data
        return digest

    def needed_by(self, rollout: Rollout) -> dict[str, bytes]:
        """Masks and routes of every generation: a swap may have left a turn's routes no prefix of the next one's."""
        needed: dict[str, bytes] = {}
        for generation in rollout.generations:
            for blob in (generation.masks, generation.routes):
                if blob is not None and blob.digest in self.kept:
                    needed[blob.digest] = self.kept[blob.digest]
        return needed


class Worker:
    """Runs jobs, at most `limit` at once. `fixed_clock` stands for every clock in deterministic runs."""

    def __init__(
        self,
        *,
        tasks: TaskSet,
        tokenizer: Tokenizer,
        engine: EngineClient,
        pods: PodBackend,
        agent: AgentConfig,
        rl: RLConfig,
        limit: int,
        fixed_clock: bool = False,
    ) -> None:
        self._tasks, self._tokenizer, self._engine, self._pods = tasks, tokenizer, engine, pods
        self._agent, self._rl, self._fixed_clock = agent, rl, fixed_clock
        self._room = asyncio.Semaphore(limit)

    def task(self, task_id: str) -> Task:
        """The task of this worker's set with that id."""
        return self._tasks.get(task_id)

    async def run(self, job: RolloutJob) -> RolloutResult:
        """Runs one rollout to its end. Raises IntegrityError and BadInput as they are, anything unforeseen as InfrastructureError."""
        box = BlobBox()
        agent = self._agent
        if job.temperature is not None:
            agent = agent.model_copy(update={"temperature": job.temperature})
        if job.force_retry:
            agent = agent.model_copy(update={"force_retry": True})
        options = AgentOptions(config=agent, rl=self._rl, blob_sink=box.put)
        if self._fixed_clock:
            options = AgentOptions(
                config=agent, rl=self._rl, blob_sink=box.put, clock=lambda: 0.0, unix_time=lambda: 0.0
            )
        async with self._room:
            try:
                rollout = await run_rollout(
                    self._tasks.get(job.task_id),
                    attempt=job.attempt,
                    seed=job.seed,
                    engine=self._engine,
                    pods=self._pods,
                    tokenizer=self._tokenizer,
                    options=options,
                )
            except EtudeError:
                raise
            except Exception as error:  # a fault of one rollout never takes the job down: it is tried again, then void
                log.exception("rollout of %s, attempt %d, broke", job.task_id, job.attempt)
                raise InfrastructureError(f"rollout broke: {type(error).__name__}: {error}") from error
        return RolloutResult(rollout=rollout, blobs=box.needed_by(rollout) if job.keep_blobs else {})
