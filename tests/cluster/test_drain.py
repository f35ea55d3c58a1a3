"""Whoever is told to leave finishes what it has, and gets nothing new."""

import os
import signal
import subprocess
import sys

import pytest

from pdserve.client import Client
from pdserve.errors import NotFound
from support.clusters import aimed, attempts_of, log_events, send_signal, serving, wait_for, wait_quiet, worker

pytestmark = pytest.mark.cluster

PROMPT = "Once upon a time there was a lighthouse"
LONG = list(range(1000, 2600))
OPTIONS = {"temperature": 0.9, "seed": 17, "max_tokens": 150, "ignore_eos": True}


def same(one, other):
    return (one.token_ids, one.text, one.usage) == (other.token_ids, other.text, other.usage)


@aimed
def test_a_drained_decode_worker_finishes_its_stream_and_gets_no_other(cluster, client):
    undisturbed = client.complete(PROMPT, **OPTIONS)
    stream = client.generate(PROMPT, **OPTIONS)
    iterator = iter(stream)
    next(iterator)
    drained = serving(cluster, "decode").worker_id
    client.drain_worker(drained)
    try:
        wait_for(lambda: worker(cluster, drained).state == "draining", "its own word")
        others = [client.complete(f"{PROMPT} {number}", max_tokens=2) for number in range(3)]
        for _ in iterator:
            pass
    finally:
        client.drain_worker(drained, cancel=True)
    assert same(stream.result, undisturbed)
    assert stream.result.attempts == 1
    assert all(not attempts_of(cluster, each.request_id)[0]["decode"].startswith(drained) for each in others)
    wait_for(lambda: worker(cluster, drained).state == "ready", "its return")


def test_the_drain_command_returns_when_nothing_is_left_there(cluster, client):
    command = [sys.executable, "-m", "deploy", "drain", "decode-1", "--address", cluster.grpc_address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    state = worker(cluster, "decode-1").state
    undone = subprocess.run([*command, "--cancel"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, state, undone.returncode) == (0, "draining", 0), done.stderr
    wait_for(lambda: worker(cluster, "decode-1").state == "ready", "its return")


def test_draining_an_unknown_worker_names_those_there_are(cluster, client):
    with pytest.raises(NotFound, match="decode-0, decode-1, prefill-0, prefill-1"):
        client.drain_worker("decode-9")


@aimed
def test_sigterm_lets_a_decode_workers_stream_finish_where_it_is(cluster, client):
    undisturbed = client.complete(PROMPT, **OPTIONS)
    stream = client.generate(PROMPT, **OPTIONS)
    iterator = iter(stream)
    next(iterator)
    victim = serving(cluster, "decode")
    send_signal(victim, signal.SIGTERM)
    for _ in iterator:
        pass
    assert same(stream.result, undisturbed)
    assert stream.result.attempts == 1
    wait_for(lambda: worker(cluster, victim.worker_id).pid not in (0, victim.pid), "a new incarnation", 60.0)
    assert log_events(cluster, victim.worker_id, "drained")[-1]["left"] == 0


@aimed
def test_sigterm_lets_a_prefill_worker_send_what_it_computes(cluster, client):
    options = OPTIONS | {"max_tokens": 5}
    undisturbed = client.complete(LONG, **options)
    stream = client.generate(LONG, **options)
    assert stream.started
    wait_for(lambda: busy_prefill(cluster) or not cluster.info().running_requests, "a prefill worker at work")
    victim = serving(cluster, "prefill")
    send_signal(victim, signal.SIGTERM)
    assert same(stream.read(), undisturbed)
    assert stream.result.attempts == 1
    wait_for(lambda: worker(cluster, victim.worker_id).pid not in (0, victim.pid), "a new incarnation", 60.0)
    assert log_events(cluster, victim.worker_id, "drained")[-1]["left"] == 0


def busy_prefill(cluster):
    return any(each.role == "prefill" and each.requests for each in cluster.info().workers)


def test_sigterm_lets_a_routers_streams_finish_and_sends_new_requests_elsewhere(cluster):
    with Client(cluster.grpc_addresses) as client, Client(cluster.grpc_address) as first:
        undisturbed = client.complete(PROMPT, **OPTIONS)
        stream = client.generate(PROMPT, **OPTIONS)
        iterator = iter(stream)
        next(iterator)
        old, drains = cluster.info().pid, len(log_events(cluster, "router-0", "router drains"))
        os.kill(old, signal.SIGTERM)
        wait_for(lambda: len(log_events(cluster, "router-0", "router drains")) > drains, "it hears")
        wait_for(lambda: not first.healthy(), "NOT_SERVING")
        new = client.complete(PROMPT, **(OPTIONS | {"max_tokens": 3}))
        for _ in iterator:
            pass
        assert same(stream.result, undisturbed)
        assert (stream.result.attempts, stream.result.resumptions) == (1, 0)
        elsewhere = log_events(cluster, "router-1", "attempt started")
        assert any(f"/{new.request_id}@" in line["owner"] for line in elsewhere)
        wait_for(lambda: first.healthy() and first.server_info().pid != old, "its return", 60.0)
    wait_quiet(cluster)
