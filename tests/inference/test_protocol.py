"""Frames survive any chunking; faults become the named exceptions; the light modules load no torch."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.inference.client import SessionRoutes
from etude.inference.protocol import (
    EngineFault,
    EngineRefused,
    FaultKind,
    Finish,
    FrameReader,
    GenerateEnd,
    TokenRun,
    encode_frame,
    fault_error,
    prefix_digest,
    routes_digest,
)
from etude.records.errors import BadInput, EngineError, IntegrityError, PrefixMismatch


def _end(routes: np.ndarray, start: int, length: int, digest: str) -> GenerateEnd:
    return GenerateEnd(
        finish=Finish.STOP,
        sampled=1,
        routes_digest=digest,
        routes_start=start,
        routes=routes.tobytes(),
        routes_shape_tail=(2, 3),
        routes_dtype="uint8",
        masks=b"",
        session_length=length,
        engine_id="e",
    )


_MESSAGES = [
    TokenRun([1, 2, 3], [-0.5, -1.25, 0.0], [0, 0, 1]),
    _end(np.zeros((2, 2, 3), np.uint8), 0, 3, "d"),
    EngineFault(FaultKind.BUSY, "no slot"),
]


@given(st.lists(st.integers(1, 50), max_size=30))
def test_frames_are_read_back_whole_from_any_chunks(sizes):
    stream = b"".join(map(encode_frame, _MESSAGES))
    reader, found = FrameReader(), []
    for size in [*sizes, len(stream)]:
        found += reader.feed(stream[:size])
        stream = stream[size:]
    assert found == _MESSAGES


def test_a_frame_of_another_protocol_is_named():
    with pytest.raises(BadInput, match="protocol message"):
        FrameReader().feed((5).to_bytes(4, "little") + b"HTTP/")
    with pytest.raises(BadInput, match="frame length"):
        FrameReader().feed(b"\xff\xff\xff\xff")


def test_every_fault_kind_has_its_exception():
    for kind in FaultKind:
        error = fault_error(EngineFault(kind, "why"))
        assert "why" in str(error)
        if kind is FaultKind.PREFIX_MISMATCH:
            assert isinstance(error, PrefixMismatch)
        elif kind is FaultKind.INTEGRITY:
            assert isinstance(error, IntegrityError)
        else:
            assert isinstance(error, EngineRefused) and isinstance(error, EngineError) and error.kind is kind


def test_the_prefix_digest_is_of_little_endian_uint32():
    import hashlib

    assert prefix_digest([1, 258]) == hashlib.sha256(bytes([1, 0, 0, 0, 2, 1, 0, 0])).hexdigest()


def test_session_routes_join_increments_start_anew_after_a_recompute_and_refuse_other_rows():
    rows = np.random.default_rng(0).integers(0, 9, (7, 2, 3), dtype=np.uint8)
    routes = SessionRoutes()
    assert np.array_equal(routes.add(_end(rows[:4], 0, 5, routes_digest(rows[:4]))), rows[:4])
    assert np.array_equal(routes.add(_end(rows[4:], 4, 8, routes_digest(rows))), rows)
    other = rows[::-1].copy()
    assert np.array_equal(routes.add(_end(other, 0, 8, routes_digest(other))), other)
    with pytest.raises(IntegrityError):
        routes.add(_end(rows[4:], 4, 8, routes_digest(rows)))
    with pytest.raises(IntegrityError, match="begin at row 9"):
        routes.add(_end(rows, 9, 17, "d"))


def test_protocol_and_client_import_neither_torch_nor_ray():
    code = "import sys, etude.inference.client; assert not {'torch', 'ray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
