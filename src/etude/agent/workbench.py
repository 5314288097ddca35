"""The pod of one rollout: started at the first call that needs it, rebuilt when lost, closed with the rollout.

Runs the calls of one action in the right order (neighbouring read-only calls together, everything else one by one;
results always in the order of the calls) and hands out what the agent changed. Knows nothing of engines or scores.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from etude.agent.config import AgentConfig
from etude.agent.tools.registry import NOT_RUN, REFUSED, Prepared, ToolCallFault, ToolSet, refused, told
from etude.chat.parse import ParsedCall
from etude.chat.tokenizer import Tokenizer
from etude.environments.pod import Pod, PodBackend, PodRefused, PodSpec
from etude.records.errors import InfrastructureError, PodLost
from etude.records.rollout import ToolCall
from etude.records.task import Limits, Task

CLOSE_S = 30.0
"""Longest wait for a pod to hand out its files, and for it to end."""
_HARNESS_FAULTS = frozenset({"bad_request", "unknown_verb", "no_hello", "version_mismatch", "result_gone"})
"""Refusals by the pod's agent that no tool call of a policy can cause."""


@dataclass(frozen=True)
class Changes:
    """What a rollout left of the files that the verifier may take: new bytes by path, and why others are refused."""

    files: dict[str, bytes] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


class Workbench:
    """Owns at most one pod at a time. `retries` counts rebuilt pods, `pod_s` the seconds of starting them."""

    def __init__(
        self,
        pods: PodBackend,
        task: Task,
        *,
        limits: Limits,
        tokenizer: Tokenizer,
        config: AgentConfig,
        toolset: ToolSet,
        clock: Callable[[], float],
    ) -> None:
        self._pods, self._task, self._limits, self._tokenizer = pods, task, limits, tokenizer
        self._config, self._toolset, self._clock = config, toolset, clock
        self._pod: Pod | None = None
        self._started = 0
        self._done: list[tuple[Prepared, ToolCall]] = []
        self.pod_s = 0.0

    @property
    def retries(self) -> int:
        """Pods beyond the first."""
        return max(0, self._started - 1)

    def restore(self, calls: Sequence[ToolCall]) -> None:
        """Takes over the calls of a rollout's records: the first pod then replays the changes among them."""
        for call in calls:
            prepared = self._toolset.check_arguments(call.name, call.arguments, self._task)
            if isinstance(prepared, Prepared) and prepared.name != "finish" and call.error not in REFUSED:
                self._done.append((prepared, call))

    async def run(self, calls: Sequence[ParsedCall], *, generation: int, time_left_s: float) -> list[ToolCall]:
        """Runs the calls of one action; one record per call, in their order. Raises InfrastructureError.

        Nothing behind `finish` runs, nor what exceeds the config's calls per action.
        """
        results: list[ToolCall | None] = [None] * len(calls)
        batch: list[tuple[int, Prepared]] = []
        spent, finished = 0.0, False

        async def flush() -> None:
            nonlocal spent
            began = self._clock()
            left = time_left_s - spent
            for (position, _), call in zip(batch, await self._together([p for _, p in batch], generation, left)):
                results[position] = call
            spent += self._clock() - began
            batch.clear()

        for position, call in enumerate(calls):
            fault = None
            if finished:
                fault = ToolCallFault(NOT_RUN, "already finished")
            elif position >= self._config.max_calls:
                fault = ToolCallFault(NOT_RUN, f"at most {self._config.max_calls} calls")
            checked = fault or self._toolset.check(call, self._task)
            if isinstance(checked, ToolCallFault):
                results[position] = refused(checked, generation=generation, name=call.name, arguments=call.arguments)
                continue
            if checked.name == "finish":
                await flush()
                finished = True
                results[position] = ToolCall(
                    generation=generation, name="finish", arguments=checked.written, ok=True, result=""
                )
                continue
            if batch and not (checked.read_only and batch[-1][1].read_only):
                await flush()
            batch.append((position, checked))
        await flush()
        return [call for call in results if call is not None]

    async def _together(self, batch: Sequence[Prepared], generation: int, left_s: float) -> list[ToolCall]:
        while batch:
            try:
                await self._open()
                answers = await asyncio.gather(
                    *(self._one(prepared, generation, left_s) for prepared in batch), return_exceptions=True
                )
                calls: list[ToolCall] = []
                for answer in answers:
                    if isinstance(answer, BaseException):
                        raise answer
                    calls.append(answer)
                self._done.extend(zip(batch, calls))
                return calls
            except PodLost as lost:
                await self._abandon(lost)
        return []

    async def _one(self, prepared: Prepared, generation: int, left_s: float) -> ToolCall:
        assert self._pod is not None
        timeout_s = max(0.05, min(self._limits.tool_timeout_s, left_s))
        options = {**self._toolset.options_of(prepared.name), "timeout_ms": int(timeout_s * 1000)}
        began = self._clock()
        reply: dict[str, object]
        try:
            async with asyncio.timeout(timeout_s + self._config.pod_grace_s):
                reply = await self._pod.call(prepared.name, prepared.arguments, options)
        except TimeoutError:
            raise PodLost(f"{prepared.name}: no answer within {timeout_s + self._config.pod_grace_s} s") from None
        except PodRefused as refusal:
            if refusal.error in _HARNESS_FAULTS:
                raise InfrastructureError(f"{prepared.name}: {refusal}") from refusal
            reply = {"ok": False, "error": refusal.error, "text": ""}
        return told(
            prepared,
            reply,
            self._tokenizer,
            self._config,
            generation=generation,
            duration_s=self._clock() - began,
        )

    async def _open(self) -> Pod:
        """The pod; a rebuilt one has replayed every recorded change and answered it alike (DESIGN decision 4)."""
        if self._pod is not None:
            return self._pod
        if self._started >= self._config.pod_attempts:
            raise InfrastructureError(f"pod lost {self._started} times")
        self._started += 1
        began = self._clock()
        spec = PodSpec(
            image=self._task.image,
            files=dict(self._task.environment),
            memory_bytes=self._limits.memory_bytes,
            processes=self._limits.processes,
        )
        try:
            async with asyncio.timeout(self._config.pod_start_s):
                self._pod = await self._pods.create(spec)
        except TimeoutError:
            raise PodLost(f"pod did not start within {self._config.pod_start_s} s") from None
        except InfrastructureError as error:
            raise PodLost(str(error)) from error  # nothing has run in it, so another one may be tried
        finally:
            self.pod_s += self._clock() - began
        for prepared, recorded in self._done:
            if prepared.read_only:
                continue
            again = await self._one(prepared, recorded.generation, self._limits.tool_timeout_s)
            if (again.ok, again.error, again.result) != (recorded.ok, recorded.error, recorded.result):
                raise InfrastructureError(f"replayed {prepared.name} answered differently in a rebuilt pod")
        return self._pod

    async def _abandon(self, cause: PodLost) -> None:
        await self.close()
        if self._started >= self._config.pod_attempts:
            raise PodLost(f"{cause} (pod {self._started} of {self._config.pod_attempts})") from cause

    async def changes(self) -> Changes:
        """What the agent's pod holds of `task.allowed_changes`, where it differs. Raises InfrastructureError.

        Only regular files within the size limit are taken; a link, a directory or a missing file is refused by name.
        """
        if self._pod is None and not self._done:
            return Changes()
        while True:
            try:
                pod = await self._open()
                async with asyncio.timeout(CLOSE_S):
                    return await self._take(pod)
            except TimeoutError:
                await self._abandon(PodLost("reading the changed files took too long"))
            except PodLost as lost:
                await self._abandon(lost)

    async def _take(self, pod: Pod) -> Changes:
        # Nothing that the agent left running may write while its files are read.
        await pod.signal("all", signal.SIGKILL)
        files: dict[str, bytes] = {}
        problems: dict[str, str] = {}
        for path in self._task.allowed_changes:
            original = self._task.environment.get(path)
            try:
                found = await pod.stat(path)
                if found.kind != "file":
                    problems[path] = "not a regular file"
                elif found.size > self._config.changed_file_bytes:
                    problems[path] = f"larger than {self._config.changed_file_bytes} bytes"
                else:
                    data = await pod.read(path, limit=self._config.changed_file_bytes)
                    if data != original:
                        files[path] = data
            except PodRefused as refusal:
                if refusal.error != "not_found" or original is not None:
                    problems[path] = refusal.error.replace("_", " ")
        return Changes(files, problems)

    async def close(self) -> None:
        """Ends the pod, whatever state it is in."""
        pod, self._pod = self._pod, None
        if pod is not None:
            try:
                async with asyncio.timeout(CLOSE_S):
                    await pod.close()
            except (InfrastructureError, TimeoutError):
                pass
