"""`AgentPod`: a pod as its users hold it, over a link to its agent. The same for every backend.

A backend gives it the link, what counts out-of-memory kills and what ends the pod; it knows of no process itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from etude.environments import protocol
from etude.environments.pod import DEFAULT_ENV, FILE_LIMIT, OUTPUT_LIMIT, ExecResult, FileStat, PodRefused, PodSpec
from etude.records.errors import InfrastructureError, PodLost

QUICK_S = 30.0
"""Bound on a request that runs no command of the policy."""
SLACK_S = 5.0
"""What the agent may take beyond a command's own timeout before the pod counts as lost."""
SIGKILL = 9


class AgentPod:
    """See `etude.environments.pod.Pod`."""

    def __init__(
        self,
        pod_id: str,
        spec: PodSpec,
        link: protocol.Link,
        *,
        oom_kills: Callable[[], int],
        end: Callable[[], Awaitable[None]],
    ) -> None:
        self._id, self._spec, self.link = pod_id, spec, link
        self._oom_kills, self._end = oom_kills, end
        self._numbers = itertools.count(1)
        self._oom_seen = 0

    @property
    def id(self) -> str:
        return self._id

    @property
    def spec(self) -> PodSpec:
        return self._spec

    def _next(self) -> str:
        return f"{self._id}.{next(self._numbers)}"

    async def greet(self, timeout_s: float) -> protocol.HelloReply:
        """Says hello and places the files, in one message. Raises InfrastructureError when the agent speaks another version."""
        spec = self._spec
        hello = protocol.Hello(
            id=self._next(),
            version=protocol.PROTOCOL,
            workdir=spec.workdir,
            env={**DEFAULT_ENV, **spec.env},
            files=[(path, spec.modes.get(path, 0o644), data) for path, data in spec.files.items()],
        )
        try:
            return await self.link.request(hello, protocol.HelloReply, timeout_s)
        except PodRefused as refusal:
            raise InfrastructureError(f"pod {self._id} does not start: {refusal}") from refusal

    def _out_of_memory(self) -> bool:
        kills = self._oom_kills()
        rose = kills > self._oom_seen
        self._oom_seen = kills
        return rose

    def _result(self, reply: protocol.ExecReply) -> ExecResult:
        clean = reply.exit_code == 0 and not reply.timed_out
        return ExecResult(
            exit_code=reply.exit_code,
            signal=reply.signal,
            timed_out=reply.timed_out,
            out_of_memory=not clean and self._out_of_memory(),
            stdout=reply.stdout,
            stderr=reply.stderr,
            dropped_stdout=reply.dropped_stdout,
            dropped_stderr=reply.dropped_stderr,
            duration_s=reply.duration_us / 1e6,
            channel=reply.channel,
            dropped_channel=reply.dropped_channel,
        )

    async def exec(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float = 30.0,
        output_limit: int = OUTPUT_LIMIT,
        channel_limit: int = 0,
        merge_output: bool = False,
        request_id: str | None = None,
    ) -> ExecResult:
        """See Pod.exec. `merge_output` sends stderr where stdout goes, in the order of writing."""
        message = protocol.Exec(
            id=request_id or self._next(),
            argv=list(argv),
            cwd=cwd or "",
            env=dict(env or {}),
            stdin=stdin,
            timeout_ms=max(1, round(timeout_s * 1000)),
            output_limit=output_limit,
            channel_limit=channel_limit,
            merge=merge_output,
        )
        return self._result(await self._request(message, protocol.ExecReply, timeout_s + SLACK_S))

    async def _request(self, message: protocol.Request, reply: type[protocol.R], timeout_s: float) -> protocol.R:
        try:
            return await self.link.request(message, reply, timeout_s)
        except PodLost as lost:
            if self._out_of_memory():
                raise PodLost(f"pod {self._id} is gone: out of memory ({self._spec.memory_bytes} bytes)") from lost
            raise

    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        lifetime_s: float = 3600.0,
    ) -> str:
        message = protocol.Exec(
            id=self._next(),
            argv=list(argv),
            cwd=cwd or "",
            env=dict(env or {}),
            stdin=b"",
            timeout_ms=round(lifetime_s * 1000),
            output_limit=OUTPUT_LIMIT,
            channel_limit=0,
            background=True,
        )
        return (await self._request(message, protocol.StartReply, QUICK_S)).handle

    async def attach(self, handle: str) -> tuple[bool, ExecResult]:
        reply = await self._request(protocol.Attach(id=self._next(), handle=handle), protocol.AttachReply, QUICK_S)
        return reply.running, self._result(reply.result)

    async def signal(self, target: str, signal: int) -> None:
        await self._request(protocol.Signal(id=self._next(), target=target, signal=signal), protocol.Empty, QUICK_S)

    async def processes(self) -> protocol.ProcessesReply:
        """Pids in the pod apart from its agent's, and how many of them are zombies."""
        return await self._request(protocol.Processes(id=self._next()), protocol.ProcessesReply, QUICK_S)

    async def read(self, path: str, *, limit: int = FILE_LIMIT) -> bytes:
        return (
            await self._request(protocol.Read(id=self._next(), path=path, limit=limit), protocol.ReadReply, QUICK_S)
        ).data

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        await self._request(protocol.Write(id=self._next(), path=path, data=data, mode=mode), protocol.Empty, QUICK_S)

    async def tar_out(self, paths: Sequence[str]) -> bytes:
        message = protocol.TarOut(id=self._next(), paths=list(paths), limit=FILE_LIMIT)
        return (await self._request(message, protocol.TarOutReply, QUICK_S)).data

    async def tar_in(self, data: bytes) -> list[str]:
        return (await self._request(protocol.TarIn(id=self._next(), data=data), protocol.TarInReply, QUICK_S)).files

    async def stat(self, path: str) -> FileStat:
        reply = await self._request(protocol.Stat(id=self._next(), path=path), protocol.StatReply, QUICK_S)
        return FileStat(reply.kind, reply.size, reply.mode, reply.mtime_ns)

    async def call(
        self,
        tool: str,
        arguments: Mapping[str, object],
        options: Mapping[str, object] | None = None,
        *,
        request_id: str | None = None,
    ) -> dict[str, object]:
        chosen = dict(options or {})
        timeout_ms = chosen.get("timeout_ms")
        bound_s = (timeout_ms / 1000 if isinstance(timeout_ms, int) else 0) + QUICK_S
        message = protocol.Call(id=request_id or self._next(), tool=tool, arguments=dict(arguments), options=chosen)
        reply = await self._request(message, protocol.CallReply, bound_s)
        found: dict[str, object] = msgspec.structs.asdict(reply)
        if reply.error and reply.exit_code != 0 and self._out_of_memory():
            found["oom"] = True
            found["error"] = "out_of_memory"
            found["text"] = f"{reply.text}\nout of memory".lstrip("\n")
        return found

    async def close(self) -> None:
        self.link.abort("the pod was closed")
        await self._end()
