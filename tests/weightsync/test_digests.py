"""A digest sees every bit, and name, dtype and shape."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.weightsync.bits import dtype_name, from_bits, to_bits
from etude.weightsync.digests import root_digest, tensor_digest

torch.set_num_threads(1)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([torch.bfloat16, torch.float32, torch.float64, torch.int8]), st.integers(0, 5), st.data())
def test_one_flipped_bit_changes_the_digest(dtype: torch.dtype, rows: int, data: st.DataObject) -> None:
    tensor = torch.arange(rows * 3).reshape(rows, 3).to(dtype)
    before = tensor_digest("w", tensor)
    assert tensor_digest("w", tensor.t().contiguous().t()) == before, "strides do not matter"
    bits = to_bits(tensor).copy()
    assert torch.equal(from_bits(bits, dtype_name(dtype), (rows, 3)), tensor)
    if bits.size:
        place = data.draw(st.integers(0, bits.size - 1))
        bits[place] ^= bits.dtype.type(1 << data.draw(st.integers(0, 8 * bits.itemsize - 1)))
        assert tensor_digest("w", from_bits(bits, dtype_name(dtype), (rows, 3))) != before


def test_name_dtype_and_shape_are_part_of_the_digest() -> None:
    tensor = torch.zeros(6)
    forms = [("w", tensor), ("v", tensor), ("w", tensor.reshape(2, 3)), ("w", tensor.view(torch.int32))]
    assert len({tensor_digest(name, form) for name, form in forms}) == len(forms)
    assert tensor_digest("s", torch.tensor(0.0)) == tensor_digest("s", torch.tensor(0.0))
    assert tensor_digest("s", torch.tensor(0.0)) != tensor_digest("s", torch.tensor(-0.0))


def test_root_digest_takes_tensors_or_their_digests_in_any_order() -> None:
    a, b = torch.ones(2), torch.zeros(3)
    assert root_digest({"a": a, "b": b}) == root_digest({"b": tensor_digest("b", b), "a": a})
    assert root_digest({"a": a}) != root_digest({"a": a, "b": b})
