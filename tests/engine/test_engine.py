"""The engine's life of a sequence: ends, aborts in every phase, refusals, and who returns the lease."""

import time

import pytest

from engine.events import Aborting, Ended, Leased
from engine.sequence import KVSource, Sequence
from model import next_token
from pdserve.errors import Cancelled, InternalError, InvalidArgument, Uncomputable
from pdserve.types import Finish, FinishReason, Owner, SampledToken, SamplingParams
from support.engines import Job, finish, make_engine, new_owner, run

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
OWNER = Owner("t", "r", "router", 1)
GONE = Cancelled("gone")


class Outlet:
    def __init__(self):
        self.calls = []

    def opened(self, kv):
        self.calls.append("opened")

    def layer_ready(self, layer, start, stop):
        self.calls.append((layer, start, stop))


def submitted(engine, prompt=range(3, 40), params=PARAMS, **settings):
    """A job of OWNER's, and its sequence."""
    job = Job(list(prompt), params)
    return job, engine.start(job, OWNER, **settings)


def leased(engine):
    engine.check_integrity()
    return engine.load().blocks.leased


def test_max_tokens_ends_with_length(llama):
    job = Job([5, 6, 7], PARAMS)
    run(make_engine(llama), job)
    assert job.outcome == Finish(FinishReason.LENGTH)
    assert len(job.tokens) == 8
    assert job.ended == 1


def test_one_token_is_one_token(llama):
    job = Job([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=1))
    run(make_engine(llama), job)
    assert len(job.tokens) == 1


def test_a_stop_id_ends_with_stop_and_is_part_of_the_output(llama):
    free = Job([5, 6, 7], PARAMS)
    run(make_engine(llama), free)
    stop = free.token_ids[3]
    job = Job([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, stop_token_ids=(stop,)))
    run(make_engine(llama), job)
    assert job.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert job.outcome == Finish(FinishReason.STOP, stop_token_id=stop)


@pytest.mark.parametrize("length", [0, 1024])
def test_a_prompt_that_cannot_fit_is_refused(llama, length):
    job = Job([5] * length, PARAMS)
    run(make_engine(llama), job)
    assert isinstance(job.outcome, InvalidArgument)
    assert "between 1 and 1023" in str(job.outcome)


def test_an_output_that_cannot_fit_is_refused(llama):
    job = Job([5] * 1000, SamplingParams(max_tokens=25))
    run(make_engine(llama), job)
    assert str(job.outcome) == "max_tokens: is 25: there is room for 24"


def test_an_owner_submitted_twice_is_refused_and_the_first_goes_on(llama):
    engine = make_engine(llama)
    job, _ = submitted(engine)
    engine.submit(Sequence(OWNER, [5, 6, 7], [], PARAMS))
    finish(engine, job)
    assert (len(job.tokens), job.outcome) == (8, Finish(FinishReason.LENGTH))
    assert [type(event) for event in engine.events].count(Ended) == 1


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_an_abort_in_any_phase_returns_the_lease_before_the_next_step(llama, steps):
    engine = make_engine(llama, max_step_tokens=20)
    job, _ = submitted(engine)
    for _ in range(steps):
        engine.step()
    engine.abort(OWNER, GONE)
    engine.step()
    assert job.outcome is GONE
    assert job.ended == 1
    assert leased(engine) == 0
    engine.abort(OWNER, GONE)
    engine.step()
    assert job.ended == 1


def test_a_prefill_keeps_its_lease_until_it_is_unpinned(llama):
    engine, outlet = make_engine(llama, max_step_tokens=20), Outlet()
    job, _ = submitted(engine, stops_after_prefill=True, outlet=outlet)
    engine.step()
    engine.step()
    assert len(job.tokens) == 1
    assert not engine.step(), "a prefill that is over computes nothing more"
    assert leased(engine) > 0
    assert job.ended == 0
    engine.unpin(OWNER)
    engine.step()
    assert (job.ended, job.outcome, leased(engine)) == (1, None, 0)


def test_layers_are_told_in_order_chunk_by_chunk(llama):
    engine, outlet = make_engine(llama, max_step_tokens=20), Outlet()
    job, _ = submitted(engine, stops_after_prefill=True, outlet=outlet)
    engine.step()
    engine.step()
    assert outlet.calls == ["opened", *((layer, *chunk) for chunk in ((0, 20), (20, 37)) for layer in range(2))]
    assert len(job.tokens) == 1


def test_an_aborted_pinned_prefill_waits_for_its_transfer(llama):
    engine, outlet = make_engine(llama, max_step_tokens=20), Outlet()
    job, _ = submitted(engine, stops_after_prefill=True, outlet=outlet)
    engine.step()
    engine.abort(OWNER, GONE)
    engine.step()
    assert engine.events[-1] == Aborting(OWNER, GONE)
    assert job.ended == 0
    assert leased(engine) > 0
    engine.unpin(OWNER)
    engine.step()
    assert (job.ended, job.outcome, leased(engine)) == (1, GONE, 0)


def test_a_receiving_sequence_is_pinned_until_its_kv_is_delivered(llama):
    engine = make_engine(llama)
    job, sequence = submitted(engine, source=KVSource.DELIVERED)
    engine.step()
    assert [(type(event), event.owner) for event in engine.events] == [(Leased, OWNER)]
    assert sequence.pinned
    engine.abort(OWNER, GONE)
    engine.step()
    assert leased(engine) > 0
    engine.deliver(OWNER, [SampledToken(9)])
    engine.step()
    assert (job.ended, job.outcome, leased(engine), job.tokens) == (1, GONE, 0, [])


def test_the_delivered_token_can_end_the_sequence(llama):
    engine = make_engine(llama)
    job, _ = submitted(engine, [4, 5], SamplingParams(temperature=0.0, max_tokens=1), source=KVSource.DELIVERED)
    engine.step()
    engine.deliver(OWNER, [SampledToken(9)])
    engine.step()
    assert job.token_ids == [9]
    assert (job.ended, leased(engine)) == (1, 0)


def test_what_fails_in_sampling_ends_its_own_sequence_alone(llama, monkeypatch):
    alone = Job([5, 6, 7], PARAMS)
    run(make_engine(llama), alone)
    real = next_token.sample

    def fails_once(logits, params, *rest):
        if params.seed == 13:
            raise IndexError("index -1 is out of bounds")
        return real(logits, params, *rest)

    monkeypatch.setattr(next_token, "sample", fails_once)
    sound, broken = Job([5, 6, 7], PARAMS), Job([5, 6, 7], SamplingParams(max_tokens=8, seed=13))
    run(make_engine(llama), broken, sound)
    assert isinstance(broken.outcome, Uncomputable)
    assert "IndexError" in str(broken.outcome)
    assert (sound.tokens, sound.outcome) == (alone.tokens, alone.outcome)


def test_numbers_that_are_not_finite_end_their_own_sequence_alone(llama):
    alone = Job([5, 6, 7], PARAMS)
    run(make_engine(llama), alone)
    engine = make_engine(llama)
    engine.executor.decoder._parameters.embedding[11] = float("nan")
    sound, broken = Job([5, 6, 7], PARAMS), Job([5, 11, 7], PARAMS)
    run(engine, broken, sound)
    assert isinstance(broken.outcome, Uncomputable)
    assert not broken.outcome.retryable
    assert not broken.outcome.blames_worker
    assert (sound.tokens, sound.outcome) == (alone.tokens, alone.outcome)
    assert leased(engine) == 0


def test_a_failed_step_ends_its_sequences_and_the_engine_goes_on(llama, monkeypatch):
    engine = make_engine(llama)
    job, _ = submitted(engine)
    with monkeypatch.context() as patch:
        patch.setattr(engine.executor.decoder, "forward_checked", lambda *args: 1 / 0)
        engine.step()
    assert isinstance(job.outcome, InternalError)
    assert "ZeroDivisionError" in str(job.outcome)
    assert leased(engine) == 0
    next_one = Job([5, 6, 7], PARAMS)
    run(engine, next_one)
    assert next_one.outcome == Finish(FinishReason.LENGTH)


def test_late_commands_for_an_ended_sequence_change_nothing(llama):
    engine = make_engine(llama)
    job, _ = submitted(engine)
    finish(engine, job)
    engine.unpin(OWNER)
    engine.deliver(OWNER, [SampledToken(9)])
    engine.abort(OWNER, GONE)
    engine.step()
    assert job.ended == 1
    assert leased(engine) == 0


def test_an_engine_that_can_only_wait_for_blocks_waits(llama):
    engine = make_engine(llama, block_tokens=16)
    engine.pool.lease("someone else", engine.load().blocks.free - 1)
    submitted(engine)
    assert engine.step(), "the command"
    assert not engine.step()
    started_at = time.monotonic()
    assert not engine.step(wait_s=0.05)
    assert time.monotonic() - started_at >= 0.04, "it looks again and again at what cannot have changed"
    engine.pool.give_back("someone else")
    engine.forget(new_owner())  # a command, which changes nothing by itself
    assert engine.step(wait_s=5.0)
    assert engine.load().running == 1
