"""Starts, watches and ends one engine process (`python -m etude.inference.server`). Plain asyncio, no torch here."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import msgspec

from etude.inference.config import InferenceConfig
from etude.records.errors import BadInput, EngineError, MissingCapability

_START_S = 120.0
_STOP_S = 10.0

# One arena-friendly allocator setting: without it every large temporary of a CPU forward is mapped and faulted in anew.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "2000000000",
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
    "MALLOC_TOP_PAD_": "268435456",
}


class ReadyLine(msgspec.Struct, frozen=True):
    """What a starting engine announces."""

    url: str
    engine_id: str
    digest: str


class EngineProcess:
    """A running engine. `url` is where it listens."""

    def __init__(self, process: asyncio.subprocess.Process, ready: ReadyLine, log: Path) -> None:
        self._process, self._log = process, log
        self.url, self.engine_id, self.digest = ready.url, ready.engine_id, ready.digest

    @classmethod
    async def start(cls, config: InferenceConfig, log: Path) -> EngineProcess:
        """Starts the process and waits until it serves. Raises BadInput for what the engine calls bad input, else EngineError."""
        arguments = [f"--{'run' if key == 'run_prefix' else key.replace('_', '-')}={value}" for key, value in config]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as sink:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "etude.inference.server",
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=sink,
                env={**os.environ, **ALLOCATOR, "OMP_NUM_THREADS": str(config.threads)},
                preexec_fn=_die_with_parent,
            )
        assert process.stdout is not None
        try:
            line = await asyncio.wait_for(process.stdout.readline(), _START_S)
            return cls(process, msgspec.json.decode(line, type=ReadyLine), log)
        except (TimeoutError, msgspec.DecodeError) as error:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            code = await process.wait()
            tail = log.read_text(errors="replace").strip().splitlines()[-1:] or ["nothing said"]
            if code == 2:
                raise _bad_input(tail[0], config) from error
            raise EngineError(f"engine did not start (exit {code}; see {log}): {tail[0]}") from error

    @property
    def alive(self) -> bool:
        """The process has not ended."""
        return self._process.returncode is None

    async def stop(self) -> None:
        """Asks the engine to end, then makes it."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


def _bad_input(line: str, config: InferenceConfig) -> BadInput:
    place, _, rest = line.removeprefix("error: ").partition(": ")
    field, _, tail = rest.partition(" is ")
    value, _, expected = tail.partition("; expected ")
    kind = MissingCapability if field == "port" else BadInput
    return kind(place or config.model, field or "engine", value, expected or "an engine that starts")


def _die_with_parent() -> None:
    """The engine ends when the process that started it is killed (Linux), and is not stopped by the terminal's Ctrl-C."""
    os.setsid()
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
