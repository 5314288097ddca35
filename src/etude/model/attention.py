"""Multi-head latent attention: low-rank keys and values with a decoupled rotary part shared by all heads.

Projects, rotates and mixes; who sees whom is the layout's business, so the same module serves training and cached
decoding. Source: DeepSeek-V2 section 2.1, as the `deepseek_v3` checkpoints lay it out.

Shapes: M tokens, D model width, H heads, K query/key width (nope + rope), V value width, R half the rotary width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from etude.model.config import ModelConfig
from etude.model.layout import LatentHeads, Layout

# The family's own code gives the two latent norms this epsilon whatever the config says.
_LATENT_EPS = 1e-6


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # Written out: torch's composite rms_norm costs a tenth of a decode step on the CPU.
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (wide * scale).to(x.dtype) * self.weight


class LatentAttention(nn.Module):
    """One layer of MLA; parameter names are the checkpoint's."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width, heads = config.hidden_size, config.num_attention_heads
        query_width = heads * config.qk_head_dim
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(width, query_width, bias=False)
        else:
            self.q_a_proj = nn.Linear(width, config.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, _LATENT_EPS)
            self.q_b_proj = nn.Linear(config.q_lora_rank, query_width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, config.kv_lora_rank + config.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, _LATENT_EPS)
        self.kv_b_proj = nn.Linear(
            config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim), bias=False
        )
        self.o_proj = nn.Linear(heads * config.v_head_dim, width, bias=False)

    def forward(self, x_MD: Tensor, cos_MR: Tensor, sin_MR: Tensor, layer: int, layout: Layout) -> Tensor:
        """Attention output [M, D] for normalised inputs [M, D]; `layer` names the layer to the layout's cache."""
        config = self.config
        heads, nope, rope = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
        if config.q_lora_rank is None:
            query = self.q_proj(x_MD)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_MD)))
        q_nope, q_rope = query.view(-1, heads, config.qk_head_dim).split((nope, rope), -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x_MD).split((config.kv_lora_rank, rope), -1)
        cos, sin = cos_MR[:, None], sin_MR[:, None]
        output_MHV = layout.attend(
            layer,
            LatentHeads(
                q_nope_MHn=q_nope,
                q_rope_MHr=self._rotate(q_rope, cos, sin),
                latent_MC=self.kv_a_layernorm(latent),
                k_rope_Mr=self._rotate(k_rope[:, None], cos, sin).squeeze(1),
                expansion_HOC=self.kv_b_proj.weight.unflatten(0, (heads, -1)),
            ),
        )
        return self.o_proj(output_MHV.flatten(1))  # type: ignore[no-any-return]

    def _rotate(self, x_MHr: Tensor, cos_M1R: Tensor, sin_M1R: Tensor) -> Tensor:
        # Queries and keys are both left with the pairs' first halves before the second: their product is the same.
        if self.config.rope_interleave:
            a, b = x_MHr.unflatten(-1, (-1, 2)).unbind(-1)
        else:
            a, b = x_MHr.chunk(2, -1)
        return torch.cat((a * cos_M1R - b * sin_M1R, b * cos_M1R + a * sin_M1R), -1)


def rotary_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Cosine and sine, float32 [max positions, R], so that a position's values never depend on the batch's shape."""
    even = torch.arange(0, config.qk_rope_head_dim, 2, dtype=torch.float32)
    frequency_R = 1.0 / (config.rope_theta ** (even / config.qk_rope_head_dim))
    angle = torch.outer(torch.arange(config.max_position_embeddings, dtype=torch.float32), frequency_R)
    return angle.cos(), angle.sin()
