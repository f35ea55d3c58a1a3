"""n outputs of one prompt, penalties and stop strings, undisturbed and in the middle of a failover."""

import os
import signal

import pytest

from pdserve.client import Client
from support.clusters import Missed, aimed, attempts_of, kill, serving, wait_for

pytestmark = pytest.mark.cluster

PROMPT = "Once upon a time there was a lighthouse"
RICH = {
    "n": 3,
    "temperature": 0.9,
    "seed": 17,
    "max_tokens": 90,
    "min_tokens": 20,
    "ignore_eos": True,
    "logprobs": 1,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.2,
    "logit_bias": {100: -5.0},
}


def disturbed(client, when, disturb, **options):
    """The result of a request that is disturbed once it has sent `when` tokens."""
    stream, received, done = client.generate(PROMPT, **options), 0, False
    for delta in stream:
        received += len(delta.token_ids)
        if received >= when and not done:
            disturb()
            done = True
    assert done
    return stream.result


def test_outputs_differ_and_the_prompt_is_prefilled_once(cluster, client):
    result = client.complete(PROMPT, **RICH)
    assert len({output.token_ids for output in result.outputs}) == 3
    assert [len(output.token_ids) for output in result.outputs] == [90, 90, 90]
    assert all(len(output.logprobs) == 90 for output in result.outputs)
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (len(result.prompt_token_ids), 270)
    assert client.complete(PROMPT, **(RICH | {"n": 1})).outputs == result.outputs[:1]
    attempts = attempts_of(cluster, result.request_id)
    assert [attempt["share"] for attempt in attempts] == [None, attempts[0]["owner"], attempts[0]["owner"]]


@aimed
def test_a_decode_worker_killed_under_several_outputs(cluster, client):
    undisturbed = client.complete(PROMPT, **RICH)
    result = disturbed(client, 60, lambda: kill(serving(cluster, "decode")), **RICH)
    assert result.outputs == undisturbed.outputs
    assert result.usage == undisturbed.usage
    if result.attempts == 1:
        raise Missed("the stream was over")
    assert result.attempts == 2
    shares = [attempt["share"] for attempt in attempts_of(cluster, result.request_id)]
    assert sum(share is None for share in shares) == 2, "the prompt was prefilled once more, not once for each output"


@aimed
def test_a_router_killed_under_several_outputs(cluster):
    with Client(cluster.grpc_addresses) as client, Client(cluster.grpc_address) as first:
        undisturbed = client.complete(PROMPT, **RICH)
        result = disturbed(client, 60, lambda: os.kill(first.server_info().pid, signal.SIGKILL), **RICH)
        assert result.outputs == undisturbed.outputs
        wait_for(first.healthy, "its return", 60.0)
        if result.resumptions == 0:
            raise Missed("the stream was over")
        assert result.resumptions == 1


@pytest.mark.parametrize("when", [10, 30, 40])
@aimed
def test_a_stop_string_that_is_half_there_at_the_kill_still_matches(cluster, client, when):
    options = RICH | {"n": 1, "min_tokens": 0}
    pieces = [delta.text for delta in client.generate(PROMPT, **options)]
    stop = "".join(pieces[25:70])[:200]
    options |= {"stop": [stop]}
    undisturbed = client.complete(PROMPT, **options)
    assert undisturbed.stop == stop
    assert len(undisturbed.token_ids) > 55
    result = disturbed(client, when, lambda: kill(serving(cluster, "decode")), **options)
    assert (result.outputs, result.usage, result.stop) == (undisturbed.outputs, undisturbed.usage, stop)
    if result.attempts == 1:
        raise Missed("the stream was over")
    assert result.attempts == 2
