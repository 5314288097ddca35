"""Router replay with a plausibility filter: the experts that the sampler used, where the trainer's router finds them plausible.

A replayed expert e stays iff its unbiased gate score s_e >= alpha * (smallest unbiased score among the router's own top-k).
The others are replaced by the router's best experts not yet used. Gates are not replayed: the caller computes them from
its own scores. DESIGN decision 10; report section on mixture-of-experts stability.

Shapes: B rows, T columns, M tokens, L layers with a router, k experts a token, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from etude.model.config import ModelConfig
from etude.records.errors import BadInput

_PLACE = "router replay"


@dataclass(frozen=True)
class RouteReplay:
    """Routes to replay in one forward pass."""

    routes_BTLk: Tensor
    """Expert ids, any integer dtype."""
    alpha: float
    """Plausibility threshold in [0, 1]; 0 keeps every replayed expert."""
    valid_BT: Tensor
    """Bool; where False the token goes by its own router and is not counted."""


@dataclass(frozen=True)
class FlatReplay:
    """A checked replay over the tokens that a layout computes."""

    routes_LMk: Tensor
    alpha: float
    valid_M: Tensor


def flatten_replay(
    replay: RouteReplay, config: ModelConfig, rows: int, columns: int, keep_M: Tensor | None
) -> FlatReplay:
    """Check a replay against the model and pick the computed tokens.

    Raises `BadInput` for a wrong shape or alpha and, naming row, position and layer, for an expert out of range or twice.
    """
    shape = (rows, columns, config.num_moe_layers, config.num_experts_per_tok)
    if tuple(replay.routes_BTLk.shape) != shape:
        raise BadInput(_PLACE, "routes_BTLk", tuple(replay.routes_BTLk.shape), f"shape {shape}")
    if tuple(replay.valid_BT.shape) != shape[:2] or replay.valid_BT.dtype is not torch.bool:
        found = f"{replay.valid_BT.dtype} {tuple(replay.valid_BT.shape)}"
        raise BadInput(_PLACE, "valid_BT", found, f"torch.bool {shape[:2]}")
    if not 0.0 <= replay.alpha <= 1.0:
        raise BadInput(_PLACE, "alpha", replay.alpha, "a number from 0 to 1")
    routes_BTLk = replay.routes_BTLk.to(torch.int64)
    ordered = routes_BTLk.sort(-1).values
    outside = (ordered[..., :1] < 0) | (ordered[..., -1:] >= config.n_routed_experts)
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1, keepdim=True)
    bad_BTL = (outside | twice).squeeze(-1) & replay.valid_BT[:, :, None]
    if bool(bad_BTL.any()):
        row, column, layer = bad_BTL.nonzero()[0].tolist()
        value = routes_BTLk[row, column, layer].tolist()
        expected = f"{shape[3]} different experts in [0, {config.n_routed_experts})"
        raise BadInput(_PLACE, f"routes_BTLk[{row}, {column}, {layer}]", value, expected)
    routes_MLk, valid_M = routes_BTLk.flatten(0, 1), replay.valid_BT.flatten()
    if keep_M is not None:
        routes_MLk, valid_M = routes_MLk[keep_M], valid_M[keep_M]
    return FlatReplay(routes_MLk.transpose(0, 1), replay.alpha, valid_M)


def plausible_routes(
    scores_ME: Tensor, own_Mk: Tensor, replayed_Mk: Tensor, alpha: float, valid_M: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply the filter in one layer.

    Args:
        scores_ME: unbiased gate scores. own_Mk: the router's own choice, best first, int64. replayed_Mk: int64.
    Returns: the final experts [M, k] int64, kept ones in the places they were replayed in and fillers in the freed places,
        best first; and the number of replaced experts (int64 scalar) over the tokens where `valid_M`.
    """
    k = own_Mk.shape[1]
    threshold_M1 = alpha * scores_ME.gather(1, own_Mk).min(1, keepdim=True).values
    safe_Mk = torch.where(valid_M[:, None], replayed_Mk, own_Mk)
    stays_Mk = scores_ME.gather(1, safe_Mk) >= threshold_M1
    # At least as many of the own top-k are unused as were removed, so the best unused expert is always among them.
    used_Mk = ((own_Mk[:, :, None] == safe_Mk[:, None, :]) & stays_Mk[:, None, :]).any(2)
    unused_first = own_Mk.gather(1, used_Mk.to(torch.uint8).argsort(dim=1, stable=True))
    rank_Mk = ((~stays_Mk).cumsum(1) - 1).clamp_(0, k - 1)
    chosen = torch.where(stays_Mk, safe_Mk, unused_first.gather(1, rank_Mk))
    # A row without validity is its own router's even if alpha is above 1 or a score is not a number.
    chosen = torch.where(valid_M[:, None], chosen, own_Mk)
    return chosen, (~stays_Mk & valid_M[:, None]).sum()
