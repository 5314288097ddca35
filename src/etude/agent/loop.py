"""The agent loop: one rollout from a task to a scored record (SPEC H1-H3, DESIGN decisions 1 and 4).

Drives `Episode` (pure state), `EngineSession` (tokens) and `Workbench` (the pod) and decides nothing that those know.
What the policy caused is scored; what it cannot cause ends in `StopReason.INFRASTRUCTURE` with its cause, unscored.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from etude.agent.config import AgentConfig
from etude.agent.rewards import BehaviourReward, reward
from etude.agent.session import BlobSink, EngineSession
from etude.agent.state import AgentState, Episode
from etude.agent.tools.registry import MALFORMED, ToolCallFault, ToolSet, refused
from etude.agent.trajectory import Watcher
from etude.agent.verifier import verify
from etude.agent.workbench import Changes, Workbench
from etude.chat.format import CHAT_FORMAT_ID
from etude.chat.parse import Action
from etude.chat.tokenizer import Tokenizer
from etude.environments.pod import PodBackend
from etude.inference.client import EngineClient
from etude.records.errors import BadInput, InfrastructureError
from etude.records.rollout import (
    HARNESS_VERSION,
    CauseClass,
    Generation,
    Rollout,
    StopReason,
    Timings,
    ToolCall,
    Verdict,
)
from etude.records.task import Task
from etude.rl.config import RLConfig


def digest_only(data: bytes) -> str:
    """A blob sink that keeps nothing: the sha256 hex of the bytes."""
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class AgentOptions:
    """What a rollout runs with besides its task.

    `clock` measures seconds and `unix_time` stamps the start; a deterministic run gives constants for both, so that no
    clock enters a decision or a record. `cancel`, once set, ends the rollout as CANCELLED; so does cancelling the
    awaiting task, which gets its CancelledError while `on_cancelled` gets the record.
    """

    config: AgentConfig = field(default_factory=AgentConfig)
    rl: RLConfig = field(default_factory=RLConfig)
    toolset: ToolSet | None = None
    """Overrides the config's tool set for this environment (SPEC H6)."""
    behaviours: tuple[BehaviourReward, ...] = ()
    blob_sink: BlobSink = digest_only
    watcher: Watcher | None = None
    verify: bool = True
    cancel: asyncio.Event | None = None
    on_cancelled: Callable[[Rollout], None] | None = None
    clock: Callable[[], float] = time.monotonic
    unix_time: Callable[[], float] = time.time


def rollout_id(task_id: str, attempt: int, seed: int) -> str:
    """Name of one attempt: the same for the same task, attempt and seed."""
    return hashlib.sha256(f"{task_id}:{attempt}:{seed}".encode()).hexdigest()[:24]


async def run_rollout(
    task: Task,
    *,
    attempt: int,
    seed: int,
    engine: EngineClient,
    pods: PodBackend,
    tokenizer: Tokenizer,
    options: AgentOptions,
    resume: Rollout | None = None,
) -> Rollout:
    """Runs one rollout to its end and scores it. The pod and the engine session are always closed.

    `resume` goes on from the records of an unfinished rollout: its tokens are kept, its changes replayed in a fresh pod
    and compared, its budgets continued.

    Never raises for what a policy, a pod or an engine does: see `stop_reason`, `cause`, `error`. Raises TaskError for
    a task that cannot be shown, BadInput for a config or a `resume` that does not fit, IntegrityError when an invariant broke.
    """
    run = _Run(task, attempt, seed, engine, pods, tokenizer, options)
    if resume is not None:
        run.take_over(resume)
    body = asyncio.ensure_future(run.to_the_end())
    stopped = asyncio.ensure_future(options.cancel.wait()) if options.cancel is not None else None
    try:
        await asyncio.wait([body, *([stopped] if stopped else [])], return_when=asyncio.FIRST_COMPLETED)
        if body.done():
            return body.result()
        body.cancel()
        await asyncio.wait([body])
        if not body.cancelled():
            return body.result()
        return run.record(StopReason.CANCELLED, error="cancelled")
    except asyncio.CancelledError:
        body.cancel()
        await asyncio.wait([body])
        if options.on_cancelled is not None:
            options.on_cancelled(run.record(StopReason.CANCELLED, error="cancelled"))
        raise
    finally:
        if stopped is not None:
            stopped.cancel()


class _Run:
    def __init__(
        self,
        task: Task,
        attempt: int,
        seed: int,
        engine: EngineClient,
        pods: PodBackend,
        tokenizer: Tokenizer,
        options: AgentOptions,
    ) -> None:
        config = options.config
        self.task, self.attempt, self.seed, self.options, self.pods = task, attempt, seed, options, pods
        self.toolset = options.toolset or ToolSet.of(config)
        self.episode = Episode(task, seed=seed, tokenizer=tokenizer, config=config, toolset=self.toolset)
        self.state: AgentState = self.episode.start()
        self.generations: list[Generation] = []
        self.calls: list[ToolCall] = []
        self.changes = Changes()
        self.id = rollout_id(task.id, attempt, seed)
        self.session = EngineSession(
            engine,
            name=self.id,
            vocab_size=tokenizer.vocab_size,
            blob_sink=options.blob_sink,
            idle_s=config.engine_idle_s,
            attempts=config.engine_attempts,
        )
        self.bench = Workbench(
            pods,
            task,
            limits=self.episode.limits,
            tokenizer=tokenizer,
            config=config,
            toolset=self.toolset,
            clock=options.clock,
        )
        self.started_at, self.began = options.unix_time(), options.clock()
        self.engine_s = self.verify_s = 0.0
        self.engine_retries = 0

    def take_over(self, past: Rollout) -> None:
        """Starts where the records end."""
        for field_name, ours in (("id", self.id), ("toolset_id", self.toolset.toolset_id)):
            if getattr(past, field_name) != ours:
                raise BadInput("rollout to resume", field_name, getattr(past, field_name), ours)
        self.state = self.episode.replay(past.generations, past.tool_calls)
        self.generations, self.calls = list(past.generations), list(past.tool_calls)
        self.bench.restore(past.tool_calls)
        self.engine_retries = past.retries

    async def to_the_end(self) -> Rollout:
        verdict: Verdict | None = None
        try:
            while self.state.stop is None:
                await self._turn()
            await self.session.close()
            self.changes = await self.bench.changes()
            await self.bench.close()
            if self.options.verify:
                verdict = await self._verify()
        except InfrastructureError as error:
            return self.record(StopReason.INFRASTRUCTURE, error=f"{type(error).__name__}: {error}")
        finally:
            await asyncio.shield(asyncio.ensure_future(self._close()))
        if verdict is not None and verdict.cause is CauseClass.INFRASTRUCTURE:
            return self.record(StopReason.INFRASTRUCTURE, error=f"verifier: {verdict.detail}", verdict=verdict)
        stop = self.state.stop
        assert stop is not None
        return self.record(stop, verdict=verdict)

    async def _close(self) -> None:
        await self.bench.close()
        await self.session.close()

    async def _turn(self) -> None:
        episode, state = self.episode, self.state
        sampling = episode.sampling(state)
        began = self.options.clock()
        sampled = await self.session.sample(
            state.next_ids,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            seed=sampling.seed,
            stop_ids=sampling.stop_ids,
            grammar=episode.grammar(state),
        )
        self.engine_s += self.options.clock() - began
        self.engine_retries += sampled.retries
        generation = Generation(
            index=state.turns,
            prompt_ids=state.next_ids,
            sampled_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            policy_versions=sampled.policy_versions,
            spans=episode.action_spans(state, sampled.token_ids),
            sampling=sampling,
            finish=sampled.finish,
            engine_id=sampled.engine_id,
            chat_format_id=CHAT_FORMAT_ID,
            routes=sampled.routes,
            masks=sampled.masks,
        )
        action = episode.parse(sampled.token_ids)
        if self.options.watcher is not None:
            self.options.watcher.acted(generation, action)
        calls = await self._act(action, generation.index)
        # Kept together, so that a cancelled action leaves records that can be replayed.
        self.generations.append(generation)
        self.calls.extend(calls)
        self.state = episode.after(state, generation, calls)
        if self.options.watcher is not None:
            for call in calls:
                self.options.watcher.answered(call)

    async def _act(self, action: Action, index: int) -> Sequence[ToolCall]:
        if action.error:
            return [refused(ToolCallFault(MALFORMED, action.error), generation=index, name="", arguments={})]
        if not action.calls:
            if action.text:
                return []
            return [refused(ToolCallFault(MALFORMED, "no call"), generation=index, name="", arguments={})]
        left_s = self.episode.remaining(self.state).tool_s
        return await self.bench.run(action.calls, generation=index, time_left_s=left_s)

    async def _verify(self) -> Verdict:
        began = self.options.clock()
        if self.changes.refused:
            detail = "; ".join(f"{path}: {why}" for path, why in sorted(self.changes.refused.items()))
            return Verdict(success=False, passed=0, total=0, detail=detail)
        verdict = await verify(self.task, self.changes.files, self.pods)
        self.verify_s += self.options.clock() - began
        return verdict

    def record(self, stop: StopReason, *, error: str = "", verdict: Verdict | None = None) -> Rollout:
        """The rollout as far as it came."""
        clock = self.options.clock
        outside = stop in (StopReason.INFRASTRUCTURE, StopReason.CANCELLED)
        rollout = Rollout(
            id=self.id,
            task_id=self.task.id,
            attempt=self.attempt,
            seed=self.seed,
            generations=tuple(self.generations),
            tool_calls=tuple(self.calls),
            stop_reason=stop,
            cause=CauseClass.INFRASTRUCTURE if outside else CauseClass.POLICY,
            error=error,
            well_formed=self.state.well_formed,
            verdict=verdict,
            effort=self.state.effort,
            diff={path: data.decode("utf-8", errors="replace") for path, data in sorted(self.changes.files.items())},
            toolset_id=self.toolset.toolset_id,
            harness_version=HARNESS_VERSION,
            backend=self.pods.name,
            retries=self.engine_retries + self.bench.retries,
            timings=Timings(
                started_at=self.started_at,
                pod_s=self.bench.pod_s,
                engine_s=self.engine_s,
                tools_s=self.state.tool_s,
                verify_s=self.verify_s,
                total_s=clock() - self.began,
            ),
        )
        if verdict is None or outside:
            return rollout
        rewards = reward(rollout, self.task, self.options.rl, self.options.behaviours)
        return msgspec.structs.replace(rollout, rewards=rewards)
