"""Digests of weights: what a trainer records for a version is what an engine must find in the tensors it reads.

A tensor's digest covers its name, dtype, shape and bytes, so that a cast, a transpose or a swap of two names shows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from etude.weightsync.bits import Bits, dtype_name, to_bits
from etude.weightsync.chain import root_of


def tensor_digest(name: str, tensor: torch.Tensor) -> str:
    """sha256 hex over name, dtype, shape and little-endian bytes of a tensor (any device, any strides)."""
    return bits_digest(name, dtype_name(tensor.dtype), tuple(tensor.shape), to_bits(tensor))


def bits_digest(name: str, dtype: str, shape: tuple[int, ...], bits: Bits) -> str:
    """`tensor_digest` of a tensor given as its flat bit patterns."""
    found = hashlib.sha256(f"{name}\n{dtype}\n{','.join(map(str, shape))}\n".encode())
    found.update(bits.data)
    return found.hexdigest()


def root_digest(tensors: Mapping[str, torch.Tensor | str]) -> str:
    """Digest of a whole state: sha256 hex over the sorted names and their tensor digests.

    A value may be a tensor or its `tensor_digest`, computed before. Aliased names count as tensors of their own.
    """
    return root_of({name: t if isinstance(t, str) else tensor_digest(name, t) for name, t in tensors.items()})
