"""What a client gets from a running cluster."""

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from pdserve.errors import AlreadyExists, Cancelled, DeadlineExceeded, InvalidArgument, NotFound
from pdserve.types import FinishReason
from router.text import Tokenizer
from support.clusters import Missed, aimed, wait_for

pytestmark = pytest.mark.cluster

GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def tokenizer(small_checkpoint):
    return Tokenizer.load(small_checkpoint)


def test_a_stream_says_what_it_is_and_adds_up(client, tokenizer):
    stream = client.generate("The lighthouse", request_id="my-own-id", logprobs=2, **GREEDY)
    deltas = list(stream)
    result = stream.result
    assert stream.started.request_id == result.request_id == "my-own-id"
    assert stream.started.prompt_token_ids == tuple(tokenizer.encode("The lighthouse"))
    assert result.text == "".join(delta.text for delta in deltas) == tokenizer.decode(result.token_ids)
    assert len(result.token_ids) == len(result.logprobs) == result.usage.completion_tokens == 24
    assert all(token.logprob <= token.top[0][1] <= 0 for token in result.logprobs)
    assert result.usage.prompt_tokens == len(stream.started.prompt_token_ids)
    assert result.finish_reason is FinishReason.LENGTH
    assert (result.attempts, result.exact) == (1, True)
    assert 0 < result.ttft_ms < result.e2e_ms


def test_a_chat_is_the_template_and_nothing_more(client, tokenizer):
    from router.text import ChatMessage

    messages = [("system", "You are terse."), ("user", "Hello!")]
    by_chat = client.complete(messages, **GREEDY)
    ids = tokenizer.apply_chat_template([ChatMessage(*message) for message in messages])
    assert by_chat.prompt_token_ids == tuple(ids)
    assert by_chat.token_ids == client.complete(ids, **GREEDY).token_ids


def test_a_seed_decides_a_sampled_stream_and_a_request_id_stands_in_for_it(client):
    options = {"temperature": 1.2, "max_tokens": 16, "ignore_eos": True}
    first, second = (client.complete("Once", seed=5, **options) for _ in range(2))
    assert first.token_ids == second.token_ids
    named, again = (client.complete("Once", request_id="same-name", **options) for _ in range(2))
    assert (named.seed, named.token_ids) == (again.seed, again.token_ids)
    assert len({client.complete("Once", **options).token_ids for _ in range(3)}) == 3


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_stop_string_over_a_token_border_ends_the_stream_without_it(client, tokenizer, cut):
    free = client.complete("The lighthouse", **GREEDY)
    pieces = [tokenizer.decode([token_id]) for token_id in free.token_ids]
    position = next(i for i in range(3, 20) if pieces[i].strip() and pieces[i + 1].strip())
    stop = pieces[position][-cut:] + pieces[position + 1][:cut]
    result = client.complete("The lighthouse", stop=[stop, "never to be seen"], **GREEDY)
    assert stop not in result.text
    assert free.text.startswith(result.text + stop)
    assert (result.finish_reason, result.stop) == (FinishReason.STOP, stop)
    assert result.token_ids == free.token_ids[: len(result.token_ids)]


def test_a_stop_id_is_reported(client):
    free = client.complete("The lighthouse", **GREEDY)
    stop_id = free.token_ids[5]
    result = client.complete("The lighthouse", stop_token_ids=[stop_id], **GREEDY)
    assert result.stop == stop_id
    assert result.token_ids == free.token_ids[: free.token_ids.index(stop_id) + 1]


def test_one_token_is_computed_by_prefill_and_streamed_by_decode(client):
    result = client.complete("The lighthouse", temperature=0, max_tokens=1, logprobs=0)
    assert len(result.token_ids) == len(result.logprobs) == 1


def seconds_until_idle(cluster):
    """How long it takes until no request runs and no block is leased."""
    begin = time.monotonic()
    wait_for(lambda: not cluster.info().running_requests, "the router's notice")
    wait_for(lambda: not any(worker.blocks.leased for worker in cluster.info().workers), "the leases' return")
    return time.monotonic() - begin


@aimed
def test_a_client_that_goes_away_frees_its_blocks_within_a_second(cluster, client):
    stream = client.generate("Once", temperature=0, max_tokens=2000, ignore_eos=True)
    for delta in stream:
        assert delta.token_ids
        break
    if seconds_until_idle(cluster) > 1.0:
        raise Missed("something was away for a while")


@aimed
def test_a_deadline_ends_the_work_too(cluster, client):
    with pytest.raises(DeadlineExceeded):
        client.complete("Once", temperature=0, max_tokens=2000, ignore_eos=True, timeout_s=0.5)
    if seconds_until_idle(cluster) > 1.0:
        raise Missed("something was away for a while")


def test_abort_ends_a_stream_from_elsewhere(client):
    stream = client.generate("Once", request_id="to-abort", temperature=0, max_tokens=2000, ignore_eos=True)
    iterator = iter(stream)
    next(iterator)
    client.abort("to-abort")
    with pytest.raises(Cancelled):
        list(iterator)
    with pytest.raises(NotFound, match="to-abort"):
        client.abort("to-abort")


def test_a_request_id_in_flight_is_refused_and_the_first_goes_on(client):
    stream = client.generate("Once", request_id="twice", temperature=0, max_tokens=2000, ignore_eos=True)
    iterator = iter(stream)
    next(iterator)
    with pytest.raises(AlreadyExists, match="twice"):
        client.complete("Once", request_id="twice", max_tokens=1)
    assert next(iterator).token_ids
    stream.cancel()


BAD = [
    ({"prompt": ""}, "prompt", "is empty"),
    ({"prompt": []}, "prompt_token_ids", "has no tokens"),
    ({"prompt": [("user", "hi"), ("wizard", "hi")]}, "chat", "wizard"),
    ({"prompt": [5] * 5000}, "prompt_token_ids", "at most"),
    ({"prompt": [5, 60_000]}, "prompt_token_ids", r"token 1 is 60000: must be in \[0, 49151\]"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": -3}, "max_tokens", "at least 1"),
    ({"max_tokens": 100_000}, "max_tokens", "room for at most"),
    ({"temperature": -0.1}, "temperature", "at least 0"),
    ({"temperature": float("nan")}, "temperature", "finite"),
    ({"top_p": 0.0}, "top_p", r"in \(0, 1\]"),
    ({"top_p": 1.01}, "top_p", r"in \(0, 1\]"),
    ({"top_k": -1}, "top_k", "at least 0"),
    ({"min_p": 1.5}, "min_p", r"in \[0, 1\]"),
    ({"stop": [""]}, "stop", "is empty"),
    ({"stop_token_ids": [60_000]}, "stop_token_ids", "must be in"),
    ({"min_tokens": 3, "max_tokens": 2}, "min_tokens", r"in \[0, 2\]"),
    ({"presence_penalty": 2.5}, "presence_penalty", r"in \[-2, 2\]"),
    ({"frequency_penalty": float("nan")}, "frequency_penalty", r"in \[-2, 2\]"),
    ({"repetition_penalty": 0.0}, "repetition_penalty", r"in \[0.01, 2\]"),
    ({"logit_bias": {60_000: 1.0}}, "logit_bias", "must be in"),
    ({"logit_bias": {5: 101.0}}, "logit_bias", r"in \[-100, 100\]"),
    ({"logprobs": 21}, "logprobs", r"in \[0, 20\]"),
    ({"model": "gpt-5"}, "model", "use 'small'"),
    ({"request_id": "x" * 200}, "request_id", "at most 128"),
]


@pytest.mark.parametrize(("request_", "field", "range_"), BAD, ids=[f"{b[1]}-{i}" for i, b in enumerate(BAD)])
def test_a_bad_request_is_refused_at_the_door_and_the_next_is_served(client, request_, field, range_):
    options = {"prompt": "Hello", "max_tokens": 2, "temperature": 0, **request_}
    with pytest.raises(InvalidArgument, match=range_) as caught:
        client.complete(options.pop("prompt"), **options)
    assert caught.value.field == field
    assert client.complete("Hello", temperature=0, max_tokens=2, ignore_eos=True).usage.completion_tokens == 2


def test_thirty_two_at_once_equal_their_solo_runs(client):
    numbers = random.Random(7)
    jobs = []
    for index in range(32):
        length = [1, 2, 31, 32, 33, 1500][index] if index < 6 else numbers.randrange(1, 600)
        options = {"temperature": 0.0 if index % 2 else 1.0, "seed": index, "max_tokens": numbers.randrange(1, 101)}
        jobs.append(([numbers.randrange(3, 49_000) for _ in range(length)], options))

    def serve(job):
        prompt, options = job
        return client.complete(prompt, logprobs=0, **options)

    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(serve, jobs))
    for number, (job, result) in enumerate(zip(jobs, together, strict=True)):
        alone = serve(job)
        assert (alone.token_ids, alone.logprobs, alone.text) == (result.token_ids, result.logprobs, result.text), number
        assert alone.finish_reason is result.finish_reason


def test_the_router_says_what_it_serves(cluster, client):
    info = client.model_info()
    assert (info.model, info.vocab_size, info.max_model_len) == ("small", 49_152, 4096)
    wait_for(client.healthy, "that it serves")
    roles = [worker.role for worker in client.server_info().workers]
    assert roles == ["prefill", "prefill", "decode", "decode"]
