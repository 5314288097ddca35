"""The Ray half of DESIGN's process table: worker, trainer and coordinator as actors, and the fleet that holds them.

Everything that decides lives in plain classes (`worker`, `trainer_service`, `run`); here are only placement, messages as
bytes, and errors carried over. Ray is imported when a fleet starts, so that other rooms stay light.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from etude.agent.config import AgentConfig
from etude.coordinator.config import CoordinatorConfig
from etude.coordinator.engine_process import ALLOCATOR, EngineProcess
from etude.coordinator.messages import Published, RolloutJob, RolloutResult, StepReport
from etude.coordinator.metrics import Row
from etude.coordinator.run import Outcome, Progress, TrainingRun
from etude.environments.config import EnvironmentsConfig
from etude.environments.pod import PodBackend
from etude.inference.client import HttpEngineClient
from etude.inference.config import InferenceConfig
from etude.records.errors import EtudeError, InfrastructureError
from etude.records.rollout import Rollout, decode_rollout, encode
from etude.rl.config import RLConfig
from etude.trainer.config import TrainerConfig
from etude.weightsync.config import WeightSyncConfig
from etude.weightsync.store import open_store

WEIGHTS_PREFIX = "weights"
_NEWS_S = 0.5


async def open_pods(config: EnvironmentsConfig) -> PodBackend:
    """This machine's pods. Raises MissingCapability, whose text says what to enable."""
    return await config.open()


class WorkerActor:
    """Body of a rollout worker process."""

    def __init__(
        self,
        tasks: str,
        model: str,
        engine_url: str,
        agent: AgentConfig,
        rl: RLConfig,
        environments: EnvironmentsConfig,
        limit: int,
        deterministic: bool,
    ) -> None:
        self._tasks, self._model, self._agent, self._rl = tasks, model, agent, rl
        self._environments, self._limit, self._deterministic = environments, limit, deterministic
        self._engine = HttpEngineClient(engine_url)
        self._pods: PodBackend | None = None

    async def ready(self) -> None:
        """Opens the task set and the pods; answers once rollouts can run."""
        from etude.chat.tokenizer import Tokenizer
        from etude.coordinator.worker import Worker
        from etude.tasks.archive import TaskSet

        self._pods = await open_pods(self._environments)
        self._worker = Worker(
            tasks=TaskSet.open(self._tasks),
            tokenizer=Tokenizer.load(self._model),
            engine=self._engine,
            pods=self._pods,
            agent=self._agent,
            rl=self._rl,
            limit=self._limit,
            fixed_clock=self._deterministic,
        )

    async def run(self, job: bytes) -> bytes:
        """See `worker.Worker.run`."""
        return msgspec.msgpack.encode(await self._worker.run(msgspec.msgpack.decode(job, type=RolloutJob)))

    async def close(self) -> None:
        """Ends the pods that are left."""
        if self._pods is not None:
            await self._pods.aclose()
        await self._engine.aclose()


async def answered(reference: Any) -> Any:
    """Awaits a Ray call; our own errors come through as themselves, a lost actor as InfrastructureError."""
    import ray

    try:
        return await reference
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, EtudeError):
            raise error.cause from None
        raise
    except ray.exceptions.RayActorError as error:
        raise InfrastructureError(f"an actor is lost: {error}") from error


class RayWorker:
    """A worker actor as a `WorkerHandle`."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    async def run(self, job: RolloutJob) -> RolloutResult:
        """See `WorkerHandle.run`."""
        reference = self.actor.run.remote(msgspec.msgpack.encode(job))
        try:
            data: bytes = await answered(reference)
        except asyncio.CancelledError:
            import ray

            ray.cancel(reference)
            raise
        return msgspec.msgpack.decode(data, type=RolloutResult)


class RayTrainer:
    """The trainer actor as a `TrainerHandle`."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    async def publish_first(self) -> Published:
        """See `TrainerHandle.publish_first`."""
        return msgspec.msgpack.decode(await answered(self.actor.publish_first.remote()), type=Published)

    async def step(self, groups: Sequence[bytes], blobs: dict[str, bytes], policy_version: int) -> StepReport:
        """See `TrainerHandle.step`."""
        data: bytes = await answered(self.actor.step.remote(list(groups), blobs, policy_version))
        return msgspec.msgpack.decode(data, type=StepReport)

    async def published(self, policy_version: int) -> Published:
        """See `TrainerHandle.published`."""
        return msgspec.msgpack.decode(await answered(self.actor.published.remote(policy_version)), type=Published)

    async def save(self, folder: str) -> None:
        """See `TrainerHandle.save`."""
        await answered(self.actor.save.remote(folder))

    async def close(self) -> None:
        """Finishes publishing."""
        await answered(self.actor.close.remote())


class News(msgspec.Struct, frozen=True, kw_only=True):
    """What a run has to say since it was last asked."""

    rows: tuple[Row, ...]
    progress: Progress


class CoordinatorActor:
    """Body of the coordinator process: one `TrainingRun` over the other actors' handles."""

    def __init__(
        self,
        *,
        config: CoordinatorConfig,
        rl: RLConfig,
        prompts: Mapping[str, str],
        probes: Sequence[str],
        tasks: str,
        workers: Sequence[Any],
        trainer: Any,
        engine_url: str,
        store: str,
        run_dir: str,
    ) -> None:
        self._config, self._rl, self._prompts, self._probes, self._tasks = config, rl, prompts, probes, tasks
        self._workers, self._trainer, self._engine_url = workers, trainer, engine_url
        self._store, self._run_dir = store, run_dir
        self._rows: list[Row] = []
        self._run: TrainingRun | None = None
        self._asked = ""

    async def run(self) -> bytes:
        """Runs to the end; an encoded `Outcome`. See `TrainingRun.run`."""
        from etude.tasks.archive import TaskSet

        engine = HttpEngineClient(self._engine_url)
        tasks = TaskSet.open(self._tasks)
        self._run = TrainingRun(
            config=self._config,
            rl=self._rl,
            prompts=self._prompts,
            workers=[RayWorker(actor) for actor in self._workers],
            trainer=RayTrainer(self._trainer),
            engine=engine,
            store=open_store(self._store),
            run_dir=Path(self._run_dir),
            probes=[tasks.get(task_id) for task_id in self._probes],
            on_row=self._rows.append,
        )
        if self._asked:
            self._run.stop(self._asked)
        try:
            return msgspec.msgpack.encode(await self._run.run())
        finally:
            await engine.aclose()

    async def stop(self, reason: str) -> None:
        """Ends the run after the step at hand."""
        self._asked = reason
        if self._run is not None:
            self._run.stop(reason)

    async def news(self, seen: int) -> bytes:
        """Rows after the first `seen`, and where the run is; an encoded `News`."""
        progress = self._run.progress if self._run is not None else Progress()
        return msgspec.msgpack.encode(News(rows=tuple(self._rows[seen:]), progress=progress))

    async def latest(self) -> list[bytes]:
        """The newest trained rollouts, encoded."""
        return [encode(rollout) for rollout in self._run.latest] if self._run is not None else []


class RayCoordinator:
    """The coordinator actor from the command's side."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    async def run(self, stop: asyncio.Event, on_row: Callable[[Row, Progress], None]) -> Outcome:
        """Runs to the end, telling of each row; `stop` ends it after the step at hand."""
        running = asyncio.ensure_future(answered(self.actor.run.remote()))
        seen, asked = 0, False
        try:
            while True:
                done, _ = await asyncio.wait([running], timeout=_NEWS_S)
                news = msgspec.msgpack.decode(await answered(self.actor.news.remote(seen)), type=News)
                for row in news.rows:
                    on_row(row, news.progress)
                seen += len(news.rows)
                if done:
                    return msgspec.msgpack.decode(running.result(), type=Outcome)
                if stop.is_set() and not asked:
                    asked = True
                    await answered(self.actor.stop.remote("stopped"))
        finally:
            running.cancel()

    async def latest(self) -> list[Rollout]:
        """The newest trained rollouts."""
        return [decode_rollout(data) for data in await answered(self.actor.latest.remote())]


class Fleet:
    """The processes of one run on this machine or cluster: engine, workers and, for training, the trainer."""

    def __init__(self, engine: EngineProcess, workers: list[RayWorker]) -> None:
        self.engine, self.workers = engine, workers
        self.trainer: RayTrainer | None = None

    def coordinator(
        self,
        *,
        config: CoordinatorConfig,
        rl: RLConfig,
        prompts: Mapping[str, str],
        probes: Sequence[str],
        tasks: str,
        store: str,
        run_dir: Path,
    ) -> RayCoordinator:
        """Starts the coordinator actor of a training run over this fleet."""
        import ray

        assert self.trainer is not None, "the fleet was started without a trainer"
        make = ray.remote(CoordinatorActor).options(num_cpus=0, max_concurrency=16)
        return RayCoordinator(
            make.remote(
                config=config,
                rl=rl,
                prompts=dict(prompts),
                probes=list(probes),
                tasks=tasks,
                workers=[worker.actor for worker in self.workers],
                trainer=self.trainer.actor,
                engine_url=self.engine.url,
                store=store,
                run_dir=str(run_dir.resolve()),
            )
        )


@contextlib.asynccontextmanager
async def start_fleet(
    *,
    model: str,
    tasks: str,
    run_dir: Path,
    store: str,
    coordinator: CoordinatorConfig,
    agent: AgentConfig,
    rl: RLConfig,
    environments: EnvironmentsConfig,
    inference: InferenceConfig,
    trainer: TrainerConfig | None,
    weightsync: WeightSyncConfig,
    incarnation: int = 1,
) -> AsyncIterator[Fleet]:
    """Starts Ray (or joins `coordinator.address`), the engine, the workers and the trainer; ends them all on the way out.

    `trainer` None starts no trainer (an evaluation). Raises BadInput for a bad checkpoint or a busy port.
    """
    import ray

    environments = environments.model_copy(update={"cache": environments.cache.resolve()})
    await (await open_pods(environments)).aclose()
    place = {"model": model, "store": store, "run_prefix": WEIGHTS_PREFIX}
    # sharing a prompt between sessions makes a row's last bits depend on who came first
    alone = {"share_prompts": False} if coordinator.deterministic else {}
    engine_config = inference.model_copy(update={**place, **alone})
    engine = await EngineProcess.start(engine_config, run_dir / "logs" / "engine.log")
    fleet = Fleet(engine, [])
    try:
        _start_ray(coordinator.address)
        workers = 1 if coordinator.deterministic else coordinator.rollout_workers
        limit = 1 if coordinator.deterministic else coordinator.rollouts_per_worker
        light = {"env_vars": {**ALLOCATOR, "OMP_NUM_THREADS": "1"}}
        make_worker = ray.remote(WorkerActor).options(num_cpus=0, max_concurrency=limit + 8, runtime_env=light)
        actors = [
            make_worker.remote(tasks, model, engine.url, agent, rl, environments, limit, coordinator.deterministic)
            for _ in range(workers)
        ]
        fleet.workers = [RayWorker(actor) for actor in actors]
        if trainer is not None:
            from etude.coordinator.trainer_service import TrainerService

            make_trainer = ray.remote(TrainerService).options(num_cpus=0, max_concurrency=3, runtime_env=light)
            fleet.trainer = RayTrainer(
                make_trainer.remote(
                    model=model,
                    trainer=trainer,
                    weightsync=weightsync,
                    store=store,
                    run_prefix=WEIGHTS_PREFIX,
                    incarnation=incarnation,
                )
            )
        await asyncio.gather(*(answered(actor.ready.remote()) for actor in actors))
        yield fleet
    finally:
        await _stop(fleet)


async def _stop(fleet: Fleet) -> None:
    import ray

    closing = [worker.actor.close.remote() for worker in fleet.workers]
    if fleet.trainer is not None:
        closing.append(fleet.trainer.actor.close.remote())
    try:
        for reference in closing:
            with contextlib.suppress(InfrastructureError, TimeoutError):  # an actor that is gone needs no closing
                await asyncio.wait_for(asyncio.ensure_future(answered(reference)), 15.0)
    finally:
        await fleet.engine.stop()
        ray.shutdown()


def _start_ray(address: str) -> None:
    import ray

    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 starves the trainer beside engine and pods
    if address:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    else:
        ray.init(
            num_cpus=os.cpu_count(),
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=256 << 20,
        )
