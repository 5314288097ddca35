"""The order of prompts: uniform, single epoch."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.records.errors import BadInput, IntegrityError
from etude.rl.curriculum import SignalEpoch, UniformEpoch, epoch_order

ids = st.lists(st.text(max_size=5), unique=True, max_size=30)


def _drain(curriculum: UniformEpoch) -> list[str]:
    drawn = []
    while (prompt_id := curriculum.draw()) is not None:
        drawn.append(prompt_id)
    return drawn


@given(ids, st.integers(0, 2**32))
def test_every_prompt_is_drawn_exactly_once(prompt_ids: list[str], seed: int) -> None:
    drawn = _drain(UniformEpoch(prompt_ids, seed))
    assert Counter(drawn) == Counter(prompt_ids)


@given(ids, st.integers(0, 2**32), st.randoms(use_true_random=False))
def test_order_depends_on_seed_and_set_alone(prompt_ids: list[str], seed: int, shuffler: object) -> None:
    shuffled = list(prompt_ids)
    shuffler.shuffle(shuffled)  # type: ignore[attr-defined]
    assert epoch_order(prompt_ids, seed) == epoch_order(shuffled, seed)


@given(ids, st.integers(0, 100), st.integers(0, 30))
def test_a_resumed_epoch_goes_on_where_it_was(prompt_ids: list[str], seed: int, cut: int) -> None:
    whole = _drain(UniformEpoch(prompt_ids, seed))
    assert _drain(UniformEpoch(prompt_ids, seed, drawn=whole[:cut])) == whole[cut:]


def test_seeds_give_different_orders_and_every_prompt_comes_first_equally_often() -> None:
    names = ["a", "b", "c", "d"]
    firsts = Counter(epoch_order(names, seed)[0] for seed in range(4000))
    assert all(abs(firsts[name] - 1000) < 150 for name in names)


def test_a_void_groups_prompt_comes_again_last_and_only_if_it_was_out() -> None:
    curriculum = UniformEpoch(["a", "b", "c"], 0)
    first = curriculum.draw()
    assert first is not None
    curriculum.give_back(first)
    assert curriculum.remaining == 3
    with pytest.raises(IntegrityError, match="not out"):
        curriculum.give_back(first)
    assert _drain(curriculum)[-1] == first


def test_ids_that_repeat_or_are_unknown_are_refused() -> None:
    with pytest.raises(BadInput, match="each occur once"):
        UniformEpoch(["a", "a"], 0)
    with pytest.raises(BadInput, match="of this task set"):
        UniformEpoch(["a"], 0, drawn=["z"])


@given(
    categories=st.dictionaries(st.text(max_size=4), st.sampled_from(["a", "b", "c"]), min_size=1, max_size=30),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_signal_epoch_draws_every_prompt_once_whatever_is_observed(
    categories: dict[str, str], seed: int, data: st.DataObject
) -> None:
    epoch = SignalEpoch(categories, seed)
    drawn = []
    while (prompt := epoch.draw()) is not None:
        drawn.append(prompt)
        if data.draw(st.booleans()):
            epoch.observe(prompt, data.draw(st.booleans()))
    assert sorted(drawn) == sorted(categories) and epoch.remaining == 0


def test_signal_epoch_prefers_categories_whose_groups_are_mixed_and_starves_none() -> None:
    categories = {f"{name}{i}": name for name in ("mixed", "solved") for i in range(600)}
    epoch = SignalEpoch(categories, seed=3)
    drawn = []
    for _ in range(500):
        prompt = epoch.draw()
        assert prompt is not None
        drawn.append(categories[prompt])
        epoch.observe(prompt, drawn[-1] == "mixed")
    late = drawn[200:]
    assert late.count("mixed") > 0.9 * len(late) and "solved" in late


def test_signal_epoch_repeats_with_equal_outcomes_and_goes_on_without_what_was_drawn() -> None:
    categories = {str(i): str(i % 3) for i in range(60)}
    first, second = SignalEpoch(categories, 1), SignalEpoch(categories, 1)
    drawn = [first.draw() for _ in range(20)]
    assert drawn == [second.draw() for _ in range(20)]
    rest = SignalEpoch(categories, 1, drawn=[prompt for prompt in drawn if prompt is not None])
    assert rest.remaining == 40
