"""Kill any worker at any moment: the client's stream does not change by one bit, and no block leaks.

Each test runs a request undisturbed, then again with a kill, and shows that the kill hit the phase it names.
"""

import os
import signal
import time

import pytest

from pdserve.client import Client
from support.clusters import attempts_of, failures_of, kill, log_events, rungs_of, serving, wait_for, wait_quiet, worker

pytestmark = pytest.mark.cluster

SHORT = "Once upon a time there was a lighthouse"
LONG = list(range(1000, 2600))
GREEDY = {"temperature": 0, "max_tokens": 100, "ignore_eos": True, "logprobs": 1}
SAMPLED = {"temperature": 0.9, "seed": 17, "max_tokens": 100, "ignore_eos": True, "logprobs": 1}


def same(disturbed, undisturbed):
    """Everything a client sees but ids and times."""
    fields = ("token_ids", "text", "logprobs", "finish_reason", "stop", "usage", "prompt_token_ids")
    return all(getattr(disturbed, name) == getattr(undisturbed, name) for name in fields)


def losses_of(cluster, victim):
    """Why the first router took this incarnation for lost, however often."""
    lines = log_events(cluster, "router-0", "worker lost")
    return {line["reason"] for line in lines if line["worker"] == victim.incarnation}


def first_frame_received(cluster, since_ns):
    """Wait for the first frame of a transfer that began after `since_ns`; the decode worker's id, and the transfer."""

    def look():
        for worker_id in ("decode-0", "decode-1"):
            for event in cluster.trace_events(worker_id, since_ns):
                if event.name == "frame_received":
                    return worker_id, event.fields["transfer"]
        return None

    return wait_for(look, "the first frame")


def kill_serving_prefill_in_its_transfer(cluster, since_ns):
    """SIGKILL the prefill worker once frames of its transfer are at the decode worker, and not yet all."""
    decode_id, transfer = first_frame_received(cluster, since_ns)
    victim = serving(cluster, "prefill")
    kill(victim)
    wait_for(lambda: worker(cluster, victim.worker_id).pid != victim.pid, "the router's notice")
    events = cluster.trace_events(decode_id, since_ns)
    mine = [event.name for event in events if event.fields.get("transfer") == transfer]
    assert "frame_received" in mine, "the kill came before the transfer"
    assert "transfer_complete" not in mine, "the kill came after the transfer"


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
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
    assert same(result, undisturbed)
    assert (result.attempts, result.exact) == (2, True)
    (failure,) = failures_of(cluster, result.request_id)
    assert failure["phase"] == "decode"
    first, second = attempts_of(cluster, result.request_id)
    assert first["decode"] == victim.incarnation != second["decode"]


def test_decode_worker_frozen_in_mid_stream_and_thawed_later(cluster, client):
    undisturbed = client.complete(SHORT, **SAMPLED)
    stream = client.generate(SHORT, **SAMPLED)
    received, victim = 0, None
    try:
        for delta in stream:
            received += len(delta.token_ids)
            if victim is None and received >= 20:
                victim = serving(cluster, "decode")
                os.kill(victim.pid, signal.SIGSTOP)
    finally:
        if victim is not None:
            os.kill(victim.pid, signal.SIGCONT)
    assert same(stream.result, undisturbed)
    assert stream.result.attempts == 2
    assert losses_of(cluster, victim) == {"no renewal in time"}
    wait_quiet(cluster)
    assert worker(cluster, victim.worker_id).pid == victim.pid, "it should have come back, not been replaced"


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_prefill_worker_killed_in_mid_transfer(cluster, client, options):
    undisturbed = client.complete(LONG, **options)
    since_ns = time.monotonic_ns()
    stream = client.generate(LONG, **options)
    assert stream.started.prompt_token_ids == tuple(LONG)
    kill_serving_prefill_in_its_transfer(cluster, since_ns)
    result = stream.read()
    assert same(result, undisturbed)
    assert (result.attempts, result.exact) == (1, True)
    assert rungs_of(cluster, result.request_id) == ["another sender"]


def test_the_only_prefill_worker_killed(cluster, client):
    undisturbed = client.complete(LONG, **SAMPLED)
    spare = worker(cluster, "prefill-1")
    os.kill(spare.pid, signal.SIGSTOP)
    try:
        wait_for(lambda: worker(cluster, "prefill-1").state == "lost", "the spare one is lost")
        since_ns = time.monotonic_ns()
        stream = client.generate(LONG, **SAMPLED)
        assert stream.started.request_id
        kill_serving_prefill_in_its_transfer(cluster, since_ns)
        result = stream.read()
    finally:
        os.kill(spare.pid, signal.SIGCONT)
    assert same(result, undisturbed)
    assert (result.attempts, result.exact) == (1, True)
    assert rungs_of(cluster, result.request_id)[-1] == "local"


def test_decode_worker_killed_while_it_receives(cluster, client):
    undisturbed = client.complete(LONG, **SAMPLED)
    since_ns = time.monotonic_ns()
    stream = client.generate(LONG, **SAMPLED)
    assert stream.started.request_id
    decode_id, _ = first_frame_received(cluster, since_ns)
    kill(worker(cluster, decode_id))
    result = stream.read()
    assert same(result, undisturbed)
    assert result.attempts == 2
    (failure,) = failures_of(cluster, result.request_id)
    assert failure["phase"] == "prefill"


def test_prefill_worker_frozen_in_mid_transfer(cluster, client):
    undisturbed = client.complete(LONG, **SAMPLED)
    since_ns = time.monotonic_ns()
    stream = client.generate(LONG, **SAMPLED)
    assert stream.started.request_id
    first_frame_received(cluster, since_ns)
    victim = serving(cluster, "prefill")
    os.kill(victim.pid, signal.SIGSTOP)
    try:
        result = stream.read()
    finally:
        os.kill(victim.pid, signal.SIGCONT)
    assert same(result, undisturbed)
    assert result.attempts == 1
    assert rungs_of(cluster, result.request_id) == ["another sender"]
    assert losses_of(cluster, victim) == {"no renewal in time"}


def kill_its_router_in_mid_stream(cluster, stream):
    """SIGKILL the first router once it has sent ten tokens of this stream, and read the stream to its end."""
    received, victim = 0, cluster.info()
    for delta in stream:
        received += len(delta.token_ids)
        if received > 10 and victim is not None:
            assert received < 90, "the kill came after the stream"
            os.kill(victim.pid, signal.SIGKILL)
            victim = None
    return stream.result


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_killed_routers_stream_goes_on_at_another_one(cluster, options):
    with Client(cluster.grpc_addresses) as client:
        undisturbed = client.complete(SHORT, **options)
        result = kill_its_router_in_mid_stream(cluster, client.generate(SHORT, **options))
    assert same(result, undisturbed)
    assert result.resumptions == 1
    owners = [attempt["owner"] for attempt in attempts_of(cluster, result.request_id)]
    assert len({owner.split("@")[1].split("#")[0] for owner in owners}) == 2
    with Client(cluster.grpc_address) as first:
        wait_for(first.healthy, "its return")


def test_a_frozen_routers_stream_goes_on_at_another_one(cluster):
    frozen = cluster.info().pid
    with Client(cluster.grpc_addresses) as client:
        undisturbed = client.complete(SHORT, **SAMPLED)
        stream = client.generate(SHORT, **SAMPLED)
        try:
            for number, _ in enumerate(stream):
                if number == 10:
                    os.kill(frozen, signal.SIGSTOP)
        finally:
            os.kill(frozen, signal.SIGCONT)
    assert same(stream.result, undisturbed)
    assert stream.result.resumptions == 1
    assert cluster.info().pid == frozen, "it should go on, not be replaced"


def test_a_killed_routers_stream_goes_on_when_it_comes_back_at_its_address(cluster, client):
    undisturbed = client.complete(SHORT, **SAMPLED)
    workers = {each.incarnation for each in cluster.info().workers}
    result = kill_its_router_in_mid_stream(cluster, client.generate(SHORT, **SAMPLED))
    assert same(result, undisturbed)
    assert result.resumptions == 1
    wait_for(lambda: {w.incarnation for w in cluster.info().workers} == workers, "the same workers at the new router")


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
    first, *_, last = attempts_of(cluster, stream.result.request_id)
    assert first["decode"].startswith("decode-")
    assert last["decode"].startswith("prefill-")
    assert last["local"]


def test_several_streams_on_a_killed_decode_worker_all_go_on(cluster, client):
    prompts = [f"{SHORT} number {number}" for number in range(6)]
    undisturbed = [client.complete(prompt, **SAMPLED) for prompt in prompts]
    streams = [client.generate(prompt, **SAMPLED) for prompt in prompts]
    iterators = [iter(stream) for stream in streams]
    for iterator in iterators:
        next(iterator)
    victim = worker(cluster, "decode-0")
    assert victim.requests == 3
    kill(victim)
    for iterator in iterators:
        for _ in iterator:
            pass
    assert all(same(stream.result, expected) for stream, expected in zip(streams, undisturbed, strict=True))
    assert sorted(stream.result.attempts for stream in streams) == [1, 1, 1, 2, 2, 2]
