"""A small random policy, versions of it to swap in, and the plain forward that log-probabilities are held against."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from etude.chat.grammar import GrammarSpec
from etude.inference.config import EngineConfig
from etude.inference.engine import Engine
from etude.inference.protocol import GenerateRequest, prefix_digest
from etude.model.checkpoint import hf_state
from etude.model.config import ModelConfig
from etude.model.decoder import Decoder, RouteReplay
from etude.weightsync.digests import root_digest

torch.set_num_threads(1)

MODEL = ModelConfig(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=3,
    num_attention_heads=2,
    n_routed_experts=6,
    num_experts_per_tok=2,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    max_position_embeddings=256,
    initializer_range=0.2,
)


def _make_decoder(seed: int, config: ModelConfig = MODEL) -> Decoder:
    """Random weights whose values BF16 can hold, as published weights are."""
    decoder = Decoder(config)
    decoder.reset_parameters(torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.copy_(parameter.to(torch.bfloat16).to(torch.float32))
    return decoder.eval().requires_grad_(False)


@dataclass(frozen=True)
class Version:
    """What a manifest says that the engine reads."""

    policy_version: int
    root_digest: str


@dataclass
class FakeSource:
    """Versions by key; `gate` holds a fetch back, `broken` keys raise."""

    versions: dict[str, tuple[Version, dict[str, torch.Tensor]]] = field(default_factory=dict)
    broken: dict[str, Exception] = field(default_factory=dict)
    gate: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    def add(self, key: str, policy_version: int, decoder: Decoder) -> None:
        state = {name: tensor.clone() for name, tensor in hf_state(decoder).items()}
        self.versions[key] = (Version(policy_version, root_digest(state)), state)

    def fetch(self, manifest_key: str) -> tuple[Version, Mapping[str, torch.Tensor]]:
        self.entered.set()
        assert self.gate.wait(20)
        if manifest_key in self.broken:
            raise self.broken[manifest_key]
        return self.versions[manifest_key]


def _ask(
    session: str,
    new_ids: Sequence[int],
    *,
    prefix: Sequence[int] = (),
    request_id: str = "",
    max_tokens: int = 12,
    temperature: float = 1.0,
    seed: int = 7,
    stop_ids: Sequence[int] = (),
    grammar: GrammarSpec | None = None,
) -> GenerateRequest:
    """A request with short defaults."""
    return GenerateRequest(
        request_id=request_id or f"{session}/{len(prefix)}/{seed}",
        session_id=session,
        prefix_digest=prefix_digest(prefix),
        new_token_ids=tuple(new_ids),
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        stop_ids=tuple(stop_ids),
        grammar=grammar,
    )


@torch.no_grad()
def _plain_logprobs(
    decoder: Decoder,
    ids: Sequence[int],
    *,
    temperature: float = 1.0,
    routes: np.ndarray | None = None,
    masks: np.ndarray | None = None,
    masks_from: int = 0,
) -> np.ndarray:
    """float64 [len(ids) - 1]: log-probability of ids[t + 1] after ids[: t + 1], by one plain forward (the trainer's)."""
    ids_1T = torch.tensor([list(ids[:-1])])
    replay = None
    if routes is not None:
        valid = torch.ones(1, len(ids) - 1, dtype=torch.bool)
        replay = RouteReplay(torch.from_numpy(routes.astype(np.int64))[None], 0.0, valid)
    logits_TV = decoder.logits(decoder(ids_1T, replay=replay).hidden)[0].double() / temperature
    if masks is not None:
        allowed = torch.ones(logits_TV.shape, dtype=torch.bool)
        allowed[masks_from - 1 :] = torch.from_numpy(masks)
        logits_TV = logits_TV.masked_fill(~allowed, float("-inf"))
    logp_TV = logits_TV.log_softmax(-1)
    return logp_TV[torch.arange(len(ids) - 1), torch.tensor(list(ids[1:]))].numpy()


@pytest.fixture
def until() -> Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]:
    """Waits, at most 20 s, until an asynchronous condition holds."""

    async def waited(condition: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(20):
            while not await condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    return waited


@pytest.fixture
def make_decoder() -> Callable[..., Decoder]:
    return _make_decoder


@pytest.fixture
def ask() -> Callable[..., GenerateRequest]:
    return _ask


@pytest.fixture
def plain_logprobs() -> Callable[..., np.ndarray]:
    return _plain_logprobs


@pytest.fixture
def source() -> FakeSource:
    found = FakeSource()
    for version in (1, 2, 3):
        found.add(f"m{version}", version, _make_decoder(version))
    return found


@pytest.fixture
def serving(source: FakeSource) -> Callable[..., AbstractAsyncContextManager[Engine]]:
    """`async with serving(slots=4, ...) as engine`: a started engine on the weights of seed 0."""

    @asynccontextmanager
    async def opened(
        sampler: object = None, grammars: object = None, weights: int = 0, **settings: object
    ) -> AsyncIterator[Engine]:
        config = EngineConfig(**{"slots": 8, "max_session_tokens": 128, "flush_tokens": 1, **settings})
        engine = Engine(
            _make_decoder(weights), config, source=source, sampler=sampler, grammars=grammars, policy_version=weights
        )
        with engine:
            yield engine

    return opened
