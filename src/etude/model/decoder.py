"""The decoder: embeddings, MLA and dense or sparse feed-forward layers, a head; for training and for cached decoding.

Token ids in, hidden states and routes out; it knows nothing of placement, text, losses or sampling. Loaded and saved as a
`deepseek_v3` Hugging Face folder by `checkpoint.py`, whose own class in transformers is the oracle of its tests.

Shapes: B rows, T columns (N in `extend`), M computed tokens, D model width, L layers with a router, E experts, k experts a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from etude.model.attention import LatentAttention, RMSNorm, rotary_tables
from etude.model.cache import CacheLayout, KVCache
from etude.model.config import ModelConfig
from etude.model.layout import Layout, plan_layout
from etude.model.moe import LayerReplay, Routing, SparseFeedForward, SwiGLU
from etude.model.router_replay import RouteReplay, flatten_replay
from etude.records.errors import BadInput

__all__ = ["Decoder", "DecoderOutput", "KVCache", "RouteReplay"]


@dataclass(frozen=True)
class DecoderOutput:
    """What a forward pass gives back; tokens that were padding have zeros everywhere."""

    hidden: Tensor
    """[B, T, D], after the final norm."""
    routes: Tensor
    """Experts used, uint8 (uint16 above 256 experts) [B, T, L, k]."""
    replaced: Tensor
    """int64 scalar: replayed experts replaced by the plausibility filter."""
    considered: Tensor
    """int64 scalar: replayed experts that the filter looked at."""
    router_counts: Tensor
    """Computed tokens that each expert got, int64 [L, E]."""


class Block(nn.Module):
    """Pre-norm attention and feed-forward with residuals."""

    def __init__(self, config: ModelConfig, sparse: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LatentAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SparseFeedForward(config) if sparse else SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(
        self, x_MD: Tensor, cos_MR: Tensor, sin_MR: Tensor, layer: int, layout: Layout, replay: LayerReplay | None
    ) -> tuple[Tensor, tuple[Routing, Tensor] | None]:
        x_MD = x_MD + self.self_attn(self.input_layernorm(x_MD), cos_MR, sin_MR, layer, layout)
        normed_MD = self.post_attention_layernorm(x_MD)
        if not isinstance(self.mlp, SparseFeedForward):
            return x_MD + self.mlp(normed_MD), None
        out_MD, routing, counts_E = self.mlp(normed_MD, replay)
        return x_MD + out_MD, (routing, counts_E)


class Decoder(nn.Module):
    """A `deepseek_v3` language model. New weights are normal(0, initializer_range) from torch's generator."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        sparse_from = config.first_k_dense_replace
        self.layers = nn.ModuleList(Block(config, layer >= sparse_from) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for name, table in zip(("cos", "sin"), rotary_tables(config)):
            self.register_buffer(name, table, persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw all matrices anew, set norms to one and router biases to zero."""
        for parameter in self.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, self.config.initializer_range, generator=generator)
            else:
                parameter.fill_(1.0)
        for name, buffer in self.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.zero_()

    def forward(
        self,
        ids_BT: Tensor,
        *,
        segments_BT: Tensor | None = None,
        positions_BT: Tensor | None = None,
        replay: RouteReplay | None = None,
    ) -> DecoderOutput:
        """Causal forward for training.

        Args:
            ids_BT: int64 token ids; a row is one document (right padding is harmless but computed) unless:
            segments_BT: int64; a run of equal ids >= 0 is a document that sees only itself; -1 is padding, not computed.
            positions_BT: int64 rotary positions; default: counted from 0 in each document.
            replay: routes to use where they are plausible.
        Raises: `BadInput` naming the argument.
        """
        rows, columns = ids_BT.shape
        layout = plan_layout(rows, columns, segments_BT, positions_BT, ids_BT.device)
        return self._run(ids_BT, layout, replay, checked_positions=positions_BT is None)

    @torch.no_grad()
    def extend(
        self, ids_BN: Tensor, lengths_B: Tensor, cache: KVCache, slots_B: Tensor, replay: RouteReplay | None = None
    ) -> DecoderOutput:
        """Append new tokens to cached sequences: prefill, decode and any mix of them.

        Row i's first `lengths_B[i]` tokens (<= N) follow the `cache.lengths[slots_B[i]]` tokens already in that slot; a
        row with slot -1 or length 0 is idle. Cache lengths grow only when the whole pass went through.
        Raises: `BadInput` for a slot named twice or out of range, or too many tokens; nothing is written then.
        """
        layout = CacheLayout(cache, ids_BN.shape[1], lengths_B, slots_B)
        output = self._run(ids_BN, layout, replay, checked_positions=True)
        layout.commit()
        return output

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary, never coarser than float32: [..., D] -> [..., vocab_size]."""
        weight = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        out = F.linear(hidden, weight)
        return out.to(torch.promote_types(out.dtype, torch.float32))

    def _run(
        self, ids_BT: Tensor, layout: Layout, replay: RouteReplay | None, checked_positions: bool
    ) -> DecoderOutput:
        config = self.config
        rows, columns = ids_BT.shape
        keep_M, positions_M = layout.keep_M, layout.positions_M
        self._check_positions(positions_M, columns, checked_positions)
        ids_M = ids_BT.flatten() if keep_M is None else ids_BT.flatten().index_select(0, keep_M)
        flat = None if replay is None else flatten_replay(replay, config, rows, columns, keep_M)
        cos_MR, sin_MR = self.cos.index_select(0, positions_M), self.sin.index_select(0, positions_M)
        x_MD = F.embedding(ids_M, self.embed_tokens.weight)
        routed: list[tuple[Routing, Tensor]] = []
        for layer, block in enumerate(self.layers):
            layer_replay = None
            if flat is not None and layer >= config.first_k_dense_replace:
                layer_replay = LayerReplay(flat.routes_LMk[len(routed)], flat.alpha, flat.valid_M)
            x_MD, sparse = block(x_MD, cos_MR, sin_MR, layer, layout, layer_replay)
            if sparse is not None:
                routed.append(sparse)
        hidden_MD = self.norm(x_MD)

        def grid(flat_M: Tensor) -> Tensor:
            if keep_M is not None:
                empty = flat_M.new_zeros(rows * columns, *flat_M.shape[1:])
                flat_M = empty.index_copy(0, keep_M, flat_M)
            return flat_M.view(rows, columns, *flat_M.shape[1:])

        zero = torch.zeros((), dtype=torch.int64, device=ids_BT.device)
        considered = zero if flat is None else flat.valid_M.sum() * len(routed) * config.num_experts_per_tok
        replaced = sum((routing.replaced for routing, _ in routed if routing.replaced is not None), zero)
        route_dtype = torch.uint8 if config.n_routed_experts <= 256 else torch.uint16
        if routed:
            routes_MLk = torch.stack([routing.experts_Mk for routing, _ in routed], 1)
            counts_LE = torch.stack([counts_E for _, counts_E in routed])
        else:
            routes_MLk = ids_M.new_zeros(len(ids_M), 0, config.num_experts_per_tok)
            counts_LE = ids_M.new_zeros(0, config.n_routed_experts)
        return DecoderOutput(grid(hidden_MD), grid(routes_MLk).to(route_dtype), replaced, considered, counts_LE)

    def _check_positions(self, positions_M: Tensor, columns: int, bounded: bool) -> None:
        limit = self.config.max_position_embeddings
        if bounded and columns <= limit:
            return
        if len(positions_M) and not (int(positions_M.min()) >= 0 and int(positions_M.max()) < limit):
            found = f"{int(positions_M.min())} to {int(positions_M.max())}"
            raise BadInput("decoder", "positions", found, f"0 to {limit - 1} (max_position_embeddings = {limit})")
