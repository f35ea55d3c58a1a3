"""Kill any worker at any moment: the client's stream does not change by one bit, and no block leaks.

Each test runs a request undisturbed, then again with a kill, and shows that the kill hit the phase it names. Whether it
did or not, the answer is the same.
"""

import os
import signal
import time

import pytest

from pdserve.client import Client
from support.clusters import (
    Missed,
    aimed,
    attempts_of,
    failures_of,
    kill,
    log_events,
    rungs_of,
    send_signal,
    serving,
    trace_of,
    wait_for,
    wait_quiet,
    worker,
)

pytestmark = pytest.mark.cluster

SHORT = "Once upon a time there was a lighthouse"
LONG = list(range(1000, 2600))
GREEDY = {"temperature": 0, "max_tokens": 100, "ignore_eos": True, "logprobs": 1}
SAMPLED = {"temperature": 0.9, "seed": 17, "max_tokens": 100, "ignore_eos": True, "logprobs": 1}


def same(disturbed, undisturbed):
    """Everything a client sees but ids and times."""
    fields = ("token_ids", "text", "logprobs", "finish_reason", "stop", "usage", "prompt_token_ids")
    return all(getattr(disturbed, name) == getattr(undisturbed, name) for name in fields)


def assert_moved(result, undisturbed):
    """The same answer, and the request went to another decode worker, as a fault in mid-stream demands."""
    assert same(result, undisturbed)
    if result.attempts == 1:
        raise Missed("the stream was over")
    assert (result.attempts, result.exact) == (2, True)


def losses_of(cluster, victim):
    """Why the first router took this incarnation for lost, however often."""
    lines = log_events(cluster, "router-0", "worker lost")
    return {line["reason"] for line in lines if line["worker"] == victim.incarnation}


def first_frame_received(cluster, since_ns):
    """Wait for the first frame of a transfer that began after `since_ns`; the decode worker's id, and the transfer."""

    def look():
        for worker_id in ("decode-0", "decode-1"):
            for event in trace_of(cluster, worker_id, since_ns):
                if event.name == "frame_received":
                    return worker_id, event.fields["transfer"]
        return None

    return wait_for(look, "the first frame")


def kill_serving_prefill_in_its_transfer(cluster, since_ns):
    """SIGKILL the prefill worker once frames of its transfer are at the decode worker, and not yet all. Returns a check
    that this is how it was, for when the stream has been read."""
    decode_id, transfer = first_frame_received(cluster, since_ns)
    victim = serving(cluster, "prefill")
    kill(victim)
    killed_ns = time.monotonic_ns()
    wait_for(lambda: worker(cluster, victim.worker_id).pid != victim.pid, "the router's notice")

    def check():
        events = cluster.trace_events(decode_id, since_ns)
        mine = [e.name for e in events if e.fields.get("transfer") == transfer and e.time_ns < killed_ns]
        assert "frame_received" in mine, "the kill came before the transfer"
        if "transfer_complete" in mine:
            raise Missed("the kill came after the transfer")

    return check


def rungs_after_a_lost_sender(cluster, result):
    """The rungs of the ladder that its transfer took. Raises Missed where it took none: everything had been sent."""
    rungs = rungs_of(cluster, result.request_id)
    if not rungs:
        raise Missed("the sender had sent everything")
    return rungs


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@aimed
def test_decode_worker_killed_in_mid_stream(cluster, client, options):
    undisturbed = client.complete(SHORT, **options)
    stream = client.generate(SHORT, **options)
    received, victim = 0, None
    for delta in stream:
        received += len(delta.token_ids)
        if victim is None and received >= 20:
            victim = serving(cluster, "decode")
            kill(victim)
    result = stream.result
    assert_moved(result, undisturbed)
    (failure,) = failures_of(cluster, result.request_id)
    assert failure["phase"] == "decode"
    first, second = attempts_of(cluster, result.request_id)
    assert first["decode"] == victim.incarnation != second["decode"]


@aimed
def test_decode_worker_frozen_in_mid_stream_and_thawed_later(cluster, client):
    undisturbed = client.complete(SHORT, **SAMPLED)
    stream = client.generate(SHORT, **SAMPLED)
    received, victim = 0, None
    try:
        for delta in stream:
            received += len(delta.token_ids)
            if victim is None and received >= 20:
                victim = serving(cluster, "decode")
                send_signal(victim, signal.SIGSTOP)
    finally:
        if victim is not None:
            send_signal(victim, signal.SIGCONT)
    assert_moved(stream.result, undisturbed)
    assert losses_of(cluster, victim) == {"no renewal in time"}
    wait_quiet(cluster)
    assert worker(cluster, victim.worker_id).pid == victim.pid, "it should have come back, not been replaced"


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@aimed
def test_prefill_worker_killed_in_mid_transfer(cluster, client, options):
    undisturbed = client.complete(LONG, **options)
    since_ns = time.monotonic_ns()
    stream = client.generate(LONG, **options)
    assert stream.started.prompt_token_ids == tuple(LONG)
    check = kill_serving_prefill_in_its_transfer(cluster, since_ns)
    result = stream.read()
    assert same(result, undisturbed)
    assert (result.attempts, result.exact) == (1, True)
    check()
    assert rungs_after_a_lost_sender(cluster, result) == ["another sender"]


@aimed
def test_the_only_prefill_worker_killed(cluster, client):
    undisturbed = client.complete(LONG, **SAMPLED)
    spare = worker(cluster, "prefill-1")
    send_signal(spare, signal.SIGSTOP)
    try:
        wait_for(lambda: worker(cluster, "prefill-1").state == "lost", "the spare one is lost")
        since_ns = time.monotonic_ns()
        stream = client.generate(LONG, **SAMPLED)
        assert stream.started.request_id
        check = kill_serving_prefill_in_its_transfer(cluster, since_ns)
        result = stream.read()
    finally:
        send_signal(spare, signal.SIGCONT)
    assert same(result, undisturbed)
    assert (result.attempts, result.exact) == (1, True)
    check()
    assert rungs_after_a_lost_sender(cluster, result)[-1] == "local"


@aimed
def test_decode_worker_killed_while_it_receives(cluster, client):
    undisturbed = client.complete(LONG, **SAMPLED)
    since_ns = time.monotonic_ns()
    stream = client.generate(LONG, **SAMPLED)
    assert stream.started.request_id
    decode_id, _ = first_frame_received(cluster, since_ns)
    kill(worker(cluster, decode_id))
    result = stream.read()
    assert_moved(result, undisturbed)
    (failure,) = failures_of(cluster, result.request_id)
    if failure["phase"] == "decode":
        raise Missed("it had received everything")
    assert failure["phase"] == "prefill"


@aimed
def test_prefill_worker_frozen_in_mid_transfer(cluster, client):
    undisturbed = client.complete(LONG, **SAMPLED)
    since_ns = time.monotonic_ns()
    stream = client.generate(LONG, **SAMPLED)
    assert stream.started.request_id
    first_frame_received(cluster, since_ns)
    victim = serving(cluster, "prefill")
    send_signal(victim, signal.SIGSTOP)
    try:
        result = stream.read()
    finally:
        send_signal(victim, signal.SIGCONT)
    assert same(result, undisturbed)
    assert result.attempts == 1
    assert rungs_after_a_lost_sender(cluster, result) == ["another sender"]
    assert losses_of(cluster, victim) == {"no renewal in time"}


def strike_its_router_in_mid_stream(cluster, stream, undisturbed, number):
    """Send the first router a signal once it has sent ten tokens of this stream, and read the stream to its end: it has
    gone on at another router."""
    received, victim = 0, cluster.info()
    try:
        for delta in stream:
            before, received = received, received + len(delta.token_ids)
            if before <= 10 < received:
                os.kill(victim.pid, number)
    finally:
        if number == signal.SIGSTOP:
            os.kill(victim.pid, signal.SIGCONT)
    assert same(stream.result, undisturbed)
    if stream.result.resumptions == 0:
        raise Missed("the stream was over")
    assert stream.result.resumptions == 1


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@aimed
def test_a_killed_routers_stream_goes_on_at_another_one(cluster, options):
    with Client(cluster.grpc_addresses) as client:
        undisturbed = client.complete(SHORT, **options)
        stream = client.generate(SHORT, **options)
        strike_its_router_in_mid_stream(cluster, stream, undisturbed, signal.SIGKILL)
    owners = [attempt["owner"] for attempt in attempts_of(cluster, stream.result.request_id)]
    assert len({owner.split("@")[1].split("#")[0] for owner in owners}) == 2
    with Client(cluster.grpc_address) as first:
        wait_for(first.healthy, "its return")


@aimed
def test_a_frozen_routers_stream_goes_on_at_another_one(cluster):
    frozen = cluster.info().pid
    with Client(cluster.grpc_addresses) as client:
        undisturbed = client.complete(SHORT, **SAMPLED)
        strike_its_router_in_mid_stream(cluster, client.generate(SHORT, **SAMPLED), undisturbed, signal.SIGSTOP)
    assert cluster.info().pid == frozen, "it should go on, not be replaced"


@aimed
def test_a_killed_routers_stream_goes_on_when_it_comes_back_at_its_address(cluster, client):
    undisturbed = client.complete(SHORT, **SAMPLED)
    workers = {each.incarnation for each in cluster.info().workers}
    strike_its_router_in_mid_stream(cluster, client.generate(SHORT, **SAMPLED), undisturbed, signal.SIGKILL)
    wait_for(lambda: {w.incarnation for w in cluster.info().workers} == workers, "the same workers at the new router")


@aimed
def test_all_decode_workers_killed_and_a_prefill_worker_takes_both_roles(cluster, client):
    undisturbed = client.complete(SHORT, **SAMPLED)
    stream = client.generate(SHORT, **SAMPLED)
    received = 0
    for delta in stream:
        received += len(delta.token_ids)
        if 10 < received <= 10 + len(delta.token_ids):
            for worker_id in ("decode-0", "decode-1"):
                kill(worker(cluster, worker_id))
    assert same(stream.result, undisturbed)
    if stream.result.attempts == 1:
        raise Missed("the stream was over")
    first, *_, last = attempts_of(cluster, stream.result.request_id)
    assert first["decode"].startswith("decode-")
    assert last["decode"].startswith("prefill-")
    assert last["local"]


@aimed
def test_several_streams_on_a_killed_decode_worker_all_go_on(cluster, client):
    prompts = [f"{SHORT} number {number}" for number in range(6)]
    undisturbed = [client.complete(prompt, **SAMPLED) for prompt in prompts]
    streams = [client.generate(prompt, **SAMPLED) for prompt in prompts]
    iterators = [iter(stream) for stream in streams]
    for iterator in iterators:
        next(iterator)
    victim = worker(cluster, "decode-0")
    kill(victim)
    for iterator in iterators:
        for _ in iterator:
            pass
    assert all(same(stream.result, expected) for stream, expected in zip(streams, undisturbed, strict=True))
    first_places = [attempts_of(cluster, stream.result.request_id)[0]["decode"] for stream in streams]
    assert first_places.count(victim.incarnation) == 3
    moved = [place for place, stream in zip(first_places, streams, strict=True) if stream.result.attempts > 1]
    assert set(moved) <= {victim.incarnation}
    assert all(stream.result.attempts <= 2 for stream in streams)
    if len(moved) < 3:
        raise Missed("some of its streams were over")
