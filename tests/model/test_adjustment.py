"""Penalties, biases and min_tokens: what each does to the logits, and that it is a function of the ids alone."""

from dataclasses import replace

import numpy as np
import pytest

from model.adjustment import adjusted, needs_adjustment
from pdserve.types import SamplingParams
from support.engines import Job, make_engine, run

LOGITS = np.array([1.0, -1.0, 2.0, 0.5, 3.0, -2.0], dtype=np.float32)
PLAIN = SamplingParams(temperature=0.0)
EOS = (5,)


def after(params, prompt=(), output=()):
    return adjusted(LOGITS, params, prompt, output, EOS).tolist()


def test_nothing_to_do_is_seen_beforehand():
    assert not needs_adjustment(PLAIN, 0)
    assert needs_adjustment(replace(PLAIN, min_tokens=2), 1)
    assert not needs_adjustment(replace(PLAIN, min_tokens=2), 2)


def test_repetition_penalty_weakens_tokens_of_prompt_and_output():
    assert after(replace(PLAIN, repetition_penalty=2.0), [0, 1], [4]) == [0.5, -2.0, 2.0, 0.5, 1.5, -2.0]


def test_presence_penalty_counts_once_and_frequency_each_time_in_the_output_only():
    output = [2, 2, 2, 0]
    assert after(replace(PLAIN, presence_penalty=0.5), [4], output) == [0.5, -1.0, 1.5, 0.5, 3.0, -2.0]
    assert after(replace(PLAIN, frequency_penalty=0.5), [4], output) == [0.5, -1.0, 0.5, 0.5, 3.0, -2.0]


def test_a_bias_is_added():
    assert after(replace(PLAIN, logit_bias=((1, 4.0), (4, -100.0)))) == [1.0, 3.0, 2.0, 0.5, -97.0, -2.0]


def test_before_min_tokens_nothing_ends_the_output():
    params = replace(PLAIN, min_tokens=2, stop_token_ids=(4,))
    assert after(params, [], [0])[4:] == [-np.inf, -np.inf]
    assert after(replace(params, ignore_eos=True), [], [0])[4:] == [-np.inf, -2.0]
    assert after(params, [], [0, 0])[4:] == [3.0, -2.0]


def test_the_models_logits_stay_as_they_were():
    before = LOGITS.copy()
    after(replace(PLAIN, repetition_penalty=2.0, logit_bias=((1, 4.0),)), [0], [1])
    assert (before == LOGITS).all()


PENALISED = SamplingParams(
    temperature=0.8,
    seed=5,
    max_tokens=40,
    presence_penalty=0.7,
    frequency_penalty=0.4,
    repetition_penalty=1.2,
    min_tokens=20,
    logit_bias=((7, 2.0),),
    logprobs=1,
)


@pytest.mark.parametrize("accepted", [1, 10, 19, 20, 30])
def test_penalties_do_not_change_when_a_sequence_goes_on_from_accepted_tokens(llama, accepted):
    whole = Job(list(range(3, 60)), PENALISED)
    run(make_engine(llama), whole)
    resumed = Job(whole.prompt, PENALISED, output=whole.token_ids[:accepted])
    run(make_engine(llama), resumed)
    assert resumed.tokens == whole.tokens[accepted:]
    assert resumed.outcome == whole.outcome


def test_min_tokens_holds_back_a_stop_id_that_would_come_first(llama):
    free = Job([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    run(make_engine(llama), free)
    stop = free.token_ids[0]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop_token_ids=(stop,), min_tokens=5)
    held = Job([5, 6, 7], params)
    run(make_engine(llama), held)
    assert stop not in held.token_ids[:5]
    assert len(held.token_ids) > 5 or held.outcome.stop_token_id is None
