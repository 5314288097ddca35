"""The loop against the real engine with random weights: the records hold exactly what the engine vouches for."""

import hashlib
import math

import numpy as np
import pytest

from etude.agent.config import AgentConfig
from etude.agent.loop import AgentOptions, run_rollout
from etude.chat.grammar import Grammar
from etude.records.rollout import StopReason
from etude.records.task import Limits

torch = pytest.importorskip("torch")


@pytest.fixture
def engine(tokenizer):
    from etude.inference.config import EngineConfig
    from etude.inference.engine import Engine
    from etude.model.config import ModelConfig
    from etude.model.decoder import Decoder

    torch.set_num_threads(1)
    model = ModelConfig(
        vocab_size=tokenizer.vocab_size,
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
        max_position_embeddings=2048,
    )
    decoder = Decoder(model)
    decoder.reset_parameters(torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.copy_(parameter.to(torch.bfloat16).to(torch.float32))
    config = EngineConfig(slots=4, max_session_tokens=1024)
    decoder.eval().requires_grad_(False)
    with Engine(decoder, config, grammars=lambda spec: Grammar(spec, tokenizer)) as running:
        yield running


@pytest.mark.parametrize("grammar", [True, False])
async def test_a_random_policy_leaves_consistent_records(engine, tokenizer, pods, make_task, grammar):
    from etude.inference.client import LocalEngineClient

    kept = {}

    def sink(data):
        digest = hashlib.sha256(data).hexdigest()
        kept[digest] = data
        return digest

    task = make_task(limits=Limits(max_turns=4, max_sampled_tokens=90, max_context_tokens=600))
    rollouts = [
        await run_rollout(
            task,
            attempt=0,
            seed=seed,
            engine=LocalEngineClient(engine),
            pods=pods,
            tokenizer=tokenizer,
            options=AgentOptions(
                config=AgentConfig(grammar=grammar, malformed_limit=9, tools=("edit_file", "run")),
                blob_sink=sink,
                verify=False,
                clock=lambda: 0.0,
                unix_time=lambda: 0.0,
            ),
        )
        for seed in (3, 3, 4)
    ]
    first, again, other = ([g.sampled_ids for g in rollout.generations] for rollout in rollouts)
    assert first == again != other
    for one, two in zip(rollouts[0].generations, rollouts[1].generations):
        assert one.logprobs == pytest.approx(two.logprobs, abs=1e-4)
    for rollout in rollouts:
        assert rollout.stop_reason is not StopReason.INFRASTRUCTURE, rollout.error
        assert sum(len(g.sampled_ids) for g in rollout.generations) <= 90
        assert rollout.well_formed or not grammar or any(c.error == "malformed" for c in rollout.tool_calls)
        for generation in rollout.generations:
            length = len(generation.prompt_ids) + len(generation.sampled_ids)
            assert generation.routes is not None and generation.routes.shape == (length - 1, 2, 2)
            rows = np.frombuffer(kept[generation.routes.digest], dtype=generation.routes.dtype)
            assert rows.size == math.prod(generation.routes.shape)
            assert all(math.isfinite(logprob) and logprob <= 1e-6 for logprob in generation.logprobs)
            if not grammar:
                assert generation.masks is None
                continue
            assert generation.masks is not None
            bits = np.frombuffer(kept[generation.masks.digest], dtype=np.uint8).reshape(generation.masks.shape)
            allowed = np.unpackbits(bits, axis=1, count=tokenizer.vocab_size).astype(bool)
            assert all(allowed[i, token] for i, token in enumerate(generation.sampled_ids))
    assert (await LocalEngineClient(engine).health()).sessions == 0
