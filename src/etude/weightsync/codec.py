"""The delta codec: what changed between two arrays of bit patterns, exactly, in few bytes.

Per block the smallest of three forms wins: sparse (index gaps and signed ulp steps), XOR with the base, raw bytes. The
first two are split into byte planes, each a zstd frame. Works on unsigned integers only, so that every bit pattern comes
back, NaN payloads included; knows nothing of torch, stores or versions. Measured in `notes/inference.md` A3: the sparse
form takes half the bytes of XOR + zstd. A block is addressed by (tensor name, flat range): any resharding can apply it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
import zstandard

from etude.records.errors import IntegrityError

CODEC_ID = "gap-ulp-zstd-1"
"""Names this format in every manifest; a receiver refuses another."""

BLOCK_ITEMS = 1 << 24
"""Elements of one block at most, so that big tensors spread over parts and gaps fit 32 bits."""

_MAGIC = b"EWD1"
_LEVEL = 1

Bits = np.ndarray[Any, np.dtype[Any]]


class Form(IntEnum):
    """How a block's payload is written."""

    RAW = 0
    """The new bytes as they are."""
    XOR = 1
    """New XOR base, all elements, byte planes."""
    SPARSE = 2
    """Gaps between changed indices, then zigzag differences of the bit patterns (ulps for floats of one sign)."""


class Block(msgspec.Struct, frozen=True, array_like=True):
    """Directory entry of one encoded range [start, start + count) of a flattened tensor; `sizes` are its streams' bytes.

    `changed` elements are stored by a SPARSE block, whose first `gap_planes` streams are the gaps.
    """

    name: str
    start: int
    count: int
    item: int
    form: int
    changed: int
    gap_planes: int
    sizes: tuple[int, ...]


Encoded = tuple[Block, list[bytes]]


class Encoder:
    """Encodes ranges and joins them to parts. Holds a compressor: one thread at a time."""

    def __init__(self) -> None:
        self._zstd = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True)

    def encode(self, name: str, old: Bits, new: Bits, start: int = 0) -> Encoded | None:
        """The block that turns `old` into `new` (equal flat unsigned arrays), or None when nothing changed."""
        where = np.flatnonzero(old != new)
        changed, count = len(where), len(new)
        if not changed:
            return None
        best: list[bytes] = [new.tobytes()]
        form, gap_planes, best_size = Form.RAW, 0, len(best[0])
        if best_size > 32 and changed * 2 <= count:
            gaps = _planes(np.diff(where, prepend=-1).astype(np.uint32) - np.uint32(1))
            frames = [self._squeeze(plane) for plane in gaps + _planes(_zigzag(new[where] - old[where]))]
            if (size := sum(map(len, frames))) < best_size:
                best, form, gap_planes, best_size = frames, Form.SPARSE, len(gaps), size
        if best_size > max(32, new.nbytes // 4):  # not worth the time when the sparse form did well
            frames = [self._squeeze(plane) for plane in _planes(new ^ old, all_of_them=True)]
            if (size := sum(map(len, frames))) < best_size:
                best, form, gap_planes, best_size = frames, Form.XOR, 0, size
        block = Block(name, start, count, new.itemsize, int(form), changed, gap_planes, tuple(map(len, best)))
        return block, best

    def part(self, blocks: Iterable[Encoded]) -> bytes:
        """One object: magic, directory, payloads in the directory's order."""
        taken = list(blocks)
        directory = self._squeeze(msgspec.msgpack.encode([block for block, _ in taken]))
        streams = [stream for _, payload in taken for stream in payload]
        return b"".join([_MAGIC, struct.pack("<I", len(directory)), directory, *streams])

    def _squeeze(self, plane: Bits | bytes) -> bytes:
        return self._zstd.compress(plane if isinstance(plane, bytes) else plane.data)


def ranges(count: int, limit: int = BLOCK_ITEMS) -> list[tuple[int, int]]:
    """[start, stop) pieces of at most `limit` elements."""
    return [(start, min(start + limit, count)) for start in range(0, count, limit)]


def apply_part(data: bytes, targets: Mapping[str, Bits]) -> list[str]:
    """Applies every block of a part in place to the flat arrays in `targets`; returns the names of those changed.

    Raises IntegrityError when the part does not fit the targets or is malformed: the targets are then to be thrown away.
    """
    zstd = zstandard.ZstdDecompressor()
    touched: dict[str, None] = {}
    try:
        blocks, position = _directory(data, zstd)
        for block in blocks:
            streams: list[bytes] = []
            for size in block.sizes:
                streams.append(data[position : position + size])
                position += size
            if position > len(data):
                raise IntegrityError("weight part: ends before its last block")
            target = targets.get(block.name)
            if target is None or block.start < 0 or block.start + block.count > len(target):
                raise IntegrityError(f"weight part: {block.name}[{block.start}:+{block.count}] is outside the state")
            if target.itemsize != block.item:
                raise IntegrityError(
                    f"weight part: {block.name} has {block.item} bytes an element, not {target.itemsize}"
                )
            _apply(block, streams, target[block.start : block.start + block.count], zstd)
            touched[block.name] = None
    except (msgspec.DecodeError, zstandard.ZstdError, struct.error, ValueError, IndexError) as error:
        raise IntegrityError(f"weight part: malformed ({error})") from error
    if position != len(data):
        raise IntegrityError(f"weight part: {len(data) - position} bytes after its last block")
    return list(touched)


def _directory(data: bytes, zstd: Any) -> tuple[list[Block], int]:
    if data[:4] != _MAGIC:
        raise IntegrityError(f"weight part: begins with {data[:4]!r}; expected {_MAGIC!r}")
    (size,) = struct.unpack_from("<I", data, 4)
    packed = data[8 : 8 + size]
    return msgspec.msgpack.decode(zstd.decompress(packed), type=list[Block]), 8 + size


def _apply(block: Block, streams: list[bytes], target: Bits, zstd: Any) -> None:
    if block.form == Form.RAW:
        target[:] = np.frombuffer(streams[0], dtype=target.dtype)
    elif block.form == Form.XOR:
        target ^= _joined([_grow(s, block.count, zstd) for s in streams], target.dtype)
    elif block.form == Form.SPARSE:
        planes = [_grow(s, block.changed, zstd) for s in streams]
        gaps = _joined(planes[: block.gap_planes], np.dtype(np.uint32), block.changed)
        where = np.cumsum(gaps, dtype=np.int64) + np.arange(block.changed)
        target[where] += _unzigzag(_joined(planes[block.gap_planes :], target.dtype, block.changed))
    else:
        raise IntegrityError(f"weight part: {block.name} is written in the unknown form {block.form}")


def _grow(stream: bytes, expected: int, zstd: Any) -> Bits:
    size = zstandard.get_frame_parameters(stream).content_size
    if size != expected:  # checked before anything of that size is allocated
        raise IntegrityError(f"weight part: a stream of {size} elements; expected {expected}")
    return np.frombuffer(zstd.decompress(stream), dtype=np.uint8)


def _planes(values: Bits, all_of_them: bool = False) -> list[Bits]:
    used = values.itemsize if all_of_them else (int(values.max()).bit_length() + 7) // 8
    by_byte = values.view(np.uint8).reshape(-1, values.itemsize)
    return [np.ascontiguousarray(by_byte[:, k]) for k in range(used)]


def _joined(planes: Sequence[Bits], dtype: np.dtype[Any], count: int | None = None) -> Bits:
    if len(planes) > dtype.itemsize:
        raise IntegrityError(f"weight part: {len(planes)} planes for elements of {dtype.itemsize} bytes")
    values = np.zeros(len(planes[0]) if count is None else count, dtype=dtype)
    by_byte = values.view(np.uint8).reshape(-1, dtype.itemsize)
    for k, plane in enumerate(planes):
        by_byte[:, k] = plane
    return values


def _zigzag(steps: Bits) -> Bits:
    bits = 8 * steps.itemsize
    signed = steps.view(f"i{steps.itemsize}")
    return ((signed << 1) ^ (signed >> (bits - 1))).view(steps.dtype)


def _unzigzag(codes: Bits) -> Bits:
    one = codes.dtype.type(1)
    values: Bits = (codes >> one) ^ (~(codes & one) + one)
    return values
