"""The sampler: filters do what their names say, and the choice follows the distribution."""

from dataclasses import replace

import numpy as np
import pytest

from model.randomness import uniform
from model.sampler import sample
from pdserve.types import SamplingParams

LOGITS = np.array([1.0, 3.0, 2.0, -1.0, 3.0, 0.0], dtype=np.float32)
PARAMS = SamplingParams(temperature=1.0, seed=11)


def drawn(params, logits=LOGITS, count=400):
    return [sample(logits, params, 0, position).token_id for position in range(count)]


def test_temperature_zero_takes_the_first_of_the_highest():
    assert set(drawn(replace(PARAMS, temperature=0.0), count=5)) == {1}


def test_draws_follow_the_softmax():
    tokens = drawn(PARAMS, count=4000)
    expected = np.exp(LOGITS.astype(np.float64)) / np.exp(LOGITS.astype(np.float64)).sum()
    counts = np.bincount(tokens, minlength=len(LOGITS))
    chi_squared = ((counts - 4000 * expected) ** 2 / (4000 * expected)).sum()
    assert chi_squared < 20.5  # 5 degrees of freedom, p = 0.001


def test_the_same_position_gives_the_same_token_whenever_it_is_drawn():
    once = drawn(PARAMS)
    assert once == [sample(LOGITS, PARAMS, 0, position).token_id for position in reversed(range(400))][::-1]
    assert once != drawn(replace(PARAMS, seed=12))


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        (replace(PARAMS, top_k=1), {1}),
        (replace(PARAMS, top_k=2), {1, 4}),
        (replace(PARAMS, top_k=3), {1, 2, 4}),
        (replace(PARAMS, top_k=6), {0, 1, 2, 3, 4, 5}),
        (replace(PARAMS, top_k=100), {0, 1, 2, 3, 4, 5}),
        (replace(PARAMS, top_p=0.3), {1}),
        (replace(PARAMS, top_p=0.7), {1, 4}),
        (replace(PARAMS, min_p=0.3), {1, 2, 4}),
        (replace(PARAMS, top_k=3, min_p=0.9), {1, 4}),
        (replace(PARAMS, temperature=1e-3), {1, 4}),
    ],
)
def test_filters_keep_just_what_they_should(params, allowed):
    assert set(drawn(params, count=2000)) == allowed


def test_logprobs_are_those_of_the_unfiltered_distribution():
    result = sample(LOGITS, replace(PARAMS, temperature=0.0, top_k=1, logprobs=3), 0, 0)
    exact = LOGITS - np.log(np.exp(LOGITS.astype(np.float64)).sum())
    assert result.logprob == pytest.approx(exact[1])
    assert [token for token, _ in result.top_logprobs] == [1, 4, 2]
    assert [logprob for _, logprob in result.top_logprobs] == pytest.approx([exact[1], exact[4], exact[2]])


def test_no_logprobs_unless_asked_for():
    result = sample(LOGITS, PARAMS, 0, 0)
    assert result.logprob is None
    assert result.top_logprobs == ()


def test_a_uniform_at_the_very_end_still_gives_a_kept_token():
    logits = np.array([0.0, -1e4, -1e4], dtype=np.float32)
    assert set(drawn(PARAMS, logits, count=200)) == {0}


def sampled_by_sorting_everything(logits, params, sequence_index, position):
    """The documented rule, word by word: rank the whole vocabulary, then filter it."""
    exact = logits.astype(np.float64)
    weights = np.exp((exact - exact.max()) / params.temperature)
    ranked = np.argsort(-logits, kind="stable")
    if params.top_k > 0:
        ranked = ranked[: params.top_k]
    if params.top_p < 1.0:
        mass = np.cumsum(weights[ranked])
        ranked = ranked[: int(np.searchsorted(mass, params.top_p * mass[-1])) + 1]
    kept = np.zeros_like(weights)
    kept[ranked] = weights[ranked]
    kept[kept < params.min_p * kept.max()] = 0.0
    cumulative = np.cumsum(kept)
    at = uniform(params.seed, sequence_index, position) * cumulative[-1]
    return int(np.searchsorted(cumulative, at, side="right"))


@pytest.mark.parametrize("top_k", [0, 1, 7, 50, 5000])
@pytest.mark.parametrize("top_p", [0.1, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.05])
def test_selecting_gives_the_token_of_a_full_sort(top_k, top_p, min_p):
    generator = np.random.default_rng(top_k)
    for seed in range(60):
        size, spread = int(generator.integers(2, 3000)), generator.choice([0.1, 1.0, 6.0])
        logits = (spread * generator.standard_normal(size)).astype(np.float32)
        if seed % 3 == 0:
            logits = np.round(logits, 1)  # many ties
        params = SamplingParams(temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
        wanted = sampled_by_sorting_everything(logits, params, 1, seed)
        assert sample(logits, params, 1, seed).token_id == wanted, f"seed {seed}"


@pytest.mark.parametrize("count", [1, 5, 20, 300])
def test_top_logprobs_are_those_of_a_full_sort(count):
    logits = np.round(np.random.default_rng(count).standard_normal(300), 1).astype(np.float32)
    result = sample(logits, SamplingParams(temperature=0.0, logprobs=count), 0, 0)
    assert [token for token, _ in result.top_logprobs] == np.argsort(-logits, kind="stable")[:count].tolist()
