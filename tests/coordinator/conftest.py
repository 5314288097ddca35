"""One small run in process: real tokenizer, model, engine, trainer, chain and store; pods real or in memory.

The policy is either free (random weights) or scripted: forced ids with the model's own log-probabilities.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from etude.agent.config import AgentConfig
from etude.agent.loop import rollout_id
from etude.chat.format import FIELD_TOKENS, TOOL_TOKENS
from etude.chat.grammar import Grammar
from etude.chat.tokenizer import Tokenizer
from etude.coordinator.config import CoordinatorConfig
from etude.coordinator.entries import GroupSealed, Record
from etude.coordinator.groups import GroupArchive
from etude.coordinator.ledger import LedgerObject, _unpack
from etude.coordinator.messages import Published, StepReport, TrainerHandle, WorkerHandle
from etude.coordinator.metrics import Row
from etude.coordinator.run import RUN_PREFIX, Outcome, TrainingRun
from etude.coordinator.seeds import rollout_seed
from etude.coordinator.trainer_service import TrainerService
from etude.coordinator.worker import Worker
from etude.environments.backends.namespace import NamespaceBackend
from etude.environments.pod import FileStat, PodSpec
from etude.inference.client import EngineClient, LocalEngineClient
from etude.inference.config import EngineConfig
from etude.inference.engine import Engine
from etude.inference.sampler import Sampler, SampleRow, ScriptedSampler
from etude.model.checkpoint import load_pretrained, save_pretrained
from etude.model.config import ModelConfig
from etude.model.decoder import Decoder
from etude.records.errors import MissingCapability
from etude.records.rollout import Group, decode_group
from etude.records.task import Limits, Split, Task
from etude.rl.config import RLConfig
from etude.tasks.archive import TaskSet
from etude.tasks.make import driver_text
from etude.trainer.config import TrainerConfig
from etude.weightsync.config import WeightSyncConfig
from etude.weightsync.store import ObjectStore, open_store
from etude.weightsync.subscriber import Subscriber

torch.set_num_threads(1)

WEIGHTS = "weights"
BOUND_S = 120.0
"""Longest a small run may take, so that a deadlock is a failure."""
CACHE = Path(__file__).parents[2] / ".cache"
BROKEN = "def shift(x):\n    return x - {k}\n"
CHECK = (
    "from m import shift\n"
    "got = shift(5)\n"
    "print('ok' if got == {want} else f'shift(5) -> {{got}}, want {want}')\n"
    "raise SystemExit(got != {want})\n"
)


def make_task(number: int) -> Task:
    """`shift` should add `number + 2` and subtracts it; one visible and two hidden cases."""
    k = number + 2
    broken = BROKEN.format(k=k)
    cases = {"module": "m", "function": "shift", "visible": [["5", f"{5 + k}"]]}
    cases["hidden"] = [["0", f"{k}"], ["-1", f"{k - 1}"]]
    return Task(
        id=hashlib.sha256(f"shift {k}".encode()).hexdigest(),
        name=f"shift-{k}",
        instruction=f"fix shift in m.py: shift(5) returned {5 - k}, expected {5 + k}",
        split=Split.RL,
        environment={"m.py": broken.encode(), "check.py": CHECK.format(want=5 + k).encode()},
        tests={"cases.json": json.dumps(cases).encode(), "driver.py": driver_text().encode()},
        solution={"m.py": broken.replace("-", "+").encode()},
        allowed_changes=("m.py",),
        viewed_files=("m.py",),
        limits=Limits(max_turns=5, max_sampled_tokens=160, max_context_tokens=500),
    )


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([inspect.getsource(textwrap), BROKEN * 3, CHECK * 3] * 2, vocab_size=600)


@pytest.fixture(scope="session")
def model_folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save(folder / "tokenizer")
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        n_routed_experts=6,
        num_experts_per_tok=2,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        max_position_embeddings=512,
        initializer_range=0.1,
    )
    decoder = Decoder(config)
    decoder.reset_parameters(torch.Generator().manual_seed(0))
    files = {path.name: path.read_bytes() for path in (folder / "tokenizer").iterdir()}
    save_pretrained(decoder, folder / "policy", tokenizer_files=files)
    return folder / "policy"


class Actions:
    """Actions as token ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def call(self, name: str, **fields: str) -> tuple[int, ...]:
        ids = [self._tokenizer.special[TOOL_TOKENS[name]]]
        for key, value in fields.items():
            ids += [self._tokenizer.special[FIELD_TOKENS[key]], *self._tokenizer.encode(value)]
        return (*ids, self._tokenizer.end_id)

    def edit(self, task: Task, sign: str) -> tuple[int, ...]:
        """Changes the sign in front of the task's number; `+` is right."""
        k = task.name.split("-")[1]
        return self.call("edit_file", old=f" - {k}", new=f" {sign} {k}")

    @property
    def run(self) -> tuple[int, ...]:
        return self.call("run")

    @property
    def finish(self) -> tuple[int, ...]:
        return self.call("finish")


@pytest.fixture
def actions(tokenizer: Tokenizer) -> Actions:
    return Actions(tokenizer)


Plan = Callable[[Task, int], Sequence[Sequence[int]]]
"""(task, place) -> the actions of that rollout, turn by turn."""


class Script:
    """Forces every rollout of a run, and of its probes, through its plan."""

    def __init__(self, plan: Plan, tasks: Sequence[Task], places: int, seed: int) -> None:
        self._plans = {
            rollout_id(task.id, place, rollout_seed(seed, name, place)): plan(task, place)
            for task in tasks
            for name in (task.id, f"probe:{task.id}")
            for place in range(places)
        }

    def __call__(self, row: SampleRow) -> int:
        return self._plans[row.session_id.split("-")[0]][row.turn][row.index]


class MemoryPod:
    """The files of one pod. Runs the code of scripted rollouts right here."""

    def __init__(self, backend: MemoryPods, files: Mapping[str, bytes]) -> None:
        self.backend, self.files, self.original = backend, dict(files), dict(files)

    def _outcome(self, argument: str) -> str:
        scope: dict[str, object] = {}
        exec(self.files["m.py"].decode(), scope)
        return repr(eval(f"shift({argument})", scope))

    async def call(self, tool: str, arguments: dict[str, str], options: dict[str, object]) -> dict[str, object]:
        await self.backend.on_call(self)
        if tool == "edit_file":
            text = self.original["m.py"].decode()
            self.files["m.py"] = text.replace(arguments["old"], arguments["new"]).encode()
            return {"ok": True, "text": "ok", "changed": True}
        want = self.files["check.py"].decode().split("want ")[1].split("'")[0]
        got = self._outcome("5")
        if got == want:
            return {"ok": True, "text": "ok"}
        return {"ok": False, "error": "failed", "text": f"shift(5) -> {got}, want {want}"}

    async def exec(self, argv: Sequence[str], *, stdin: bytes, **options: object) -> SimpleNamespace:
        question = json.loads(stdin)
        answers = json.dumps([self._outcome(argument) for argument in question["inputs"]])
        channel = f"{question['nonce']}\n{answers}".encode()
        return SimpleNamespace(exit_code=0, signal=None, timed_out=False, out_of_memory=False, channel=channel)

    async def stat(self, path: str) -> FileStat:
        return FileStat("file", len(self.files[path]), 0o644, 0)

    async def read(self, path: str, *, limit: int) -> bytes:
        return self.files[path]

    async def signal(self, target: str, signal: int) -> None:
        pass

    async def close(self) -> None:
        self.backend.alive.discard(self)


async def _nothing(*_: object) -> None:
    pass


@dataclass
class MemoryPods:
    """A backend without processes. The hooks are awaited before each start and each tool call."""

    on_create: Callable[[PodSpec], Awaitable[None]] = _nothing
    on_call: Callable[[MemoryPod], Awaitable[None]] = _nothing
    alive: set[MemoryPod] = field(default_factory=set)
    name: str = "memory"

    async def create(self, spec: PodSpec) -> MemoryPod:
        await self.on_create(spec)
        pod = MemoryPod(self, spec.files)
        self.alive.add(pod)
        return pod


class LocalTrainer:
    """The trainer in this process; what Ray carries as bytes goes through the same bytes."""

    def __init__(self, service: TrainerService) -> None:
        self.service = service

    async def publish_first(self) -> Published:
        return msgspec.msgpack.decode(await asyncio.to_thread(self.service.publish_first), type=Published)

    async def step(self, groups: Sequence[bytes], blobs: dict[str, bytes], policy_version: int) -> StepReport:
        data = await asyncio.to_thread(self.service.step, groups, blobs, policy_version)
        return msgspec.msgpack.decode(data, type=StepReport)

    async def published(self, policy_version: int) -> Published:
        return msgspec.msgpack.decode(await asyncio.to_thread(self.service.published, policy_version), type=Published)

    async def save(self, folder: str) -> None:
        await asyncio.to_thread(self.service.save, folder)


@dataclass
class SmallRun:
    """A run ready to go and everything in it."""

    run: TrainingRun
    tasks: list[Task]
    engine: Engine
    service: TrainerService
    store: ObjectStore
    folder: Path
    rows: list[Row]

    async def outcome(self) -> Outcome:
        """Runs it to its end."""
        async with asyncio.timeout(BOUND_S):
            return await self.run.run()

    def objects(self) -> list[LedgerObject]:
        """The ledger as it lies in the store, in order."""
        keys = self.store.list(f"{RUN_PREFIX}/ledger")
        return [_unpack(self.store.get(key), LedgerObject, key) for key in keys]

    def records(self) -> list[Record]:
        return [record for entry in self.objects() for record in entry.records]

    def groups(self) -> list[tuple[Group, dict[str, bytes]]]:
        """Every sealed group and its arrays, in the order sealed."""
        archive = GroupArchive(self.store, RUN_PREFIX)
        found = [archive.load(record.digest) for record in self.records() if isinstance(record, GroupSealed)]
        return [(decode_group(stored.record), stored.blobs) for stored in found]

    def weights(self, manifest_key: str) -> dict[str, torch.Tensor]:
        """A version as any receiver gets it from the store."""
        return Subscriber(self.store, WEIGHTS).fetch(manifest_key)[1]


@pytest.fixture
def small_run(model_folder: Path, tokenizer: Tokenizer) -> Callable[..., AbstractAsyncContextManager[SmallRun]]:
    """`async with small_run(folder, tasks=4, plan=..., steps=2, ...) as it`: a `SmallRun` of `tasks` prompts.

    `plan` None leaves the policy free. The `around_...` may wrap what the run loop is given.
    """

    @asynccontextmanager
    async def opened(
        folder: Path,
        *,
        tasks: int = 4,
        plan: Plan | None = None,
        pods: object = None,
        group_size: int = 2,
        probes: int = 0,
        agent: Mapping[str, object] | None = None,
        around_trainer: Callable[[LocalTrainer], TrainerHandle] = lambda handle: handle,
        around_engine: Callable[[EngineClient], EngineClient] = lambda client: client,
        around_worker: Callable[[Worker], WorkerHandle] = lambda worker: worker,
        around_store: Callable[[ObjectStore], ObjectStore] = lambda store: store,
        on_row: Callable[[SmallRun, Row], None] = lambda it, row: None,
        **coordinator: object,
    ) -> AsyncIterator[SmallRun]:
        settings = {"groups_per_batch": 1, "steps": 2, "seed": 11, **coordinator}
        config = CoordinatorConfig(**settings)
        made = [make_task(number) for number in range(tasks)]
        folder.mkdir(parents=True, exist_ok=True)
        store = open_store(folder / "store")
        script = None if plan is None else Script(plan, made, group_size, config.seed)
        sampler: Sampler | None = None if script is None else ScriptedSampler(script)
        rl = RLConfig(group_size=group_size)
        service = TrainerService(
            model=str(model_folder),
            trainer=TrainerConfig(
                groups=config.groups_per_batch, group_size=group_size, learning_rate=1e-3, kl_beta=0.0
            ),
            weightsync=WeightSyncConfig(),
            store=str(folder / "store"),
            run_prefix=WEIGHTS,
            incarnation=0,
        )
        engine = Engine(
            load_pretrained(model_folder),
            EngineConfig(slots=8, max_session_tokens=512, share_prompts=not config.deterministic),
            grammars=lambda spec: Grammar(spec, tokenizer),
            source=Subscriber(store, WEIGHTS),
            sampler=sampler,
            engine_id="engine",
        )
        rows: list[Row] = []
        with engine:
            client = around_engine(LocalEngineClient(engine))
            worker = Worker(
                tasks=TaskSet.of(made),
                tokenizer=tokenizer,
                engine=client,
                pods=pods if pods is not None else MemoryPods(),  # type: ignore[arg-type]
                agent=AgentConfig(**(agent or {})),
                rl=rl,
                limit=1 if config.deterministic else 8,
                fixed_clock=config.deterministic,
            )

            def heard(row: Row) -> None:
                rows.append(row)
                on_row(it, row)

            run = TrainingRun(
                config=config,
                rl=rl,
                prompts={task.id: task.operator for task in made},
                workers=[around_worker(worker)],
                trainer=around_trainer(LocalTrainer(service)),
                engine=client,
                store=around_store(store),
                run_dir=folder,
                probes=made[:probes],
                on_row=heard,
            )
            it = SmallRun(run, made, engine, service, store, folder, rows)
            try:
                yield it
            finally:
                service.close()

    return opened


@pytest.fixture
def halves(actions: Actions) -> Plan:
    """Even places repair the function, odd ones break it otherwise."""

    def plan(task: Task, place: int) -> Sequence[Sequence[int]]:
        return [actions.edit(task, "*" if place % 2 else "+"), actions.finish]

    return plan


@pytest.fixture
def memory_pods() -> Callable[..., MemoryPods]:
    return MemoryPods


@pytest.fixture
async def real_pods() -> AsyncIterator[NamespaceBackend]:
    try:
        backend = await NamespaceBackend.open(CACHE, max_pods=4)
    except MissingCapability as missing:
        pytest.skip(str(missing))
    yield backend
    await backend.aclose()
