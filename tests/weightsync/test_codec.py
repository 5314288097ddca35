"""The codec gives every bit pattern back, whatever changed, and refuses what is damaged."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from etude.records.errors import IntegrityError
from etude.weightsync.codec import Encoder, Form, apply_part, ranges

SPECIAL_16 = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x0001, 0x8001, 0x7F7F]
SPECIAL_32 = [pattern << 16 for pattern in SPECIAL_16] + [0x7F800001, 0xFFFFFFFF, 1]


def patterns(dtype: type, special: list[int], size: int) -> st.SearchStrategy[np.ndarray]:
    top = np.iinfo(dtype).max
    return hnp.arrays(dtype, size, elements=st.one_of(st.sampled_from(special), st.integers(0, int(top))))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    dtype, special = draw(st.sampled_from([(np.uint8, [0, 255]), (np.uint16, SPECIAL_16), (np.uint32, SPECIAL_32)]))
    size = draw(st.integers(0, 300))
    old = draw(patterns(dtype, special, size))
    kind = draw(st.sampled_from(["all", "few", "none", "ulp"]))
    if kind == "all":
        return old, draw(patterns(dtype, special, size))
    new = old.copy()
    if kind == "few" and size:
        where = draw(st.lists(st.integers(0, size - 1), max_size=6))
        new[where] = draw(patterns(dtype, special, len(where)))
    if kind == "ulp":
        new += draw(hnp.arrays(np.int8, size, elements=st.integers(-2, 2))).astype(dtype)
    return old, new


@settings(max_examples=200, deadline=None)
@given(pairs())
def test_every_bit_pattern_comes_back(pair: tuple[np.ndarray, np.ndarray]) -> None:
    old, new = pair
    encoder = Encoder()
    encoded = encoder.encode("w", old, new)
    assert (encoded is None) == (old.tobytes() == new.tobytes())
    if encoded is not None:
        assert sum(encoded[0].sizes) <= new.nbytes, "never longer than raw"
        target = {"w": old.copy()}
        assert apply_part(encoder.part([encoded]), target) == ["w"]
        assert target["w"].tobytes() == new.tobytes()


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_each_form_is_used_where_it_is_the_smallest(dtype: type) -> None:
    rng = np.random.default_rng(0)
    encoder = Encoder()
    old = rng.integers(0, np.iinfo(dtype).max, 20_000, dtype=dtype)
    sparse, dense, noise = old.copy(), old ^ dtype(3), rng.permutation(old)
    sparse[::50] += dtype(1)
    found = [encoder.encode("w", old, new) for new in (sparse, dense, noise)]
    assert [Form(block.form) for block, _ in found if block] == [Form.SPARSE, Form.XOR, Form.RAW]


def test_gaps_beyond_sixteen_bits_are_exact() -> None:
    old = np.zeros(1 << 18, dtype=np.uint16)
    new = old.copy()
    new[[0, 1, 70_000, (1 << 18) - 1]] = [1, 0xFFFF, 0x8000, 0x7FC0]
    encoder = Encoder()
    encoded = encoder.encode("w", old, new)
    assert encoded is not None and encoded[0].form == Form.SPARSE
    apply_part(encoder.part([encoded]), {"w": old})
    assert (old == new).all()


def test_ranges_of_one_tensor_apply_in_any_order() -> None:
    rng = np.random.default_rng(1)
    old, new = (rng.integers(0, 1 << 16, 1000, dtype=np.uint16) for _ in range(2))
    encoder = Encoder()
    blocks = [encoder.encode("w", old[a:b], new[a:b], a) for a, b in ranges(1000, 170)]
    assert len(blocks) == 6
    apply_part(encoder.part([block for block in reversed(blocks) if block]), {"w": old})
    assert (old == new).all()


def test_bf16_weights_under_a_small_step_shrink_as_measured() -> None:
    rng = np.random.default_rng(2)
    master = rng.normal(0, 0.02, 200_000).astype(np.float32)

    def rounded(x: np.ndarray) -> np.ndarray:
        bits = x.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)

    old, new = rounded(master), rounded(master + 1e-6 * rng.normal(0, 0.23, len(master)).astype(np.float32))
    encoder = Encoder()
    encoded = encoder.encode("w", old, new)
    assert encoded is not None
    assert old.nbytes / len(encoder.part([encoded])) > 80


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_damaged_part_is_an_integrity_error_or_visible_in_the_result(data: st.DataObject) -> None:
    rng = np.random.default_rng(3)
    old = rng.integers(0, 1 << 16, 400, dtype=np.uint16)
    new = old.copy()
    new[::7] += np.uint16(1)
    encoder = Encoder()
    part = bytearray(encoder.part([e for e in [encoder.encode("w", old, new)] if e]))
    if data.draw(st.booleans()):
        part[data.draw(st.integers(0, len(part) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    else:
        part = part[: data.draw(st.integers(0, len(part) - 1))]
    try:
        apply_part(bytes(part), {"w": old})
    except IntegrityError:
        return
    assert old.shape == new.shape  # never another exception, never out of bounds: the digests above see wrong values


def test_a_part_for_another_layout_is_refused() -> None:
    encoder = Encoder()
    encoded = encoder.encode("w", np.zeros(8, np.uint16), np.ones(8, np.uint16))
    assert encoded is not None
    part = encoder.part([encoded])
    for targets in ({}, {"v": np.zeros(8, np.uint16)}, {"w": np.zeros(7, np.uint16)}, {"w": np.zeros(8, np.uint32)}):
        with pytest.raises(IntegrityError, match="w"):
            apply_part(part, targets)
