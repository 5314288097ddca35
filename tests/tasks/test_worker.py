"""Children of the pool cannot write files or outlive their limits."""

from __future__ import annotations

import os
import time
from pathlib import Path

from etude.tasks.worker import WorkerPool


def _work(job: str) -> str:
    if job == "hang":
        time.sleep(60)
    if job == "burn":
        sum(range(1 << 62))
    if job == "die":
        os._exit(1)
    if job == "memory":
        return str(len(bytearray(1 << 31)))
    if job.startswith("/"):
        with open(job, "w") as file:
            file.write("x" * 10)
            file.flush()
    return job


def test_hanging_dying_greedy_and_writing_jobs_give_none_and_the_rest_go_on(tmp_path: Path) -> None:
    jobs = ["a", "hang", "burn", "b", "die", "memory", str(tmp_path / "file"), "c"]
    with WorkerPool(_work, 2, limit_s=0.5, wall_s=1.5, memory_bytes=1 << 30) as pool:
        results = dict(pool.map(jobs))
        children = [process for process, _ in pool._children]
    assert [results[i] for i in range(8)] == ["a", None, None, "b", None, None, None, "c"]
    assert not (tmp_path / "file").exists() or (tmp_path / "file").read_text() == ""
    assert all(not process.is_alive() for process in children)
