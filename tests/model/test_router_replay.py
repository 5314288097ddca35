from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.model.decoder import Decoder, KVCache, RouteReplay
from etude.model.router_replay import plausible_routes
from etude.records.errors import BadInput

Build = Callable[..., Decoder]


def all_valid(ids: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(ids, dtype=torch.bool)


def ids_for(decoder: Decoder, *shape: int) -> torch.Tensor:
    return torch.randint(0, decoder.config.vocab_size, shape, generator=torch.Generator().manual_seed(2))


def slow_filter(scores: list[float], biased: list[float], k: int, replayed: list[int], alpha: float) -> list[int]:
    """DESIGN decision 10 in plain words: keep the plausible, fill the rest with the router's best not yet used."""
    ranking = sorted(range(len(scores)), key=lambda expert: (-biased[expert], expert))
    least = min(scores[expert] for expert in ranking[:k])
    kept = {expert for expert in replayed if scores[expert] >= alpha * least}
    fillers = iter([expert for expert in ranking if expert not in kept])
    return [expert if expert in kept else next(fillers) for expert in replayed]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_the_filter_equals_its_description(data: st.DataObject) -> None:
    experts = data.draw(st.integers(2, 7))
    k = data.draw(st.integers(1, experts))
    rows = data.draw(st.integers(1, 4))
    # Eighths are exact in float32, and few enough that ties are common.
    alpha = data.draw(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]))
    eighth = st.integers(1, 8).map(lambda n: n / 8)
    scores = [data.draw(st.lists(eighth, min_size=experts, max_size=experts)) for _ in range(rows)]
    bias = data.draw(st.lists(st.integers(-8, 8).map(lambda n: n / 8), min_size=experts, max_size=experts))
    replayed = [data.draw(st.permutations(range(experts)))[:k] for _ in range(rows)]
    valid = [data.draw(st.booleans()) for _ in range(rows)]
    biased = torch.tensor(scores) + torch.tensor(bias)
    own = biased.sort(dim=1, descending=True, stable=True).indices[:, :k]
    chosen, replaced = plausible_routes(torch.tensor(scores), own, torch.tensor(replayed), alpha, torch.tensor(valid))
    expected_replaced = 0
    for row in range(rows):
        if not valid[row]:
            assert chosen[row].tolist() == own[row].tolist()
            continue
        expected = slow_filter(scores[row], biased[row].tolist(), k, replayed[row], alpha)
        assert chosen[row].tolist() == expected
        assert len(set(expected)) == k
        expected_replaced += sum(a != b for a, b in zip(expected, replayed[row]))
    assert int(replaced) == expected_replaced


@pytest.mark.parametrize("groups", [{}, {"n_group": 4, "topk_group": 2}])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_own_routes_replayed_give_bit_equal_logits(build: Build, groups: dict[str, int], alpha: float) -> None:
    decoder = build(**groups)
    ids = ids_for(decoder, 2, 20)
    segments = torch.tensor([[0] * 9 + [1] * 11, [0] * 15 + [-1] * 5])
    for kwargs in ({}, {"segments_BT": segments}):
        with torch.no_grad():
            first = decoder(ids, **kwargs)
            again = decoder(ids, **kwargs, replay=RouteReplay(first.routes, alpha, segments >= 0))
        assert torch.equal(decoder.logits(first.hidden), decoder.logits(again.hidden))
        assert torch.equal(first.routes, again.routes)
        assert int(again.replaced) == 0
        assert int(again.considered) == 35 * 2 * 2
        assert int(first.considered) == 0


def test_own_routes_replayed_over_the_cache_give_bit_equal_states(build: Build) -> None:
    decoder = build()
    ids = ids_for(decoder, 3, 10)
    lengths, slots = torch.tensor([10, 1, 4]), torch.tensor([2, 0, 1])
    first = decoder.extend(ids, lengths, KVCache(decoder.config, 3, 16), slots)
    valid = torch.arange(10)[None] < lengths[:, None]
    replay = RouteReplay(first.routes, 0.5, valid)
    again = decoder.extend(ids, lengths, KVCache(decoder.config, 3, 16), slots, replay)
    assert torch.equal(first.hidden, again.hidden) and torch.equal(first.routes, again.routes)
    assert int(again.replaced) == 0 and int(again.considered) == 15 * 2 * 2


def test_a_one_token_shift_of_the_routes_shows(build: Build) -> None:
    decoder = build()
    ids = ids_for(decoder, 1, 30)
    with torch.no_grad():
        first = decoder(ids)
        shifted = first.routes.roll(1, dims=1)
        strict = decoder(ids, replay=RouteReplay(shifted, 1.0, all_valid(ids)))
        loose = decoder(ids, replay=RouteReplay(shifted, 0.0, all_valid(ids)))
    assert int(strict.replaced) > 10
    assert int(loose.replaced) == 0 and torch.equal(loose.routes, shifted)
    assert float((loose.hidden - first.hidden).abs().max()) > 1e-2


def test_where_replay_is_invalid_the_own_router_decides_whatever_the_row_holds(build: Build) -> None:
    decoder = build()
    ids = ids_for(decoder, 1, 12)
    with torch.no_grad():
        first = decoder(ids)
        valid = all_valid(ids)
        valid[0, 5:] = False
        routes = first.routes.clone()
        routes[0, 5:] = 255
        again = decoder(ids, replay=RouteReplay(routes, 0.5, valid))
    assert torch.equal(first.hidden, again.hidden)
    assert int(again.considered) == 5 * 2 * 2


def test_gradients_flow_through_the_gates_of_replayed_experts(build: Build) -> None:
    """Finite differences of the router's weight, the routes held fixed by replay."""
    decoder = build(num_hidden_layers=2).double()
    ids = ids_for(decoder, 1, 8)
    k = decoder.config.num_experts_per_tok
    routes = torch.stack([torch.randperm(8, generator=torch.Generator().manual_seed(i))[:k] for i in range(8)])
    replay = RouteReplay(routes.view(1, 8, 1, k), 0.0, all_valid(ids))

    def loss() -> torch.Tensor:
        return decoder.logits(decoder(ids, replay=replay).hidden)[..., 0].sum()

    loss().backward()
    weight = decoder.get_parameter("layers.1.mlp.gate.weight")
    assert weight.grad is not None
    for index in ((0, 0), (3, 5), (7, 31)):
        with torch.no_grad():
            weight[index] += 1e-6
            up = loss()
            weight[index] -= 2e-6
            down = loss()
            weight[index] += 1e-6
        assert float((up - down) / 2e-6) == pytest.approx(float(weight.grad[index]), rel=1e-5, abs=1e-8)


def test_bad_replays_are_named(build: Build) -> None:
    decoder = build()
    ids = ids_for(decoder, 1, 6)
    with torch.no_grad():
        good = decoder(ids).routes
    twice, outside = good.clone(), good.to(torch.int64)
    twice[0, 3, 1] = 4
    outside[0, 2, 0, 1] = 8
    valid = all_valid(ids)
    for replay, field in (
        (RouteReplay(twice, 0.5, valid), r"routes_BTLk\[0, 3, 1\] is \[4, 4\]"),
        (RouteReplay(outside, 0.5, valid), r"routes_BTLk\[0, 2, 0\]"),
        (RouteReplay(-outside, 0.5, valid), r"routes_BTLk"),
        (RouteReplay(good[:, :5], 0.5, valid), "routes_BTLk"),
        (RouteReplay(good, 1.5, valid), "alpha is 1.5"),
        (RouteReplay(good, 0.5, valid.int()), "valid_BT"),
    ):
        with pytest.raises(BadInput, match=field):
            decoder(ids, replay=replay)


def test_above_256_experts_routes_are_uint16_and_replay(build: Build) -> None:
    decoder = build(n_routed_experts=260, moe_intermediate_size=4, num_hidden_layers=2)
    ids = ids_for(decoder, 1, 9)
    with torch.no_grad():
        first = decoder(ids, segments_BT=torch.tensor([[0] * 6 + [1] * 3]))
        again = decoder(
            ids, segments_BT=torch.tensor([[0] * 6 + [1] * 3]), replay=RouteReplay(first.routes, 1.0, all_valid(ids))
        )
    assert first.routes.dtype == torch.uint16
    assert torch.equal(first.hidden, again.hidden)
