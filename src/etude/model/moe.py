"""The sparse feed-forward layer: DeepSeek-V3's sigmoid router, routed experts and a shared expert.

The correction bias acts on the choice of experts only, never on their gates; nothing here updates it. Experts are stacked
tensors computed in expert order, one grouped product a projection. Knows nothing of placement. Source: DeepSeek-V3 section 2.1.2.

Shapes: M tokens, D model width, E experts, k experts a token, F expert width, P = M * k token-expert pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from etude.model.config import ModelConfig
from etude.model.router_replay import plausible_routes


@dataclass(frozen=True)
class Routing:
    """Where the tokens of one layer went."""

    experts_Mk: Tensor
    """int64."""
    gates_Mk: Tensor
    """Weights of the experts' outputs, from the router's own scores; differentiable."""
    replaced: Tensor | None
    """int64 scalar: replayed experts that the plausibility filter replaced; None without replay."""


@dataclass(frozen=True)
class LayerReplay:
    """Routes to replay in one layer."""

    routes_Mk: Tensor
    alpha: float
    valid_M: Tensor


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x_MD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_MD)) * self.up_proj(x_MD))  # type: ignore[no-any-return]


class Router(nn.Module):
    """Sigmoid scores, a bias for balance, a choice limited to the best groups."""

    e_score_correction_bias: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))

    def forward(self, x_MD: Tensor, replay: LayerReplay | None) -> Routing:
        # Scores are never coarser than fp32: a BF16 score ties and flips experts.
        dtype = torch.promote_types(x_MD.dtype, torch.float32)
        scores_ME = F.linear(x_MD.to(dtype), self.weight.to(dtype)).sigmoid()
        with torch.no_grad():
            experts_Mk = self.choose(scores_ME.detach())
            replaced = None
            if replay is not None:
                experts_Mk, replaced = plausible_routes(
                    scores_ME.detach(), experts_Mk, replay.routes_Mk, replay.alpha, replay.valid_M
                )
        gates_Mk = scores_ME.gather(1, experts_Mk)
        if self.config.norm_topk_prob:
            gates_Mk = gates_Mk / (gates_Mk.sum(1, keepdim=True) + 1e-20)
        if self.config.routed_scaling_factor != 1.0:
            gates_Mk = gates_Mk * self.config.routed_scaling_factor
        return Routing(experts_Mk, gates_Mk, replaced)

    def choose(self, scores_ME: Tensor) -> Tensor:
        """The router's own experts [M, k], best biased score first, the lower index on a tie."""
        config = self.config
        biased_ME = scores_ME + self.e_score_correction_bias
        if config.topk_group < config.n_group:
            grouped = biased_ME.unflatten(1, (config.n_group, -1))
            strength = grouped.topk(2, dim=-1).values.sum(-1)
            best = strength.sort(dim=1, descending=True, stable=True).indices[:, : config.topk_group]
            closed = torch.ones_like(strength, dtype=torch.bool).scatter_(1, best, False)
            biased_ME = grouped.masked_fill(closed[:, :, None], float("-inf")).flatten(1)
        order = biased_ME.sort(dim=1, descending=True, stable=True).indices
        return order[:, : config.num_experts_per_tok]


class Experts(nn.Module):
    """Routed SwiGLU experts: `gate_up_proj` [E, 2F, D] (gate rows first), `down_proj` [E, D, F]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        count, width, inner = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.empty(count, width, inner))

    def forward(self, x_MD: Tensor, experts_Mk: Tensor, gates_Mk: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted sum of each token's experts [M, D], and the number of tokens each expert got, int64 [E]."""
        expert_P = experts_Mk.flatten()
        order_P = expert_P.argsort(stable=True)
        counts_E = torch.bincount(expert_P, minlength=self.gate_up_proj.shape[0])
        token_P = order_P // experts_Mk.shape[1]
        gate, up = _grouped_linear(x_MD.index_select(0, token_P), self.gate_up_proj, counts_E).chunk(2, -1)
        gates_P1 = gates_Mk.flatten().index_select(0, order_P)[:, None].to(x_MD.dtype)
        out_PD = _grouped_linear(F.silu(gate) * up * gates_P1, self.down_proj, counts_E)
        return torch.zeros_like(x_MD).index_add(0, token_P, out_PD), counts_E


def _grouped_linear(x_PI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """Rows of `x` in expert order times their expert's matrix: [P, O]."""
    aligned = all(size * x_PI.element_size() % 16 == 0 for size in weight_EOI.shape[1:])
    if aligned and x_PI.dtype in (torch.float32, torch.bfloat16) and x_PI.shape[0]:
        ends_E = counts_E.cumsum(0).to(torch.int32)
        return F.grouped_mm(x_PI, weight_EOI.transpose(1, 2), offs=ends_E)
    parts = x_PI.split(counts_E.tolist())
    return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weight_EOI.unbind(0))])


class SparseFeedForward(nn.Module):
    """Routed experts plus the shared expert."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        self.shared_experts = SwiGLU(config.hidden_size, config.moe_intermediate_size * config.n_shared_experts)

    def forward(self, x_MD: Tensor, replay: LayerReplay | None = None) -> tuple[Tensor, Routing, Tensor]:
        """Output [M, D], the routing, and tokens per expert, int64 [E]."""
        routing = self.gate(x_MD, replay)
        routed_MD, counts_E = self.experts(x_MD, routing.experts_Mk, routing.gates_Mk)
        return routed_MD + self.shared_experts(x_MD), routing, counts_E
