"""Runs untrusted functions in child processes that have little memory, cannot write files, and are killed when silent.

A pool maps jobs over its children in order; a job whose child dies or passes its limit of CPU time gives None and the child
is replaced, so that results do not depend on how busy the machine is; wall time is only a backstop. Deliberately knows
nothing of what a job does.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, Self, TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")

MEMORY_BYTES = 2 << 30


class WorkerPool(Generic[Job, Result]):
    """`with WorkerPool(work, count) as pool: for result in pool.map(jobs)`. `work` must be importable when `method` is
    "spawn" (a fresh interpreter that sees the present environment); "fork" takes any function."""

    def __init__(
        self, work: Callable[[Job], Result], count: int = 2, *, limit_s: float = 8.0, wall_s: float | None = None,
        method: str = "fork", memory_bytes: int = MEMORY_BYTES,
    ) -> None:  # fmt: skip
        self._work, self._count, self._limit_s, self._memory_bytes = work, count, limit_s, memory_bytes
        self._wall_s = 30 * limit_s if wall_s is None else wall_s
        self._context: Any = multiprocessing.get_context(method)
        self._children: list[tuple[Any, Connection]] = []

    def __enter__(self) -> Self:
        self._children = [self._start() for _ in range(self._count)]
        return self

    def __exit__(self, *exc: object) -> None:
        for process, connection in self._children:
            connection.close()
            process.kill()
            process.join()
        self._children = []

    def map(self, jobs: Sequence[Job]) -> Iterator[tuple[int, Result | None]]:
        """Yields (index of the job, result or None) as they end, in no fixed order."""
        waiting = list(range(len(jobs)))[::-1]
        busy: dict[int, tuple[int, float]] = {}
        idle = list(range(self._count))
        while waiting or busy:
            while waiting and idle:
                slot, index = idle.pop(), waiting.pop()
                self._children[slot][1].send(jobs[index])
                busy[slot] = (index, time.monotonic())
            ready = wait([self._children[slot][1] for slot in busy], timeout=0.2)
            for slot, (index, started) in list(busy.items()):
                connection = self._children[slot][1]
                result: Result | None = None
                if connection in ready:
                    try:
                        result = connection.recv()
                    except (EOFError, OSError):
                        self._replace(slot)
                elif time.monotonic() - started > self._wall_s:
                    self._replace(slot)
                else:
                    continue
                del busy[slot]
                idle.append(slot)
                yield index, result

    def _start(self) -> tuple[Any, Connection]:
        here, there = self._context.Pipe()
        process = self._context.Process(
            target=_serve, args=(there, self._work, self._memory_bytes, self._limit_s), daemon=True
        )
        process.start()
        there.close()
        return process, here

    def _replace(self, slot: int) -> None:
        process, connection = self._children[slot]
        connection.close()
        process.kill()
        process.join()
        self._children[slot] = self._start()


def _serve(connection: Connection, work: Callable[[Any], Any], memory_bytes: int, limit_s: float) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # No handler: the kernel ends a job that burns its CPU time, even inside one long C call.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(quiet, descriptor)
    os.chdir("/")
    warnings.simplefilter("ignore")
    sys.setrecursionlimit(400)
    while True:
        try:
            job = connection.recv()
        except (EOFError, OSError):
            return
        result = None
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        with contextlib.suppress(BaseException):
            result = work(job)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send(result)
