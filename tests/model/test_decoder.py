from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.model.config import ModelConfig
from etude.model.decoder import Decoder, KVCache
from etude.model.moe import Experts
from etude.records.errors import BadInput

Build = Callable[..., Decoder]


def random_ids(decoder: Decoder, *shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, decoder.config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def close(a: torch.Tensor, b: torch.Tensor, scale: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, rtol=scale, atol=scale * max([1.0, *b.detach().abs().flatten().tolist()]))


def test_logits_equal_those_of_transformers(
    variant: ModelConfig, decoder_of: Build, oracle_of: Any, oracle_logits: Any
) -> None:
    decoder = decoder_of(variant)
    ids = random_ids(decoder, 2, 40)
    with torch.no_grad():
        output = decoder(ids)
    close(decoder.logits(output.hidden), oracle_logits(oracle_of(decoder), ids))
    layers = variant.num_moe_layers
    assert output.routes.shape == (2, 40, layers, variant.num_experts_per_tok) and output.routes.dtype == torch.uint8
    for layer in range(layers):
        used = torch.bincount(output.routes[:, :, layer].flatten().long(), minlength=variant.n_routed_experts)
        assert torch.equal(output.router_counts[layer], used)


def test_gradients_equal_those_of_transformers(variant: ModelConfig, decoder_of: Build, oracle_of: Any) -> None:
    decoder = decoder_of(variant)
    oracle = oracle_of(decoder)
    ids = random_ids(decoder, 2, 17)
    weights = torch.randn(2, 17, variant.vocab_size, generator=torch.Generator().manual_seed(5))
    (decoder.logits(decoder(ids).hidden) * weights).sum().backward()
    (oracle(ids, use_cache=False).logits * weights).sum().backward()
    theirs = dict(oracle.named_parameters())
    for name, parameter in decoder.named_parameters():
        expected = theirs[name if name.startswith("lm_head") else f"model.{name}"].grad
        assert parameter.grad is not None
        assert float((parameter.grad - expected).norm()) <= 2e-5 * float(expected.norm()), name


def test_prefill_and_cached_decode_equal_transformers_with_its_own_cache(
    variant: ModelConfig, decoder_of: Build, oracle_of: Any
) -> None:
    decoder = decoder_of(variant)
    oracle = oracle_of(decoder)
    ids = random_ids(decoder, 1, 30)
    cache = KVCache(variant, slots=3, max_tokens=40)
    slot = torch.tensor([1])
    ours = [decoder.extend(ids[:, :18], torch.tensor([18]), cache, slot).hidden]
    with torch.no_grad():
        step = oracle(ids[:, :18], use_cache=True)
        theirs = [step.logits]
        for at in range(18, 30):
            ours.append(decoder.extend(ids[:, at : at + 1], torch.tensor([1]), cache, slot).hidden)
            step = oracle(ids[:, at : at + 1], past_key_values=step.past_key_values, use_cache=True)
            theirs.append(step.logits)
    close(decoder.logits(torch.cat(ours, 1)), torch.cat(theirs, 1))
    assert cache.lengths.tolist() == [0, 30, 0]


def test_packed_documents_equal_documents_alone_and_transformers_with_a_block_mask(
    variant: ModelConfig, decoder_of: Build, oracle_of: Any, oracle_logits: Any
) -> None:
    decoder = decoder_of(variant)
    ids = random_ids(decoder, 2, 33)
    segments = torch.tensor([[0] * 7 + [1] * 15 + [2] * 11, [5] * 1 + [3] * 20 + [-1] * 12])
    with torch.no_grad():
        packed = decoder(ids, segments_BT=segments)
    expected = oracle_logits(oracle_of(decoder), ids, segments)
    real = segments >= 0
    close(decoder.logits(packed.hidden)[real], expected[real])
    for row in range(2):
        for segment in segments[row].unique().tolist():
            at = segments[row] == segment
            if segment < 0:
                assert not packed.hidden[row, at].any() and not packed.routes[row, at].any()
                continue
            with torch.no_grad():
                alone = decoder(ids[row, at][None])
            close(packed.hidden[row, at], alone.hidden[0])
    assert int(packed.router_counts.sum()) == int(real.sum()) * variant.num_moe_layers * variant.num_experts_per_tok


def test_gradients_do_not_depend_on_packing(build: Build) -> None:
    decoder = build().double()
    documents = [random_ids(decoder, n, seed=n) for n in (5, 9, 1, 12)]

    def gradients(runs: list[tuple[torch.Tensor, torch.Tensor | None]]) -> list[torch.Tensor]:
        decoder.zero_grad()
        for ids, segments in runs:
            hidden = decoder(ids, segments_BT=segments).hidden
            decoder.logits(hidden).log_softmax(-1)[..., 3].mul(ids != 0).sum().backward()
        return [parameter.grad.clone() for parameter in decoder.parameters() if parameter.grad is not None]

    documents = [document.clamp_min(1) for document in documents]
    alone = gradients([(document[None], None) for document in documents])
    row = torch.cat([*documents, torch.zeros(4, dtype=torch.int64)])[None]
    segments = torch.repeat_interleave(torch.tensor([0, 1, 2, 3, -1]), torch.tensor([5, 9, 1, 12, 4]))[None]
    packed = gradients([(row, segments)])
    padded = torch.zeros(4, 12, dtype=torch.int64)
    for index, document in enumerate(documents):
        padded[index, : len(document)] = document
    for other in (packed, gradients([(padded, torch.where(padded > 0, 0, -1))]), gradients([(padded, None)])):
        for a, b in zip(alone, other):
            assert float((a - b).norm()) <= 1e-10 * float(a.norm())


@settings(max_examples=15, deadline=None)
@given(at=st.integers(0, 23), seed=st.integers(0, 1000))
def test_a_later_token_never_changes_an_earlier_one(at: int, seed: int) -> None:
    decoder = _SHARED
    ids = random_ids(decoder, 2, 24, seed=seed)
    changed = ids.clone()
    changed[:, at] = (changed[:, at] + 1) % decoder.config.vocab_size
    with torch.no_grad():
        before, after = decoder(ids).hidden, decoder(changed).hidden
    close(before[:, :at], after[:, :at])
    assert not torch.equal(before[:, at], after[:, at])


def test_changing_one_document_never_changes_its_neighbour(build: Build) -> None:
    decoder = build()
    ids = random_ids(decoder, 1, 20)
    segments = torch.tensor([[0] * 8 + [1] * 12])
    changed = ids.clone()
    changed[0, :8] = (changed[0, :8] + 7) % decoder.config.vocab_size
    with torch.no_grad():
        a, b = (decoder(x, segments_BT=segments).hidden for x in (ids, changed))
    close(a[:, 8:], b[:, 8:])


def test_explicit_positions_move_the_rotary_embedding_only_relatively(build: Build) -> None:
    decoder = build()
    ids = random_ids(decoder, 1, 10)
    positions = torch.arange(10)[None]
    with torch.no_grad():
        base = decoder(ids).hidden
        assert torch.equal(base, decoder(ids, positions_BT=positions).hidden)
        close(base, decoder(ids, positions_BT=positions + 50).hidden, 1e-4)
        assert float((base - decoder(ids, positions_BT=positions * 3).hidden).abs().max()) > 1e-3


def test_segments_that_return_or_only_pad_and_positions_past_the_end_are_refused(build: Build) -> None:
    decoder = build()
    ids = random_ids(decoder, 1, 6)
    with pytest.raises(BadInput, match=r"segments_BT\[0\] is 1"):
        decoder(ids, segments_BT=torch.tensor([[1, 1, 0, 0, 1, 1]]))
    with pytest.raises(BadInput, match="segments_BT"):
        decoder(ids, segments_BT=torch.full((1, 6), -1))
    with pytest.raises(BadInput, match="segments_BT"):
        decoder(ids, segments_BT=torch.zeros(1, 5, dtype=torch.int64))
    with pytest.raises(BadInput, match="positions"):
        decoder(ids, positions_BT=torch.arange(91, 97)[None])
    with pytest.raises(BadInput, match="positions"):
        decoder(random_ids(decoder, 1, 97))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_ragged_mixed_extends_equal_plain_forwards_and_leave_other_slots_alone(data: st.DataObject) -> None:
    """Prefill, decode and idle rows mixed at random: each slot ends with what a plain forward of its tokens gives."""
    decoder = _SHARED
    slots, capacity = 4, 30
    cache = KVCache(decoder.config, slots, capacity)
    tokens: list[list[int]] = [[] for _ in range(slots)]
    hidden: list[list[torch.Tensor]] = [[] for _ in range(slots)]
    for turn in range(data.draw(st.integers(1, 4))):
        chosen = [*data.draw(st.lists(st.integers(0, slots - 1), unique=True, min_size=1)), -1]
        columns = data.draw(st.sampled_from([1, 1, 6]))
        lengths = [data.draw(st.integers(0, columns)) for _ in chosen]
        ids = random_ids(decoder, len(chosen), columns, seed=turn)
        before = cache.pages_LSXW.clone()
        output = decoder.extend(ids, torch.tensor(lengths), cache, torch.tensor(chosen))
        for row, (slot, count) in enumerate(zip(chosen, lengths)):
            if slot < 0:
                assert not output.hidden[row].any()
                continue
            tokens[slot] += ids[row, :count].tolist()
            hidden[slot] += list(output.hidden[row, :count])
        for slot in range(slots):
            added = lengths[chosen.index(slot)] if slot in chosen else 0
            kept = torch.ones(capacity, dtype=torch.bool)
            kept[len(tokens[slot]) - added : len(tokens[slot])] = False
            assert torch.equal(cache.pages_LSXW[:, slot, kept], before[:, slot, kept])
    assert cache.lengths.tolist() == [len(part) for part in tokens]
    for part, states in zip(tokens, hidden):
        if part:
            with torch.no_grad():
                close(torch.stack(states), decoder(torch.tensor([part])).hidden[0])


def test_truncate_copy_and_free_keep_what_they_promise(build: Build) -> None:
    decoder = build()
    cache = KVCache(decoder.config, 3, 20)
    ids = random_ids(decoder, 1, 12)
    full = decoder.extend(ids, torch.tensor([12]), cache, torch.tensor([0])).hidden
    cache.copy(0, 2, 8)
    cache.truncate(0, 5)
    assert cache.lengths.tolist() == [5, 0, 8]
    close(decoder.extend(ids[:, 5:], torch.tensor([7]), cache, torch.tensor([0])).hidden, full[:, 5:])
    close(decoder.extend(ids[:, 8:9], torch.tensor([1]), cache, torch.tensor([2])).hidden, full[:, 8:9])
    cache.free(0)
    close(decoder.extend(ids, torch.tensor([12]), cache, torch.tensor([0])).hidden, full)
    for call in (lambda: cache.truncate(0, 13), lambda: cache.free(3), lambda: cache.copy(1, 0, 1)):
        with pytest.raises(BadInput, match="key-value cache"):
            call()


def test_a_refused_extend_leaves_the_cache_as_it_was(build: Build) -> None:
    decoder = build()
    cache = KVCache(decoder.config, 2, 8)
    ids = random_ids(decoder, 2, 6)
    decoder.extend(ids, torch.tensor([6, 2]), cache, torch.tensor([0, 1]))
    pages, lengths = cache.pages_LSXW.clone(), cache.lengths.clone()
    for counts, slots, field in (
        ([2, 3], [1, 0], "lengths_B"),
        ([1, 1], [1, 1], "slots_B"),
        ([1, 1], [0, 2], "slots_B"),
    ):
        with pytest.raises(BadInput, match=field):
            decoder.extend(ids, torch.tensor(counts), cache, torch.tensor(slots))
        assert torch.equal(cache.pages_LSXW, pages) and torch.equal(cache.lengths, lengths)
    with pytest.raises(BadInput, match="max_tokens"):
        KVCache(decoder.config, 1, 97)


def test_grouped_and_looped_experts_agree_and_unused_experts_get_no_gradient(build: Build) -> None:
    config = build().config
    experts = Experts(config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(generator=generator)
    x = torch.randn(11, config.hidden_size, generator=generator)
    chosen = torch.randint(0, 4, (11, 1), generator=generator)
    chosen = torch.cat((chosen, chosen + 3), 1)
    gates = torch.rand(11, 2, generator=generator)
    fast, counts = experts(x, chosen, gates)
    fast.sum().backward()
    assert counts.tolist() == torch.bincount(chosen.flatten(), minlength=8).tolist()
    assert experts.down_proj.grad is not None and not experts.down_proj.grad[7].any()
    looped, _ = experts.double()(x.double(), chosen, gates.double())
    close(fast, looped.float())


def _shared_decoder() -> Decoder:
    generator = torch.Generator().manual_seed(11)
    config = ModelConfig(
        vocab_size=40,
        hidden_size=24,
        intermediate_size=32,
        moe_intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        n_routed_experts=6,
        num_experts_per_tok=2,
        kv_lora_rank=12,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    decoder = Decoder(config)
    decoder.reset_parameters(generator)
    return decoder


_SHARED = _shared_decoder()
