"""Random tiny decoders, and transformers' own class with the same weights as their oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from etude.model.config import ModelConfig
from etude.model.decoder import Decoder

torch.set_num_threads(1)

BASE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "max_position_embeddings": 96,
    "initializer_range": 0.3,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "query latent, untied, unaligned": {"q_lora_rank": 18, "moe_intermediate_size": 22, "tie_word_embeddings": False},
    "tied, all dense but one, two shared": {
        "tie_word_embeddings": True,
        "first_k_dense_replace": 2,
        "n_shared_experts": 2,
    },
    "groups, scaled, raw gates": {
        "n_routed_experts": 12,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 0,
        "rms_norm_eps": 1e-5,
    },
    "wide values, half-split rotary": {
        "v_head_dim": 28,
        "rope_interleave": False,
        "rope_theta": 500.0,
        "q_lora_rank": 16,
        "n_group": 2,
        "topk_group": 1,
    },
}


def make_config(**changes: Any) -> ModelConfig:
    return ModelConfig(**{**BASE, **changes})


def make_decoder(config: ModelConfig, seed: int = 0) -> Decoder:
    """Random weights with nothing left at a trivial value: norms away from one, router biases away from zero."""
    generator = torch.Generator().manual_seed(seed)
    decoder = Decoder(config)
    decoder.reset_parameters(generator)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
        for name, buffer in decoder.named_buffers():
            if "bias" in name:
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    return decoder


@pytest.fixture(params=list(VARIANTS), ids=lambda name: name.replace(" ", "-"))
def variant(request: pytest.FixtureRequest) -> ModelConfig:
    return make_config(**VARIANTS[request.param])


@pytest.fixture
def build() -> Callable[..., Decoder]:
    """build(seed=0, **config changes) -> a random tiny decoder."""

    def _build(seed: int = 0, **changes: Any) -> Decoder:
        return make_decoder(make_config(**changes), seed)

    return _build


@pytest.fixture
def decoder_of() -> Callable[..., Decoder]:
    return make_decoder


@pytest.fixture
def oracle_of() -> Callable[[Decoder], Any]:
    """transformers' class holding a decoder's weights, mapped here by hand, independently of our checkpoint code."""

    def _oracle(decoder: Decoder) -> Any:
        from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

        mapping = decoder.config.to_hf()
        mapping.pop("architectures")
        config = DeepseekV3Config(**mapping, attn_implementation="eager")
        model = DeepseekV3ForCausalLM(config).eval()
        model.set_experts_implementation("eager")
        own = dict(decoder.state_dict())
        theirs = {name if name.startswith("lm_head") else f"model.{name}": tensor for name, tensor in own.items()}
        if decoder.config.tie_word_embeddings:
            theirs["lm_head.weight"] = own["embed_tokens.weight"]
        model.load_state_dict(theirs, strict=True)
        return model

    return _oracle


@pytest.fixture
def oracle_logits() -> Callable[..., torch.Tensor]:
    """Logits of the oracle with an explicit mask: position ids alone do not keep packed documents apart there."""

    def _logits(oracle: Any, ids_BT: torch.Tensor, segments_BT: torch.Tensor | None = None) -> torch.Tensor:
        rows, columns = ids_BT.shape
        allowed = torch.ones(columns, columns, dtype=torch.bool).tril().expand(rows, columns, columns)
        positions = torch.arange(columns).expand(rows, columns)
        if segments_BT is not None:
            allowed = allowed & (segments_BT[:, :, None] == segments_BT[:, None, :])
            first = (segments_BT[:, :, None] == segments_BT[:, None, :]).int().argmax(-1)
            positions = positions - first
        mask = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)[:, None]
        with torch.no_grad():
            result: torch.Tensor = oracle(ids_BT, attention_mask=mask, position_ids=positions, use_cache=False).logits
        return result

    return _logits
