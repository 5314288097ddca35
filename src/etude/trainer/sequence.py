"""A rollout as the trainer sees it: rows of token ids, and for each sampled token what it was sampled with.

Turns append to one row, a summary starts a new one; every sampled token of the chain occurs exactly once with
`sampled` set. Checks everything it reads: an array that does not fit stops the run. Knows nothing of models or batches.

Shapes: n ids of a row, s sampled tokens of a row, L MoE layers, k experts a token, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from etude.records.errors import BadInput, IntegrityError
from etude.records.rollout import BlobRef, Generation, Group, Rollout

BlobReader = Callable[[str], bytes]
"""sha256 hex digest -> the raw bytes kept under it."""

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class TokenRow:
    """One stretch of context without a summary in it.

    `routes[p]` are the experts that the sampler used for input position p, valid where `routes_valid[p]`; the last id is
    never an input, so both have n - 1 rows. `masks` are packed bits (numpy.packbits) of the allowed ids, one row for
    each sampled token; rows of tokens sampled without a grammar allow everything.
    """

    ids: Ints
    sampled: npt.NDArray[np.bool_]
    mu: Doubles
    """float64 [n]: log-probability that the sampler recorded; 0 where not sampled."""
    versions: npt.NDArray[np.uint32]
    """uint32 [n]: policy version that the engine stamped; 0 where not sampled."""
    temperature: npt.NDArray[np.float32]
    """float32 [n]: sampling temperature; 1 where not sampled."""
    routes: npt.NDArray[np.unsignedinteger] | None
    """uint8 or uint16 [n - 1, L, k]."""
    routes_valid: npt.NDArray[np.bool_]
    masks: Bytes | None
    """uint8 [s, ceil(V / 8)]."""

    @property
    def length(self) -> int:
        """Number of ids."""
        return len(self.ids)


@dataclass(frozen=True, eq=False)
class TrainSequence:
    """One rollout: its rows in order and the one advantage that applies to every token it sampled."""

    id: str
    group_id: str
    rows: tuple[TokenRow, ...]
    advantage: float

    @property
    def sampled_tokens(self) -> int:
        """Tokens that are trained on, over all rows."""
        return sum(int(row.sampled.sum()) for row in self.rows)

    @property
    def tokens(self) -> int:
        """Ids over all rows."""
        return sum(row.length for row in self.rows)


def group_sequences(group: Group, read_blob: BlobReader) -> tuple[TrainSequence, ...]:
    """All rollouts of a sealed group. Raises BadInput when advantages and rollouts do not pair up."""
    if len(group.advantages) != len(group.rollouts):
        raise BadInput(
            f"group {group.id}", "advantages", len(group.advantages), f"one for each of {len(group.rollouts)} rollouts"
        )
    return tuple(
        rollout_sequence(rollout, advantage, read_blob, group_id=group.id)
        for rollout, advantage in zip(group.rollouts, group.advantages)
    )


def rollout_sequence(rollout: Rollout, advantage: float, read_blob: BlobReader, *, group_id: str = "") -> TrainSequence:
    """The chain of a rollout, checked and concatenated.

    A fork trains only what it sampled itself: `forked_from = (parent, offset)` says that its first `offset` sampled
    tokens (counted over the chain) are its parent's. Raises IntegrityError when a turn does not append to its
    predecessor, when an array does not fit its generation or its digest, or a mask forbids the token sampled under it;
    BadInput when the advantage is not finite. A rollout that sampled nothing is a sequence without tokens.
    """
    place = f"rollout {rollout.id}"
    if not np.isfinite(advantage):
        raise BadInput(place, "advantage", advantage, "a finite number")
    inherited = rollout.forked_from[1] if rollout.forked_from else 0
    rows: list[TokenRow] = []
    for chain in _chains(rollout, place):
        row, inherited = _row(chain, inherited, read_blob, place)
        rows.append(row)
    return TrainSequence(rollout.id, group_id, tuple(rows), float(advantage))


def _chains(rollout: Rollout, place: str) -> list[list[Generation]]:
    """The generations cut at summary links; within a part each prompt begins with all ids before it."""
    parts: list[list[Generation]] = []
    held: tuple[int, ...] = ()
    for generation in rollout.generations:
        name = f"{place} generation {generation.index}"
        if not parts or generation.link == "summary":
            parts.append([])
        elif generation.link != "turn":
            raise IntegrityError(f"{name}: link is {generation.link!r}, not 'turn' or 'summary'")
        elif generation.prompt_ids[: len(held)] != held:
            raise IntegrityError(f"{name}: its prompt does not begin with the {len(held)} ids before it")
        count = len(generation.sampled_ids)
        for field in ("logprobs", "policy_versions"):
            if len(getattr(generation, field)) != count:
                raise IntegrityError(f"{name}: {len(getattr(generation, field))} {field} for {count} sampled ids")
        parts[-1].append(generation)
        held = generation.prompt_ids + generation.sampled_ids
    return parts


def _row(chain: Sequence[Generation], inherited: int, read_blob: BlobReader, place: str) -> tuple[TokenRow, int]:
    last = chain[-1]
    ids = np.asarray(last.prompt_ids + last.sampled_ids, dtype=np.int64)
    n = len(ids)
    sampled = np.zeros(n, dtype=np.bool_)
    mu, temperature = np.zeros(n, dtype=np.float64), np.ones(n, dtype=np.float32)
    versions = np.zeros(n, dtype=np.uint32)
    routes: npt.NDArray[np.unsignedinteger] | None = None
    valid = np.zeros(max(n - 1, 0), dtype=np.bool_)
    masks: list[Bytes | int] = []
    for generation in chain:
        name = f"{place} generation {generation.index}"
        start, count = len(generation.prompt_ids), len(generation.sampled_ids)
        skip = min(inherited, count)
        inherited -= skip
        own = slice(start + skip, start + count)
        if skip < count and start == 0:
            raise IntegrityError(f"{name}: its first token was sampled from an empty prompt")
        sampled[own] = True
        mu[own] = generation.logprobs[skip:]
        versions[own] = generation.policy_versions[skip:]
        temperature[own] = generation.sampling.temperature
        if not np.isfinite(mu[own]).all():
            raise IntegrityError(f"{name}: a recorded log-probability is not finite")
        masks.append(count - skip if generation.masks is None else _masks(generation, read_blob, name)[skip:])
        if generation.routes is not None:
            found = _array(generation.routes, read_blob, f"{name}: routes")
            if found.ndim != 3 or len(found) != start + count - 1 or found.dtype.kind != "u":
                raise IntegrityError(
                    f"{name}: routes are {found.dtype} {found.shape}, not unsigned [{start + count - 1}, layer, k]"
                )
            if routes is None:
                routes = np.zeros((n - 1, *found.shape[1:]), dtype=found.dtype)
            elif routes.shape[1:] != found.shape[1:] or routes.dtype != found.dtype:
                raise IntegrityError(f"{name}: routes are {found.dtype} {found.shape}, unlike earlier generations'")
            # a position keeps the routes under which the tokens after it were first sampled
            new = np.flatnonzero(~valid[: len(found)])
            routes[new], valid[new] = found[new], True
    return TokenRow(ids, sampled, mu, versions, temperature, routes, valid, _join_masks(masks)), inherited


def _masks(generation: Generation, read_blob: BlobReader, name: str) -> Bytes:
    assert generation.masks is not None
    packed = _array(generation.masks, read_blob, f"{name}: masks")
    count = len(generation.sampled_ids)
    if packed.ndim != 2 or len(packed) != count or packed.dtype != np.uint8:
        raise IntegrityError(f"{name}: masks are {packed.dtype} {packed.shape}, not uint8 [{count}, bytes]")
    taken = np.asarray(generation.sampled_ids, dtype=np.int64)
    if count and (taken.max() >= 8 * packed.shape[1] or taken.min() < 0):
        raise IntegrityError(f"{name}: a sampled id lies outside its mask of {8 * packed.shape[1]} ids")
    allowed = (packed[np.arange(count), taken // 8] >> (7 - taken % 8)) & 1
    if not allowed.all():
        at = int(np.flatnonzero(allowed == 0)[0])
        raise IntegrityError(f"{name}: its mask forbids sampled token {at}, id {int(taken[at])}")
    return packed.astype(np.uint8, copy=False)


def _join_masks(parts: Sequence[Bytes | int]) -> Bytes | None:
    """Masks of all sampled tokens; a number stands for that many tokens without one."""
    widths = {part.shape[1] for part in parts if not isinstance(part, int)}
    if not widths:
        return None
    if len(widths) > 1:
        raise IntegrityError(f"masks of one chain have different widths {sorted(widths)}")
    width = widths.pop()
    return np.concatenate([np.full((p, width), 255, np.uint8) if isinstance(p, int) else p for p in parts])


def _array(ref: BlobRef, read_blob: BlobReader, name: str) -> npt.NDArray[np.unsignedinteger]:
    data = read_blob(ref.digest)
    if hashlib.sha256(data).hexdigest() != ref.digest:
        raise IntegrityError(f"{name}: the bytes kept under {ref.digest[:12]} have another digest")
    dtype = np.dtype(ref.dtype)
    if len(data) != dtype.itemsize * int(np.prod(ref.shape, dtype=np.int64)):
        raise IntegrityError(f"{name}: {len(data)} bytes for {ref.dtype} {ref.shape}")
    return np.frombuffer(data, dtype=dtype).reshape(ref.shape)
