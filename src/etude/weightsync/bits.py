"""Tensors as flat arrays of unsigned integers, and back: weights travel and are compared as bit patterns.

Knows nothing of values: a NaN payload or a negative zero is a pattern like any other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from etude.records.errors import IntegrityError

Bits = np.ndarray[Any, np.dtype[Any]]
"""A flat array of uint8, uint16, uint32 or uint64."""

UNSIGNED: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The inverse of `dtype_name`. Raises IntegrityError for a name that is no dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise IntegrityError(f"weights: {name!r} is no dtype")
    return dtype


def item_size(name: str) -> int:
    """Bytes of one element of the dtype of that name."""
    return dtype_named(name).itemsize


def to_bits(tensor: torch.Tensor) -> Bits:
    """Flat unsigned view of a tensor (any shape; CPU and contiguous: no copy, memory is shared)."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.dtype is torch.bool:
        flat = flat.view(torch.uint8)
    size = flat.element_size()
    return flat.view(_SIGNED[size]).numpy().view(UNSIGNED[size])


def from_bits(bits: Bits, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Tensor of that dtype name and shape over the memory of `bits`, which must hold as many elements."""
    signed = bits.view(f"i{bits.itemsize}")
    return torch.from_numpy(signed).view(dtype_named(dtype)).reshape(shape)
