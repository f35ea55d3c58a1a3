"""The promise, inside one process: a sequence's tokens and logprobs are the same bits however it was computed."""

import random

import pytest

from engine.events import Preempted
from pdserve.config import TransferConfig
from pdserve.errors import TransferError
from pdserve.types import SamplingParams
from support.engines import Job, make_engine, run
from support.pairs import Pair

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
SAMPLED = SamplingParams(temperature=1.1, top_p=0.95, top_k=50, min_p=0.01, seed=2**63 + 5, max_tokens=24, logprobs=2)


def prompt(length, seed=0):
    numbers = random.Random(seed * 10_007 + length)
    return [numbers.randrange(3, 257) for _ in range(length)]


def alone(directory, job, **settings):
    run(make_engine(directory, **settings), job)
    return job


def same(one, other):
    return one.tokens == other.tokens and one.outcome == other.outcome


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_any_chunk_size_gives_the_bits_of_the_whole_prompt(checkpoint, chunk, params):
    whole = alone(checkpoint, Job(prompt(150), params), max_step_tokens=4096)
    chunked = alone(checkpoint, Job(prompt(150), params), max_step_tokens=chunk)
    assert same(whole, chunked)
    assert len({token.logprob for token in whole.tokens}) > 10, "a constant output would prove nothing"


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_alone_equals_in_a_batch_of_sixteen_others(checkpoint, params):
    lengths = [1, 2, 3, 31, 32, 33, 40, 63, 64, 65, 100, 127, 128, 129, 200, 270, 90]
    jobs = [Job(prompt(length, seed=length), params) for length in lengths]
    run(make_engine(checkpoint, kv_cache_mb=32, max_step_tokens=100), *jobs)
    for job in jobs:
        assert same(job, alone(checkpoint, Job(job.prompt, params))), f"prompt of {len(job.prompt)} tokens"


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_disaggregated_equals_colocated(checkpoint, params):
    jobs = [Job(prompt(length, seed=1), params) for length in (1, 31, 32, 33, 64, 65, 300)]
    with Pair(make_engine(checkpoint), make_engine(checkpoint)) as pair:
        pair.run(*jobs)
    for job in jobs:
        assert same(job, alone(checkpoint, Job(job.prompt, params))), f"prompt of {len(job.prompt)} tokens"
    assert all(ends == [None] for ends in pair.prefill_ends.values())


def test_disaggregated_across_different_block_and_chunk_sizes(llama):
    job = Job(prompt(333), SAMPLED)
    decode = make_engine(llama, block_tokens=16, max_step_tokens=50)
    with Pair(make_engine(llama, block_tokens=40, max_step_tokens=37), decode) as pair:
        pair.run(job)
    assert same(job, alone(llama, Job(job.prompt, SAMPLED)))


@pytest.mark.parametrize("accepted", [1, 8, 23])
def test_a_failed_over_sequence_goes_on_with_the_bits_of_the_undisturbed_one(checkpoint, accepted):
    undisturbed = alone(checkpoint, Job(prompt(70), SAMPLED))
    resumed = Job(prompt(70), SAMPLED, output=undisturbed.token_ids[:accepted])
    with Pair(make_engine(checkpoint), make_engine(checkpoint)) as pair:
        pair.run(resumed)
    assert resumed.tokens == undisturbed.tokens[accepted:]
    assert resumed.outcome == undisturbed.outcome


def layers_received(pair):
    return {event.fields["layer"] for event in pair.trace.events() if event.name == "frame_received"}


@pytest.mark.parametrize("with_spare", [True, False], ids=["another-sender", "local"])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_prefill_lost_in_mid_transfer_costs_no_bit(llama, steps, with_spare):
    """Another sender sends what is missing, or decode computes it; what had come is kept."""
    job = Job(prompt(800), SAMPLED)
    config = TransferConfig(max_frame_bytes=4096, window_bytes=8192)
    spare = make_engine(llama) if with_spare else None
    with Pair(make_engine(llama, max_step_tokens=64), make_engine(llama), config, spare) as pair:
        owner = pair.start(job)
        pair.step_until(lambda: pair.prefill.load().running == 1)
        for _ in range(steps):
            pair.prefill_worker.step()
        last_layer = pair.prefill.executor.format.layer_count - 1
        pair.step_until(lambda: last_layer in layers_received(pair), pair.decode_worker)
        pair.prefill.abort(owner, TransferError("this worker is shutting down"))
        pair.finish(job)
    assert same(job, alone(llama, Job(job.prompt, SAMPLED)))
    assert [ticket.epoch for ticket in pair.tickets] == [1, 2]
    assert len(pair.local_prefills) == (not with_spare)
    if not with_spare:
        (taken,) = [event for event in pair.trace.events() if event.name == "transfer_taken_over"]
        assert taken.fields["token_stop"] > 0, "nothing of what had come was kept"


def test_a_delivered_prompt_that_is_lost_by_preemption_and_computed_again_is_told_to_the_router(llama):
    decode = make_engine(llama, kv_cache_mb=1, block_tokens=16)
    count = -(-decode.limits.pool_tokens // 880)
    params = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
    with Pair(make_engine(llama), decode) as pair:
        jobs = [Job(prompt(800, seed=i), params) for i in range(count)]
        pair.run(*jobs)
    assert pair.local_prefills


def test_preempted_sequences_give_the_bits_of_undisturbed_ones(llama):
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=120, ignore_eos=True)
    engine = make_engine(llama, kv_cache_mb=1, block_tokens=16)
    count = -(-engine.limits.pool_tokens // 880)  # their prompts have room, but not all of their outputs
    jobs = [Job(prompt(800, seed=i), params) for i in range(count)]
    run(engine, *jobs)
    assert any(isinstance(event, Preempted) for event in engine.events), "the test shows nothing"
    for job in jobs:
        assert same(job, alone(llama, Job(job.prompt, params)))


def test_thread_count_does_not_show(llama):
    one = alone(llama, Job(prompt(200), SAMPLED), threads=1)
    three = alone(llama, Job(prompt(200), SAMPLED), threads=3)
    assert same(one, three)


def test_the_fingerprint_is_the_same_for_any_thread_count_and_differs_for_other_weights(llama, tmp_path):
    from model.build import build_model
    from pdserve.config import EngineConfig
    from support.checkpoints import write_tiny_checkpoint

    other = write_tiny_checkpoint(tmp_path / "other", "llama", seed=1)
    prints = [
        build_model(directory, "auto", "auto", EngineConfig(threads=threads, kv_cache_mb=1)).fingerprint
        for directory, threads in ((llama, 1), (llama, 2), (other, 1))
    ]
    assert prints[0] == prints[1] != prints[2]
