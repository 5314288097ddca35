"""The weights that an engine serves: the live decoder, a shadow to load the next version into, and proof of both.

A version is loaded off the serving thread into the shadow and becomes live by one assignment between two steps. The
digest is taken over the tensors that the live forward reads, in the family's own names and dtypes, before the first
token of a version and again after its last (DESIGN decisions 7-9). Knows nothing of sessions or of object stores.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch

from etude.model.checkpoint import hf_state, load_hf_state_
from etude.model.decoder import Decoder
from etude.records.errors import IntegrityError
from etude.weightsync.digests import root_digest, tensor_digest


def live_digest(decoder: Decoder) -> str:
    """Root digest of the tensors that the decoder's forward reads.

    Raises IntegrityError when a live tensor is not exactly representable in the published dtype: the digest of rounded
    values would not see it.
    """
    published = hf_state(decoder)
    digests = {}
    for name, exact in hf_state(decoder, dtype=torch.float32).items():
        rounded = published[name]
        if not torch.equal(rounded.to(torch.float32), exact):
            raise IntegrityError(
                f"live tensor {name} holds values that {rounded.dtype} cannot; the digest would not see them"
            )
        digests[name] = tensor_digest(name, rounded)
    return root_digest(digests)


class LiveWeights:
    """The served version. `decoder` is what the forward uses; only the serving thread calls `swap`."""

    def __init__(self, decoder: Decoder, policy_version: int, manifest_key: str = "") -> None:
        self.decoder = decoder.eval().requires_grad_(False)
        self.policy_version, self.manifest_key = policy_version, manifest_key
        self.digest = live_digest(self.decoder)
        self.generation = 0
        """Swaps so far: pages of two generations were made by different weights."""
        self._shadow: Decoder | None = None

    def verify(self) -> None:
        """Raises IntegrityError when the live tensors are not those of the version served."""
        found = live_digest(self.decoder)
        if found != self.digest:
            raise IntegrityError(
                f"live tensors of version {self.policy_version} have digest {found}, not {self.digest}"
            )

    def stage(self, tensors: Mapping[str, torch.Tensor]) -> Decoder:
        """A decoder with those weights, apart from the live one. Raises what the strict load raises."""
        if self._shadow is None:
            self._shadow = copy.deepcopy(self.decoder)
        with torch.no_grad():
            load_hf_state_(self._shadow, dict(tensors))
        return self._shadow

    def swap(self, staged: Decoder, policy_version: int, manifest_key: str, digest: str) -> None:
        """Makes the staged decoder live and proves it.

        Raises IntegrityError, with the old decoder live again, when the outgoing tensors changed while they were served or
        the incoming ones are not those of `digest`.
        """
        self.verify()
        outgoing, self.decoder = self.decoder, staged
        try:
            found = live_digest(self.decoder)
            if found != digest:
                raise IntegrityError(
                    f"version {policy_version} is live with digest {found}; its manifest says {digest}"
                )
        except IntegrityError:
            self.decoder = outgoing
            raise
        self._shadow = outgoing
        self.generation += 1
        self.policy_version, self.manifest_key, self.digest = policy_version, manifest_key, digest
