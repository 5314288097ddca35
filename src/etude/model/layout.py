"""Which tokens a forward pass computes and which of them see each other: whole rows, or packed documents.

The decoder works on a flat list of M tokens; a layout says where they come from, at which position they stand, and
performs causal attention among them. The layout over a key-value cache is in `cache.py`.

Shapes: B rows, T columns, M computed tokens, H heads, K query/key width (nope + rope), V value width, C latent width, N documents,
L longest document.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from etude.records.errors import BadInput


@dataclass(frozen=True)
class LatentHeads:
    """What one layer brings to attention: rotated queries, and keys and values still as latents."""

    q_nope_MHn: Tensor
    q_rope_MHr: Tensor
    latent_MC: Tensor
    k_rope_Mr: Tensor
    """The rotary part of the keys, one for all heads."""
    expansion_HOC: Tensor
    """Matrix of each head from a latent to its key (first nope rows) and value (the others)."""

    def expanded(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys [M, H, K] and values [M, H, V]."""
        q_MHK = torch.cat((self.q_nope_MHn, self.q_rope_MHr), -1)
        return q_MHK, *expand_latents(self.latent_MC, self.k_rope_Mr, self.expansion_HOC, self.q_nope_MHn.shape[-1])


def expand_latents(latent_MC: Tensor, k_rope_Mr: Tensor, expansion_HOC: Tensor, nope: int) -> tuple[Tensor, Tensor]:
    """Keys [M, H, K] and values [M, H, V] of latents."""
    heads, width, _ = expansion_HOC.shape
    k_nope, v_MHV = (
        F.linear(latent_MC, expansion_HOC.flatten(0, 1)).view(-1, heads, width).split((nope, width - nope), -1)
    )
    return torch.cat((k_nope, k_rope_Mr[:, None].expand(-1, heads, -1)), -1), v_MHV


class Layout(Protocol):
    """What the decoder asks of a layout."""

    @property
    def keep_M(self) -> Tensor | None:
        """Flat indices (int64) into the B * T grid of the tokens to compute; None: all of them."""

    @property
    def positions_M(self) -> Tensor:
        """Rotary position of each computed token, int64."""

    def attend(self, layer: int, heads: LatentHeads) -> Tensor:
        """Causal softmax attention with scale K ** -0.5; returns [M, H, V]."""


@dataclass(frozen=True)
class RowLayout:
    """Every row is one document; a token sees its row up to itself, so right padding needs no mask."""

    rows: int
    columns: int
    positions_M: Tensor
    keep_M: Tensor | None = None

    def attend(self, layer: int, heads: LatentHeads) -> Tensor:
        q, k, v = (x.unflatten(0, (self.rows, self.columns)) for x in heads.expanded())
        return causal_attention(q, k, v).flatten(0, 1)


@dataclass(frozen=True)
class DocumentLayout:
    """Documents packed in rows, padding left out: each becomes a row of its own for attention, and comes back."""

    keep_M: Tensor
    positions_M: Tensor
    spread_NL: Tensor
    """For each document and offset the index of its token in M; past a document's end any valid index."""
    back_M: Tensor
    """For each token its flat place in the N * L grid."""

    def attend(self, layer: int, heads: LatentHeads) -> Tensor:
        spread, shape = self.spread_NL.flatten(), self.spread_NL.shape
        q, k, v = (x.index_select(0, spread).unflatten(0, shape) for x in heads.expanded())
        return causal_attention(q, k, v).flatten(0, 1).index_select(0, self.back_M)


def causal_attention(q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor) -> Tensor:
    """Causal softmax attention within each row; returns [B, T, H, V]."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BTHK, v_BTHV))
    return padded_attention(q, k, v, causal=True).transpose(1, 2)


def padded_attention(
    q_BHTK: Tensor, k_BHSK: Tensor, v_BHSV: Tensor, *, causal: bool = False, mask: Tensor | None = None
) -> Tensor:
    """`scaled_dot_product_attention` with K != V: its fused CPU kernel wants equal widths, so the narrow side gets zeros."""
    width, value_width = q_BHTK.shape[-1], v_BHSV.shape[-1]
    if width > value_width:
        v_BHSV = F.pad(v_BHSV, (0, width - value_width))
    elif width < value_width:
        q_BHTK, k_BHSK = (F.pad(x, (0, value_width - width)) for x in (q_BHTK, k_BHSK))
    out = F.scaled_dot_product_attention(q_BHTK, k_BHSK, v_BHSV, attn_mask=mask, is_causal=causal, scale=width**-0.5)
    return out[..., :value_width]


def plan_layout(
    rows: int, columns: int, segments_BT: Tensor | None, positions_BT: Tensor | None, device: torch.device
) -> RowLayout | DocumentLayout:
    """Choose the layout of a training forward.

    Args:
        segments_BT: int64; equal values >= 0 that stand next to each other form a document, -1 is padding. None: every
            row is one document and all its tokens are computed.
        positions_BT: int64 rotary positions; None: counted from 0 in every document.
    Raises: `BadInput` when a segment id occurs in two separate runs of a row, is below -1, or a shape differs.
    """
    for name, tensor in (("segments_BT", segments_BT), ("positions_BT", positions_BT)):
        if tensor is not None and tuple(tensor.shape) != (rows, columns):
            raise BadInput("decoder forward", name, tuple(tensor.shape), f"shape {(rows, columns)} of the ids")
    column_T = torch.arange(columns, device=device)
    if segments_BT is None or not columns or bool((segments_BT == segments_BT[:, :1]).all() & (segments_BT >= 0).all()):
        positions = column_T.expand(rows, columns) if positions_BT is None else positions_BT
        return RowLayout(rows, columns, positions.reshape(-1))
    starts_BT = torch.ones_like(segments_BT, dtype=torch.bool)
    starts_BT[:, 1:] = segments_BT[:, 1:] != segments_BT[:, :-1]
    _check_segments(segments_BT, starts_BT)
    valid = (segments_BT >= 0).flatten()
    keep = valid.nonzero().squeeze(1)
    document_M = (starts_BT.flatten() & valid).cumsum(0)[keep] - 1
    lengths_N = torch.bincount(document_M)
    if not len(lengths_N):
        raise BadInput("decoder forward", "segments_BT", "-1 everywhere", "at least one token that is not padding")
    first_N = lengths_N.cumsum(0) - lengths_N
    offset_M = torch.arange(len(keep), device=device) - first_N[document_M]
    longest = int(lengths_N.max())
    back = document_M * longest + offset_M
    spread = first_N[:, None].expand(-1, longest).reshape(-1).clone()
    spread[back] = torch.arange(len(keep), device=device)
    positions_M = offset_M if positions_BT is None else positions_BT.reshape(-1)[keep]
    return DocumentLayout(keep, positions_M, spread.view(-1, longest), back)


def _check_segments(segments_BT: Tensor, starts_BT: Tensor) -> None:
    if int(segments_BT.min()) < -1:
        raise BadInput("decoder forward", "segments_BT", int(segments_BT.min()), "ids >= 0, or -1 for padding")
    row, column = starts_BT.nonzero(as_tuple=True)
    named = segments_BT[row, column]
    pairs = torch.stack((row, named), 1)[named >= 0]
    distinct, counts = torch.unique(pairs, dim=0, return_counts=True)
    if len(distinct) < len(pairs):
        at, segment = distinct[int(counts.argmax())].tolist()
        raise BadInput("decoder forward", f"segments_BT[{at}]", segment, "each segment id in one run of a row")
