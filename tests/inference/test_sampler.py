"""Draws: seeded per (seed, index), exact in distribution, masks and temperature in the returned log-probability."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.inference.sampler import CategoricalSampler, SampleRow, ScriptedSampler, draw, uniforms
from etude.records.errors import BadInput


def _sample(logits, uniform, temperature=1.0, allowed=None):
    logits = np.atleast_2d(np.asarray(logits, dtype=np.float64))
    rows = len(logits)
    uniform = np.broadcast_to(np.asarray(uniform, dtype=np.float64), rows)
    return CategoricalSampler().sample(logits, np.full(rows, temperature), uniform, allowed, [])


def _softmax_log(logits, temperature, allowed):
    scaled = np.where(allowed, logits / temperature, -np.inf)
    return scaled - np.logaddexp.reduce(scaled, axis=-1, keepdims=True)


@given(st.integers(0, 2**64), st.integers(1, 40), st.integers(1, 40))
def test_the_uniform_of_an_index_depends_on_seed_and_index_only(seed, short, more):
    longer = uniforms(seed, short + more)
    assert np.array_equal(uniforms(seed, short), longer[:short])
    assert ((longer >= 0) & (longer < 1)).all()


def test_neighbouring_seeds_have_unrelated_uniforms():
    first = np.array([uniforms(seed, 2) for seed in range(4000)])
    assert abs(np.corrcoef(first[:-1, 0], first[1:, 0])[0, 1]) < 0.06
    assert abs(np.corrcoef(first[:, 0], first[:, 1])[0, 1]) < 0.06
    assert abs(first.mean() - 0.5) < 0.02


def test_drawn_frequencies_pass_a_chi_square_test_at_two_temperatures_and_under_a_mask():
    draws, vocabulary = 20_000, 12
    logits = np.random.default_rng(0).normal(size=vocabulary) * 1.5
    uniform = np.concatenate([uniforms(seed, 100) for seed in range(draws // 100)])
    for temperature, allowed in ((1.0, np.ones(vocabulary, bool)), (0.6, np.arange(vocabulary) % 3 > 0)):
        ids, _ = _sample(np.tile(logits, (draws, 1)), uniform, temperature, np.tile(allowed, (draws, 1)))
        expected = np.exp(_softmax_log(logits, temperature, allowed)) * draws
        seen = np.bincount(ids, minlength=vocabulary)
        assert seen[~allowed].sum() == 0
        statistic = ((seen - expected)[allowed] ** 2 / expected[allowed]).sum()
        assert statistic < 33.1  # the 0.999 quantile at 11 degrees of freedom is 31.3


@given(
    st.lists(st.floats(-50, 50), min_size=2, max_size=9),
    st.floats(0, 1, exclude_max=True),
    st.floats(0.05, 5),
    st.data(),
)
def test_a_draw_is_allowed_and_its_log_probability_is_of_the_masked_scaled_distribution(
    logits, uniform, temperature, data
):
    logits = np.array(logits)
    allowed = np.array(data.draw(st.lists(st.booleans(), min_size=len(logits), max_size=len(logits)).filter(any)))
    ids, logprobs = _sample(logits, uniform, temperature, allowed[None])
    assert allowed[ids[0]]
    expected = _softmax_log(logits, temperature, allowed)
    assert logprobs[0] == pytest.approx(expected[ids[0]], abs=1e-9)
    assert np.exp(expected[ids[0]]) > 0 or allowed.sum() == 1


@given(st.lists(st.sampled_from([0.0, 1e-300, 1e-9, 0.3, 1.0]), min_size=1, max_size=8).filter(any))
def test_an_id_without_weight_is_never_drawn_even_at_the_edges(weights):
    cumulative = np.cumsum(weights)[None]
    for uniform in (0.0, np.nextafter(1.0, 0.0)):
        assert weights[draw(cumulative, np.array([uniform]))[0]] > 0


def test_temperature_zero_is_greedy_with_the_log_probability_at_temperature_one():
    logits = np.array([[0.0, 3.0, 2.0, 3.0]])
    ids, logprobs = _sample(logits, 0.999, 0.0)
    assert ids[0] == 1
    assert logprobs[0] == pytest.approx(_softmax_log(logits, 1.0, True)[0, 1])


def test_a_row_is_drawn_alike_alone_and_in_a_batch():
    logits = np.random.default_rng(1).normal(size=(16, 30))
    uniform = np.random.default_rng(2).random(16)
    together = _sample(logits, uniform)
    for i in range(16):
        alone = _sample(logits[i], uniform[i])
        assert alone[0][0] == together[0][i] and alone[1][0] == together[1][i]


def test_a_scripted_sampler_forces_ids_and_keeps_the_models_log_probability():
    logits = np.random.default_rng(3).normal(size=(2, 5))
    rows = [SampleRow("a", "s", 0, 0, []), SampleRow("b", "t", 0, 0, [])]
    scripted = ScriptedSampler(lambda row: 4 if row.request_id == "a" else None)
    ids, logprobs = scripted.sample(logits, np.ones(2), np.array([0.1, 0.1]), None, rows)
    assert ids[0] == 4 and logprobs[0] == pytest.approx(_softmax_log(logits, 1.0, True)[0, 4])
    assert ids[1] == _sample(logits[1], 0.1)[0][0]
    with pytest.raises(BadInput, match="scripted token"):
        scripted.sample(logits, np.ones(2), np.zeros(2), np.array([[True] * 4 + [False], [True] * 5]), rows)
