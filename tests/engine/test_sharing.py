"""Several outputs of one prompt: computed once, blocks shared, and each output has the bits it has alone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pdserve.errors import Cancelled
from pdserve.types import Owner, SamplingParams
from support.commands import start_decode
from support.engines import Job, TestedEngine, finish, make_engine, run
from support.pairs import Pair

BLOCK = 32
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=12, logprobs=1)


def owner(output: int) -> Owner:
    return Owner("tests", "shared", "router", 1, output)


def prompt_of(count: int) -> list[int]:
    return random.Random(count).choices(range(250), k=count)


def submit(engine: TestedEngine, job: Job, output: int, shares: int | None = None) -> None:
    share = None if shares is None else owner(shares)
    engine.start(job, owner(output), index=output, shares=share)


@pytest.fixture(scope="module")
def engine(llama) -> TestedEngine:
    return make_engine(llama)


def alone(engine: TestedEngine, prompt: list[int], output: int) -> Job:
    job = Job(prompt, PARAMS)
    submit(engine, job, output)
    finish(engine, job)
    return job


@pytest.mark.parametrize("count", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1, 150])
@pytest.mark.parametrize("steps_before", [0, 1, 5])
def test_each_output_is_what_it_is_alone(engine, count, steps_before):
    prompt = prompt_of(count)
    expected = [alone(engine, prompt, output).tokens for output in range(4)]
    jobs = [Job(prompt, PARAMS) for _ in range(4)]
    submit(engine, jobs[0], 0)
    for _ in range(steps_before):
        engine.step()
    for output in range(1, 4):
        submit(engine, jobs[output], output, shares=0)
    finish(engine, *jobs)
    assert [job.tokens for job in jobs] == expected


def test_the_prompt_is_computed_once_and_its_full_blocks_are_held_once(engine):
    prompt = prompt_of(150)
    jobs = [Job(prompt, PARAMS) for _ in range(4)]
    submit(engine, jobs[0], 0)
    for output in range(1, 4):
        submit(engine, jobs[output], output, shares=0)
    steps = 0
    while not all(job.tokens for job in jobs):
        engine.step()
        steps += 1
    assert steps == 4  # 150 tokens in chunks of 64, then one row for each follower's last prompt token
    assert engine.load().blocks.leased == 4 + 4  # 149 // 32 full ones, and one of each output's own
    finish(engine, *jobs)


def test_outputs_that_have_tokens_already_share_the_prompt_and_compute_the_rest(engine):
    prompt = prompt_of(100)
    expected = [alone(engine, prompt, output) for output in range(3)]
    received = [expected[output].token_ids[:count] for output, count in enumerate((3, 1, 7))]
    jobs = [Job(prompt, PARAMS, output=ids) for ids in received]
    for output, job in enumerate(jobs):
        submit(engine, job, output, shares=0 if output else None)
    finish(engine, *jobs)
    for job, ids, whole in zip(jobs, received, expected, strict=True):
        assert job.tokens == whole.tokens[len(ids) :]


@pytest.mark.parametrize("comes", [True, False])
def test_an_output_waits_for_one_that_is_expected_and_computes_the_prompt_alone_if_that_does_not_come(engine, comes):
    prompt = prompt_of(150)
    expected = [alone(engine, prompt, output).tokens for output in range(2)]
    engine.expect(owner(0))
    leader, follower = Job(prompt, PARAMS), Job(prompt, PARAMS)
    submit(engine, follower, 1, shares=0)
    for _ in range(3):
        engine.step()
    assert not engine.idle()
    assert engine.load().blocks.leased == 0
    if comes:
        submit(engine, leader, 0)
        while not follower.tokens:
            engine.step()
        assert engine.load().blocks.leased == 4 + 2  # 149 // 32 full ones are held once
        finish(engine, leader, follower)
        assert [leader.tokens, follower.tokens] == expected
    else:
        engine.forget(owner(0))
        finish(engine, follower)
        assert follower.tokens == expected[1]
    assert engine.idle()


def test_outputs_share_a_prompt_that_a_prefill_worker_has_not_begun_to_send(engine, llama):
    prompt = prompt_of(150)
    expected = [alone(engine, prompt, output).tokens for output in range(3)]
    decode = make_engine(llama)
    rows, compute = [], decode.executor.run
    decode.executor.run = lambda plan: rows.append(plan.token_count) or compute(plan)
    jobs = [Job(prompt, PARAMS) for _ in range(3)]
    with Pair(make_engine(llama), decode) as pair:
        leader = pair.start(jobs[0])
        for output in (1, 2):
            follower = replace(leader, output=output)
            pair.jobs[follower] = jobs[output]
            pair.decode_worker.tell(start_decode(follower, prompt, (), PARAMS, local_prefill=True, share=leader))
        pair.finish(*jobs)
    assert [job.tokens for job in jobs] == expected
    assert sum(rows) == sum(len(job.tokens) for job in jobs) - 1  # the prompt's last token for each follower, no more


def test_an_output_that_is_aborted_while_it_waits_for_an_expected_one_leaves_nothing(engine):
    engine.expect(owner(0))
    follower = Job(prompt_of(150), PARAMS)
    submit(engine, follower, 1, shares=0)
    engine.abort(owner(1), Cancelled("gone"))
    engine.forget(owner(0))
    engine.step()
    assert isinstance(follower.outcome, Cancelled)
    assert engine.idle()


def test_followers_of_one_that_is_aborted_compute_the_prompt_themselves(engine):
    prompt = prompt_of(150)
    expected = alone(engine, prompt, 1).tokens
    leader, follower = Job(prompt, PARAMS), Job(prompt, PARAMS)
    submit(engine, leader, 0)
    submit(engine, follower, 1, shares=0)
    engine.step()
    engine.abort(owner(0), Cancelled("gone"))
    finish(engine, leader, follower)
    assert follower.tokens == expected


def test_a_follower_that_is_aborted_while_it_waits_leaves_nothing(engine):
    prompt = prompt_of(150)
    leader, follower = Job(prompt, PARAMS), Job(prompt, PARAMS)
    submit(engine, leader, 0)
    submit(engine, follower, 1, shares=0)
    engine.step()
    engine.abort(owner(1), Cancelled("gone"))
    finish(engine, leader, follower)
    assert isinstance(follower.outcome, Cancelled)
    assert len(leader.tokens) == PARAMS.max_tokens


def test_in_a_pool_too_small_for_all_each_still_ends_with_its_bits(llama, engine):
    small = make_engine(llama, max_running=3)
    prompt = prompt_of(100)
    expected = [alone(engine, prompt, output).tokens for output in range(8)]
    jobs = [Job(prompt, PARAMS) for _ in range(8)]
    for output, job in enumerate(jobs):
        submit(small, job, output, shares=0 if output else None)
    finish(small, *jobs)
    assert [job.tokens for job in jobs] == expected
    run(small, Job(prompt, PARAMS))
