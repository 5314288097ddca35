"""Small policies and ragged rollouts for the trainer's tests; `rank_worker.py` imports this file too."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from etude.model.config import ModelConfig
from etude.model.decoder import Decoder
from etude.trainer.config import TrainerConfig
from etude.trainer.sequence import TokenRow, TrainSequence

torch.set_num_threads(1)
VOCAB = 61  # no multiple of 8: packed masks have spare bits


def tiny_config() -> ModelConfig:
    return ModelConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        n_routed_experts=6,
        num_experts_per_tok=2,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
        initializer_range=0.15,
        tie_word_embeddings=True,
        max_position_embeddings=128,
    )


def tiny_decoder(seed: int = 0, dtype: torch.dtype = torch.float32) -> Decoder:
    decoder = Decoder(tiny_config())
    decoder.reset_parameters(torch.Generator().manual_seed(seed))
    return decoder.to(dtype)


def random_row(rng: np.random.Generator, length: int, *, masked: bool = True, routed: bool = True) -> TokenRow:
    """Ids, one or two stretches of sampled ones, masks that allow what was taken, routes partly unknown."""
    ids = rng.integers(0, VOCAB, length)
    sampled = np.zeros(length, dtype=bool)
    first = int(rng.integers(1, length - 2))
    sampled[first : first + int(rng.integers(1, 6))] = True
    sampled[length - int(rng.integers(1, 3)) :] = True
    count = int(sampled.sum())
    allowed = rng.random((count, VOCAB)) < 0.5
    allowed[np.arange(count), ids[sampled]] = True
    return TokenRow(
        ids=ids,
        sampled=sampled,
        mu=np.where(sampled, -rng.random(length) * 4, 0.0),
        versions=sampled.astype(np.uint32),
        temperature=np.where(sampled, rng.choice([0.6, 1.0]), 1.0).astype(np.float32),
        routes=rng.random((length - 1, 2, 6)).argsort(-1)[..., :2].astype(np.uint8) if routed else None,
        routes_valid=rng.random(length - 1) < 0.8 if routed else np.zeros(length - 1, dtype=bool),
        masks=np.packbits(allowed, axis=1) if masked else None,
    )


def ragged_sequences(seed: int = 0, count: int = 8) -> tuple[TrainSequence, ...]:
    """`count` rollouts of one group, 4 to 40 ids a row; every third has two rows (a summary), some without masks."""
    rng = np.random.default_rng(seed)
    sequences = []
    for index in range(count):
        rows = tuple(
            random_row(rng, int(rng.integers(4, 41)), masked=index % 4 != 1) for _ in range(2 if index % 3 == 2 else 1)
        )
        sequences.append(TrainSequence(f"r{index}", "g", rows, float(rng.normal())))
    return tuple(sequences)


def gradient_config(**changes: object) -> TrainerConfig:
    """The full loss: KL term, capped weights, router replay."""
    values: dict[str, object] = {
        "groups": 1,
        "group_size": 8,
        "reference_length": 16.0,
        "kl_beta": 0.1,
        "importance_cap": 1.5,
        "micro_batch_tokens": 128,
        **changes,
    }
    return TrainerConfig.model_validate(values)


@pytest.fixture
def make_decoder() -> Callable[..., Decoder]:
    return tiny_decoder


@pytest.fixture
def make_sequences() -> Callable[..., tuple[TrainSequence, ...]]:
    return ragged_sequences


@pytest.fixture
def make_row() -> Callable[..., TokenRow]:
    return random_row


@pytest.fixture
def make_config() -> Callable[..., TrainerConfig]:
    return gradient_config
