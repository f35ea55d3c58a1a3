"""The sampler: filters do what their names say, and the choice follows the distribution."""

from dataclasses import replace

import numpy as np
import pytest

from engine.sampler import sample
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
