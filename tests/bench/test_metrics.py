from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.bench.metrics import best_of_k, best_of_k_each, mean_interval, resample, solved_given_formed
from etude.records.errors import BadInput


@given(outcomes=st.lists(st.booleans(), min_size=1, max_size=7), data=st.data())
def test_best_of_k_is_the_mean_over_all_subsets(outcomes: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(outcomes)))
    subsets = [any(subset) for subset in combinations(outcomes, k)]
    assert best_of_k(sum(outcomes), len(outcomes), k) == pytest.approx(sum(subsets) / len(subsets))


@pytest.mark.parametrize(("solved", "attempts", "k"), [(1, 4, 5), (0, 4, 0), (5, 4, 1)])
def test_best_of_k_is_refused_where_undefined(solved: int, attempts: int, k: int) -> None:
    with pytest.raises(BadInput):
        best_of_k(solved, attempts, k)


def test_resampling_keeps_modules_whole_in_number() -> None:
    modules = ["a"] * 3 + ["b"] * 5
    for seed in range(20):
        drawn = resample(modules, np.random.default_rng(seed))
        assert len(drawn) in {6, 8, 10}


def test_interval_covers_the_truth_about_95_times_in_100() -> None:
    covered = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        modules = [f"m{i // 2}" for i in range(80)]
        effect = np.repeat(rng.normal(0.1, 0.2, size=40), 2) + rng.normal(0, 0.2, size=80)
        interval = mean_interval(effect, modules, draws=300, seed=seed)
        covered += interval.low <= 0.1 <= interval.high
    assert 176 <= covered <= 199


def test_tasks_never_well_formed_are_left_out() -> None:
    successes = np.array([[True, False], [False, False]])
    formed = np.array([[True, True], [False, False]])
    share = solved_given_formed(successes, formed)
    assert share[0] == 0.5 and np.isnan(share[1])
    assert mean_interval(share, ["a", "a"], draws=50).estimate == 0.5
    assert best_of_k_each(successes, 2).tolist() == [1.0, 0.0]
