"""Seeds that follow from what is sampled, never from when: the same rollout of the same run draws the same numbers."""

from __future__ import annotations

import hashlib


def rollout_seed(run_seed: int, task_id: str, attempt: int) -> int:
    """Seed of one rollout, in [0, 2**63): hash of (run seed, task id, attempt). DESIGN decision 6."""
    return _seed("rollout", run_seed, task_id, attempt)


def order_seed(run_seed: int) -> int:
    """Seed of the order in which prompts are drawn, in [0, 2**63)."""
    return _seed("order", run_seed)


def _seed(*parts: object) -> int:
    digest = hashlib.sha256("\x00".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
