"""A local lease on pods: at most `limit` at a time, the others wait in the order they came."""

from __future__ import annotations

import asyncio

from etude.records.errors import InfrastructureError


class PodLease:
    """Counts the pods of one backend. `acquire` waits for a place, `release` gives it back."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError("a lease needs at least one place")
        self.limit = limit
        self.held = 0
        self.waiting = 0
        self.peak = 0
        self._places = asyncio.Semaphore(limit)

    async def acquire(self, timeout_s: float) -> None:
        """Raises InfrastructureError when no pod ends within `timeout_s`."""
        self.waiting += 1
        try:
            await asyncio.wait_for(self._places.acquire(), timeout_s)
        except TimeoutError:
            raise InfrastructureError(
                f"no place for a pod within {timeout_s:g} s: {self.held} of {self.limit} are held"
            ) from None
        finally:
            self.waiting -= 1
        self.held += 1
        self.peak = max(self.peak, self.held)

    def release(self) -> None:
        self.held -= 1
        self._places.release()
