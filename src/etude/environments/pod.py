"""What a pod is to its users: its specification, what a command gave, and the two protocols every backend keeps.

Knows no backend. `Pod` is the handle of a running pod, `PodBackend` makes and ends them; a capability that a backend lacks
is refused by name with `Unsupported`, so callers can ask `backend.capabilities` first. SPEC E, DESIGN decision 11.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from etude.records.errors import EtudeError, Unsupported

DEFAULT_ENV: Mapping[str, str] = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/home",
    "USER": "agent",
    "LC_ALL": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONNOUSERSITE": "1",
    # two runs of one program print one thing, also where the order of a set shows
    "PYTHONHASHSEED": "0",
}
OUTPUT_LIMIT = 1 << 20
FILE_LIMIT = 64 << 20


class PodRefused(EtudeError):
    """The pod's agent answered with a named error (`error`), such as `not_found`, `disk_full` or `unknown_verb`."""

    def __init__(self, error: str, message: str) -> None:
        self.error, self.message = error, message
        super().__init__(error, message)

    def __str__(self) -> str:
        return f"{self.error}: {self.message}"


@dataclass(frozen=True)
class PodSpec:
    """What to start. `files` (relative to `workdir`, or absolute) are there before `create` returns; sizes are bytes, times seconds."""

    image: str = "python-small"
    files: Mapping[str, bytes] = field(default_factory=dict)
    modes: Mapping[str, int] = field(default_factory=dict)
    """Mode of a file of `files`, where it is not 0o644."""
    workdir: str = "/repo"
    memory_bytes: int = 256 << 20
    """Of all processes together; files in the pod have `disk_bytes` on top."""
    processes: int = 64
    """How many processes and threads the pod's commands may have at a time."""
    cpu_s: float = 60.0
    """CPU time that one process may use."""
    cpus: float = 1.0
    """Share of the machine's cores, where the machine can limit it."""
    disk_bytes: int = 64 << 20
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to `DEFAULT_ENV`."""
    hostname: str = "pod"


@dataclass(frozen=True)
class ExecResult:
    """What a command gave. Output is bytes: the head and the tail of what was written, with the count of bytes lost between."""

    exit_code: int | None
    """None when a signal ended it."""
    signal: int | None
    timed_out: bool
    out_of_memory: bool
    stdout: bytes
    stderr: bytes
    dropped_stdout: int
    dropped_stderr: int
    duration_s: float
    channel: bytes = b""
    """What the process wrote to fd 3, out of reach of its stdout and stderr."""
    dropped_channel: int = 0

    @property
    def ok(self) -> bool:
        """It ended by itself with exit code 0."""
        return self.exit_code == 0 and not self.timed_out

    def text(self, stream: str = "stdout") -> str:
        """`stdout` or `stderr` decoded with replacement, with a marker where bytes were dropped."""
        data, dropped = (self.stdout, self.dropped_stdout) if stream == "stdout" else (self.stderr, self.dropped_stderr)
        if not dropped:
            return data.decode("utf-8", "replace")
        head = len(data) - len(data) // 2
        return f"{data[:head].decode('utf-8', 'replace')}\n[{dropped} bytes dropped]\n{data[head:].decode('utf-8', 'replace')}"


@dataclass(frozen=True)
class FileStat:
    """A path in a pod: kind is `file`, `directory`, `symlink` or `other`."""

    kind: str
    size: int
    mode: int
    mtime_ns: int


@dataclass(frozen=True)
class PodStats:
    """What a pod has used so far; None where the machine cannot tell."""

    memory_bytes: int | None
    memory_peak_bytes: int | None
    cpu_s: float | None
    processes: int | None
    out_of_memory_kills: int | None


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do and what it can limit on this machine."""

    isolation: str
    """`namespaces`, `sentry` or `vm`."""
    file_snapshot: bool = False
    memory_snapshot: bool = False
    fork: bool = False
    memory_limit: bool = False
    process_limit: bool = False
    cpu_limit: bool = False
    notices: tuple[str, ...] = ()
    """What works less well on this machine than it could, and what would enable it."""


class Pod(Protocol):
    """A running pod. Every call raises PodLost when the pod is gone and PodRefused when its agent says no.

    `request_id`: a call repeated with the same id gives the first result and runs nothing again.
    """

    @property
    def id(self) -> str: ...

    @property
    def spec(self) -> PodSpec: ...

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
        request_id: str | None = None,
    ) -> ExecResult:
        """Runs a program to its end. A timeout kills all it started and keeps what was written."""
        ...

    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        lifetime_s: float = 3600.0,
    ) -> str:
        """Starts a program in the background; the handle is for `attach` and `signal`. Other commands' timeouts spare it."""
        ...

    async def attach(self, handle: str) -> tuple[bool, ExecResult]:
        """(still running, output so far) of a background program."""
        ...

    async def signal(self, target: str, signal: int) -> None:
        """Signals a background program by its handle, or everything in the pod (`all`)."""
        ...

    async def read(self, path: str, *, limit: int = FILE_LIMIT) -> bytes: ...

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None: ...

    async def tar_out(self, paths: Sequence[str]) -> bytes:
        """A ustar archive of files and directories relative to the workdir."""
        ...

    async def tar_in(self, data: bytes) -> list[str]:
        """Unpacks a ustar archive into the workdir; the paths written."""
        ...

    async def stat(self, path: str) -> FileStat: ...

    async def call(
        self,
        tool: str,
        arguments: Mapping[str, object],
        options: Mapping[str, object] | None = None,
        *,
        request_id: str | None = None,
    ) -> dict[str, object]:
        """Calls a tool of the library in the pod: `{ok, text, error, changed, timed_out, oom, dropped}`."""
        ...

    async def close(self) -> None:
        """Ends the pod and takes away all it had; safe to call twice."""
        ...


class PodBackend(Protocol):
    """Makes pods of one kind."""

    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> Capabilities: ...

    async def create(self, spec: PodSpec) -> Pod:
        """Starts a pod; returns when its agent has said hello and the files are in. Raises InfrastructureError."""
        ...

    async def destroy(self, pod: Pod) -> None: ...

    async def stats(self, pod: Pod) -> PodStats: ...

    async def snapshot(self, pod: Pod) -> str: ...

    async def restore(self, snapshot: str, spec: PodSpec) -> Pod: ...

    async def fork(self, pod: Pod, count: int) -> list[Pod]: ...

    async def aclose(self) -> None:
        """Ends every pod of this backend."""
        ...


def refuse(backend: str, capability: str) -> Unsupported:
    """The error of a backend that names `capability` but does not have it."""
    return Unsupported(f"the {backend} backend has no {capability}; its capabilities say so")
