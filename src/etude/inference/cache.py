"""Book-keeping of sessions over the static slots of a key/value cache: who holds a slot, what it holds, who goes first.

A session keeps its slot, its ids and the routes of its positions between its turns. A new session may copy the pages of a
prompt that it shares with another one, but only pages made by the weights now served (`generation`, a count of swaps).
Idle sessions give way, least recently used first. Knows nothing of torch, of sampling or of weights.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from etude.inference.jobs import Job

Routes = npt.NDArray[np.unsignedinteger[Any]]

SHARED_TOKENS = 16
"""Shortest common prefix that is worth a copy."""


@dataclass(eq=False, slots=True)
class Session:
    """One conversation in one slot. The first `cached` of `ids` have pages and routes."""

    id: str
    slot: int
    last_used: float
    ids: list[int] = field(default_factory=list)
    cached: int = 0
    delivered: int = 0
    """Route rows that the client has; 0 again when they were made anew."""
    turn: int = 0
    """Generations begun."""
    job: Job | None = None
    """The running or suspended generation."""
    suspended: bool = False
    """The job's client is gone: nothing runs until it comes back, another request comes, or the session is freed."""

    @property
    def idle(self) -> bool:
        """Whether the session may be evicted."""
        return self.job is None or self.suspended

    @property
    def pending(self) -> int:
        """Ids that have no page yet."""
        return len(self.ids) - self.cached


class SessionTable:
    """Sessions by id, in order of last use, and the routes of every slot, [slots, tokens, layers, k].

    `free_pages(slot, keep)` is told whenever a slot must forget its pages from position `keep` on.
    """

    def __init__(
        self,
        slots: int,
        max_tokens: int,
        routes_tail: tuple[int, int],
        routes_dtype: str,
        free_pages: Callable[[int, int], None],
    ) -> None:
        self.slots, self.max_tokens = slots, max_tokens
        self.routes: Routes = np.zeros((slots, max_tokens, *routes_tail), dtype=np.dtype(routes_dtype))
        self._free_pages = free_pages
        self._free = deque(range(slots))
        self._prompts: dict[int, tuple[int, list[int]]] = {}
        """By slot: the generation and ids of its first pages, kept after the session is gone until the slot is taken."""
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    @property
    def free_slots(self) -> int:
        """Slots that hold no session."""
        return len(self._free)

    def get(self, session_id: str) -> Session | None:
        """The session, or None when it was never opened, closed or evicted."""
        return self._sessions.get(session_id)

    def touch(self, session: Session, now: float) -> None:
        """Marks the session as used now."""
        session.last_used = now
        self._sessions.move_to_end(session.id)

    def evictable(self) -> Session | None:
        """The idle session used least recently, or None when all are running."""
        return next((session for session in self._sessions.values() if session.idle), None)

    def open(self, session_id: str, now: float) -> Session:
        """A new session in a free slot; the caller has seen to it that there is one."""
        # The slot freed longest ago: the prompts of the others can still be copied.
        session = Session(session_id, self._free.popleft(), now)
        self._prompts.pop(session.slot, None)
        self._free_pages(session.slot, 0)
        self._sessions[session_id] = session
        return session

    def truncate(self, session: Session, length: int) -> None:
        """Forgets the ids from `length` on, and their pages and routes."""
        del session.ids[length:]
        session.delivered = min(session.delivered, max(0, length - 1))
        if session.cached > length:
            session.cached = length
            self._free_pages(session.slot, length)
            if session.slot in self._prompts:
                del self._prompts[session.slot][1][length:]

    def forget_pages(self, session: Session) -> None:
        """Keeps the ids, drops pages and routes: they are made again before the session's next token."""
        session.cached = session.delivered = 0
        self._prompts.pop(session.slot, None)
        self._free_pages(session.slot, 0)

    def remember_prompt(self, session: Session, generation: int) -> None:
        """Notes that the session's pages up to here were all made by the weights of `generation`."""
        self._prompts[session.slot] = (generation, session.ids[: session.cached])

    def shared_prompt(self, session: Session, generation: int) -> tuple[int, int]:
        """(slot, tokens) of the longest prefix of the session's ids with pages of that generation; 0 tokens when none.

        At least one id is left to feed.
        """
        best, slot = 0, -1
        head = session.ids[:SHARED_TOKENS]
        for candidate, (made_by, ids) in self._prompts.items():
            if made_by != generation or candidate == session.slot or ids[:SHARED_TOKENS] != head:
                continue
            limit = min(len(ids), len(session.ids) - 1)
            length = limit
            if ids[:limit] != session.ids[:limit]:
                length = next(i for i, (a, b) in enumerate(zip(ids, session.ids)) if a != b)
            if length > best:
                best, slot = length, candidate
        return (slot, best) if best >= SHARED_TOKENS else (-1, 0)

    def close(self, session: Session) -> None:
        """Forgets the session and frees its slot; its prompt can be copied until the slot is taken."""
        del self._sessions[session.id]
        self._free.append(session.slot)
