"""The clients against a real gRPC server on a real socket, whose answers each test scripts."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from pdserve.client import AsyncClient, Client, Result, Stream, TokenLogprob, resume
from pdserve.client.resume import ConnectionLost
from pdserve.clock import Clock, ManualClock
from pdserve.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    NotFound,
    PdserveError,
    ProtocolError,
    ResourceExhausted,
    Unavailable,
)
from pdserve.rpc import inference_pb2 as pb
from pdserve.rpc import inference_pb2_grpc
from pdserve.types import FinishReason, Usage

DEADLINE_S = 10.0
Script = Callable[[pb.GenerateRequest, grpc.ServicerContext], Iterator[pb.GenerateResponse]]


def started(**fields: Any) -> pb.GenerateResponse:
    values = {"request_id": "r1", "model": "tiny", "seed": 2**64 - 1, "prompt_token_ids": [7, 8], **fields}
    return pb.GenerateResponse(started=pb.Started(**values))


def delta(text: str, *token_ids: int, **fields: Any) -> pb.GenerateResponse:
    return pb.GenerateResponse(delta=pb.Delta(text=text, token_ids=token_ids, **fields))


def finished(**fields: Any) -> pb.GenerateResponse:
    end = {"finish_reason": pb.FINISH_REASON_LENGTH}
    end |= {name: fields.pop(name) for name in ("finish_reason", "stop", "stop_token_id") if name in fields}
    values = {
        "outputs": [pb.OutputEnd(**end)],
        "usage": pb.Usage(prompt_tokens=2, completion_tokens=3, cached_tokens=1),
        "exact": True,
        "attempts": 1,
        **fields,
    }
    return pb.GenerateResponse(finished=pb.Finished(**values))


WHOLE = (started(), delta("Hel", 1), delta("lo", 2, 3), finished())


class ScriptedHealth(health.HealthServicer):
    """Does `on_check` before it answers."""

    def __init__(self) -> None:
        super().__init__()
        self.on_check: Callable[[], Any] = lambda: None

    def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        self.on_check()
        return super().Check(request, context)


class ScriptedRouter(inference_pb2_grpc.InferenceServicer):
    """Answers Generate with `script` and remembers the requests."""

    def __init__(self) -> None:
        self.script: Script = lambda request, context: iter(WHOLE)
        self.requests: list[pb.GenerateRequest] = []
        self.in_flight = {"r1"}
        self.health = ScriptedHealth()
        self.address = ""

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        self.requests.append(request)
        yield from self.script(request, context)

    def Abort(self, request: pb.AbortRequest, context: grpc.ServicerContext) -> pb.AbortResponse:
        if request.request_id not in self.in_flight:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no request {request.request_id!r} in flight")
        return pb.AbortResponse()

    def GetModelInfo(self, request: pb.GetModelInfoRequest, context: grpc.ServicerContext) -> pb.ModelInfo:
        return pb.ModelInfo(model="tiny", vocab_size=100, max_model_len=32, eos_token_ids=[2])

    def GetServerInfo(self, request: pb.GetServerInfoRequest, context: grpc.ServicerContext) -> pb.ServerInfo:
        return pb.ServerInfo(version="1", workers=[pb.WorkerStatus(worker_id="decode-0", state="ready")])

    def answer(self, *events: pb.GenerateResponse) -> None:
        self.script = lambda request, context: iter(events)


class HangingScript:
    """Starts a stream and keeps it open until the client ends it, which sets `ended`."""

    def __init__(self, *events: pb.GenerateResponse) -> None:
        self.ended = threading.Event()
        self._events = events

    def __call__(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        if not context.add_callback(self.ended.set):
            self.ended.set()  # it had ended before this began
        yield from self._events
        self.ended.wait(DEADLINE_S)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that is there may take its time."""
    monkeypatch.setattr(resume, "CONNECT_TIMEOUT_S", DEADLINE_S)


@contextmanager
def scripted_router() -> Iterator[ScriptedRouter]:
    servicer = ScriptedRouter()
    with ThreadPoolExecutor(4) as pool:
        limit = 64 * 1024 * 1024
        options = [("grpc.max_receive_message_length", limit), ("grpc.max_send_message_length", limit)]
        server = grpc.server(pool, options=options)
        inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(servicer.health, server)
        servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        yield servicer
        server.stop(None).wait(DEADLINE_S)


@pytest.fixture
def router() -> Iterator[ScriptedRouter]:
    with scripted_router() as router:
        yield router


@pytest.fixture
def other() -> Iterator[ScriptedRouter]:
    """A second one, that has no request in flight."""
    with scripted_router() as router:
        router.in_flight.clear()
        yield router


@pytest.fixture
def client(router: ScriptedRouter) -> Iterator[Client]:
    with Client(router.address) as client:
        yield client


class TestStream:
    def test_deltas_come_in_order_and_make_up_the_result(self, client: Client) -> None:
        stream = client.generate("hi")
        assert [(delta.text, delta.token_ids) for delta in stream] == [("Hel", (1,)), ("lo", (2, 3))]
        result = stream.result
        assert (result.text, result.token_ids) == ("Hello", (1, 2, 3))
        assert (result.request_id, result.model, result.seed) == ("r1", "tiny", 2**64 - 1)
        assert result.prompt_token_ids == (7, 8)
        assert result.usage == Usage(prompt_tokens=2, completion_tokens=3, cached_tokens=1)
        assert (result.finish_reason, result.stop) == (FinishReason.LENGTH, None)
        assert (result.exact, result.attempts) == (True, 1)
        assert result.logprobs == ()

    def test_started_is_there_before_the_first_token(self, router: ScriptedRouter, client: Client) -> None:
        router.script = script = HangingScript(started(prompt_token_ids=[5]))
        with client.generate("hi", timeout_s=DEADLINE_S) as stream:
            assert stream.started.prompt_token_ids == (5,)
            assert stream.started is stream.started
        assert script.ended.wait(DEADLINE_S)

    def test_started_can_be_asked_at_any_time(self, client: Client) -> None:
        stream = client.generate("hi")
        assert stream.started.request_id == "r1"
        assert stream.read().text == "Hello"
        assert stream.started.request_id == "r1"

    @pytest.mark.parametrize(
        ("match", "stop"),
        [({"stop": "\n\n"}, "\n\n"), ({"stop_token_id": 2}, 2), ({"stop_token_id": 0}, 0), ({}, None)],
    )
    def test_result_says_what_stopped_it(
        self, router: ScriptedRouter, client: Client, match: dict[str, Any], stop: str | int | None
    ) -> None:
        router.answer(started(), delta("a", 1), finished(finish_reason=pb.FINISH_REASON_STOP, **match))
        result = client.complete("hi")
        assert (result.finish_reason, result.stop) == (FinishReason.STOP, stop)

    def test_one_logprob_a_token_reaches_the_result(self, router: ScriptedRouter, client: Client) -> None:
        tokens = [
            pb.TokenLogprobs(logprob=-0.5, top=[pb.TopLogprob(token_id=1, logprob=-0.5)]),
            pb.TokenLogprobs(logprob=-2.0),
        ]
        router.answer(started(), delta("a", 1, logprobs=tokens[:1]), delta("b", 2, logprobs=tokens[1:]), finished())
        assert client.complete("hi", logprobs=1).logprobs == (TokenLogprob(-0.5, ((1, -0.5),)), TokenLogprob(-2.0))

    def test_leaving_the_iteration_cancels_the_request(self, router: ScriptedRouter, client: Client) -> None:
        router.script = script = HangingScript(started(), delta("a", 1))
        stream = client.generate("hi", timeout_s=DEADLINE_S)
        for _ in stream:
            break
        assert script.ended.wait(DEADLINE_S / 2)
        with pytest.raises(RuntimeError, match="no result yet"):
            _ = stream.result

    def test_cancel_from_another_thread_ends_the_iteration(self, router: ScriptedRouter, client: Client) -> None:
        router.script = script = HangingScript(started(), delta("a", 1))
        stream = client.generate("hi", timeout_s=DEADLINE_S)
        deltas = iter(stream)
        next(deltas)
        threading.Thread(target=stream.cancel).start()
        with pytest.raises(Cancelled):
            next(deltas)
        assert script.ended.wait(DEADLINE_S)

    def test_closing_the_client_ends_its_streams(self, router: ScriptedRouter) -> None:
        router.script = script = HangingScript(started(), delta("a", 1))
        client = Client(router.address)
        deltas = iter(client.generate("hi", timeout_s=DEADLINE_S))
        next(deltas)
        client.close()
        with pytest.raises(Cancelled):
            next(deltas)
        assert script.ended.wait(DEADLINE_S)

    def test_deadline_passes_on_a_silent_router(self, router: ScriptedRouter, client: Client) -> None:
        router.script = script = HangingScript(started())
        with pytest.raises(DeadlineExceeded):
            client.complete("hi", timeout_s=0.2)
        assert not router.requests or script.ended.wait(DEADLINE_S)

    @pytest.mark.parametrize(
        "events",
        [
            [],
            [started()],
            [started(), delta("a", 1)],
            [delta("a", 1), started(), finished()],
            [finished()],
            [started(), started(), finished()],
            [started(), finished(), delta("a", 1)],
            [started(), finished(), finished()],
            [started(), finished(finish_reason=pb.FINISH_REASON_UNSPECIFIED)],
        ],
    )
    def test_stream_that_breaks_the_protocol_is_an_error(
        self, router: ScriptedRouter, client: Client, events: list[pb.GenerateResponse]
    ) -> None:
        router.answer(*events)
        with pytest.raises(ProtocolError):
            client.complete("hi")

    def test_stream_that_ends_at_once_has_no_start(self, router: ScriptedRouter, client: Client) -> None:
        router.answer()
        with pytest.raises(ProtocolError):
            _ = client.generate("hi").started

    def test_event_of_a_kind_not_known_yet_is_skipped(self, router: ScriptedRouter, client: Client) -> None:
        router.answer(*WHOLE[:1], pb.GenerateResponse(), *WHOLE[1:])
        assert client.complete("hi").text == "Hello"

    def test_message_larger_than_grpcs_default_limit_passes(self, router: ScriptedRouter, client: Client) -> None:
        ids = [100_000] * 1_500_000
        router.script = lambda request, context: iter(
            (started(prompt_token_ids=request.prompt_token_ids.ids), finished())
        )
        assert len(client.complete(ids).prompt_token_ids) == len(ids)


class SteppingClock:
    """Every reading is half a second later than the one before."""

    def __init__(self) -> None:
        self._now = 100.0

    def now(self) -> float:
        self._now += 0.5
        return self._now


class TestTimes:
    def test_ttft_and_tpot_are_taken_from_arrivals(self, router: ScriptedRouter) -> None:
        # Readings: sent 100.5, started 101, deltas 101.5, 102, 102.5 (text only), finished 103.
        router.answer(started(), delta("a", 1), delta("b", 2, 3), delta("c"), finished())
        with Client(router.address, clock=SteppingClock()) as client:
            stream = client.generate("hi")
            assert [delta.arrived_s for delta in stream] == [101.5, 102.0, 102.5]
        result = stream.result
        assert (result.ttft_ms, result.tpot_ms, result.e2e_ms) == (1000.0, 250.0, 2500.0)

    def test_one_token_has_no_tpot(self, router: ScriptedRouter, client: Client) -> None:
        router.answer(started(), delta("a", 1), finished())
        result = client.complete("hi")
        assert result.tpot_ms is None
        assert result.ttft_ms > 0


def aborting(code: grpc.StatusCode, details: str) -> Script:
    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield started()
        yield delta("a", 1)
        context.abort(code, details)

    return script


def lose(context: grpc.ServicerContext) -> None:
    """End the call as a lost connection does."""
    context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")


def refuse_as_full(context: grpc.ServicerContext, retry_after_ms: int) -> None:
    delay = duration_pb2.Duration()
    delay.FromMilliseconds(retry_after_ms)
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    context.abort_with_status(
        rpc_status.to_status(status_pb2.Status(code=8, message="queue is full", details=[detail]))
    )


class TestErrors:
    @pytest.mark.parametrize(
        ("code", "expected"),
        [
            (grpc.StatusCode.INVALID_ARGUMENT, InvalidArgument),
            (grpc.StatusCode.RESOURCE_EXHAUSTED, ResourceExhausted),
            (grpc.StatusCode.UNAVAILABLE, ConnectionLost),  # a router that refuses says why in a status of its own
            (grpc.StatusCode.FAILED_PRECONDITION, FailedPrecondition),
            (grpc.StatusCode.ALREADY_EXISTS, AlreadyExists),
            (grpc.StatusCode.CANCELLED, Cancelled),
            (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
            (grpc.StatusCode.INTERNAL, InternalError),
            (grpc.StatusCode.UNKNOWN, InternalError),
        ],
    )
    def test_status_becomes_the_error_of_that_code(
        self, router: ScriptedRouter, client: Client, code: grpc.StatusCode, expected: type[PdserveError]
    ) -> None:
        router.script = aborting(code, "top_p: is 2")
        stream = client.generate("hi")
        texts = []
        with pytest.raises(expected, match="top_p: is 2") as caught:
            texts.extend(delta.text for delta in stream)
        assert type(caught.value) is expected

    def test_invalid_argument_keeps_its_field(self, router: ScriptedRouter, client: Client) -> None:
        router.script = aborting(grpc.StatusCode.INVALID_ARGUMENT, "top_p: is 2: must be in (0, 1]")
        with pytest.raises(InvalidArgument) as caught:
            client.complete("hi")
        assert (caught.value.field, caught.value.problem) == ("top_p", "is 2: must be in (0, 1]")

    def test_error_before_the_start_comes_out_of_started(self, router: ScriptedRouter, client: Client) -> None:
        def refuse(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
            context.abort(grpc.StatusCode.ALREADY_EXISTS, "in flight")
            yield

        router.script = refuse
        with pytest.raises(AlreadyExists):
            _ = client.generate("hi").started

    def test_retry_hint_of_a_full_router_is_read(self, router: ScriptedRouter, client: Client) -> None:
        router.script = lambda request, context: iter((refuse_as_full(context, 2500),))
        with pytest.raises(ResourceExhausted, match="queue is full") as caught:
            client.complete("hi")
        assert caught.value.retry_after_s == 2.5
        assert len(router.requests) == 1, "what nobody has begun is not asked for again"

    def test_nobody_listening_is_unavailable(self) -> None:
        with Client(f"127.0.0.1:{unused_port()}") as client, pytest.raises(Unavailable):
            client.complete("hi", timeout_s=DEADLINE_S)


_BOUND: list[socket.socket] = []  # to the end, so that nobody else gets their ports


def unused_port() -> int:
    """Where nobody listens."""
    _BOUND.append(socket.socket())
    _BOUND[-1].bind(("127.0.0.1", 0))
    port: int = _BOUND[-1].getsockname()[1]
    return port


def asked(router: ScriptedRouter) -> pb.GenerateRequest:
    """The one request that came, without the id that the client gives every request."""
    (request,) = router.requests
    assert request.request_id
    request.ClearField("request_id")
    return request


class TestRequest:
    def test_text_with_every_option_arrives_as_given(self, router: ScriptedRouter, client: Client) -> None:
        client.complete(
            "hi",
            request_id="r9",
            model="tiny",
            temperature=0.0,
            top_p=0.5,
            top_k=0,
            min_p=0.25,
            seed=2**64 - 1,
            max_tokens=5,
            stop=["a", "b"],
            stop_token_ids=[1, 2],
            ignore_eos=True,
            logprobs=0,
        )
        expected = pb.GenerateRequest(
            request_id="r9",
            model="tiny",
            prompt="hi",
            sampling=pb.SamplingParams(
                temperature=0.0,
                top_p=0.5,
                top_k=0,
                min_p=0.25,
                seed=2**64 - 1,
                max_tokens=5,
                stop=["a", "b"],
                stop_token_ids=[1, 2],
                ignore_eos=True,
                logprobs=0,
            ),
        )
        assert router.requests == [expected]

    def test_what_is_not_set_is_left_to_the_router(self, router: ScriptedRouter, client: Client) -> None:
        client.complete("hi", temperature=None, seed=None, stop=None)
        assert asked(router) == pb.GenerateRequest(prompt="hi")

    def test_single_stop_string_is_not_taken_for_its_letters(self, router: ScriptedRouter, client: Client) -> None:
        client.complete("hi", stop="END")
        assert list(router.requests[0].sampling.stop) == ["END"]

    @pytest.mark.parametrize(
        "prompt",
        [
            [("system", "be brief"), ("user", "hi")],
            [{"role": "system", "content": "be brief"}, {"content": "hi", "role": "user"}],
        ],
    )
    def test_messages_are_a_chat(self, router: ScriptedRouter, client: Client, prompt: Any) -> None:
        client.complete(prompt)
        messages = [pb.ChatMessage(role="system", content="be brief"), pb.ChatMessage(role="user", content="hi")]
        assert asked(router) == pb.GenerateRequest(chat=pb.Chat(messages=messages))

    @pytest.mark.parametrize("ids", [[1, 2, 3], (0, 4_294_967_295), range(3), np.arange(3), []])
    def test_integers_are_token_ids(self, router: ScriptedRouter, client: Client, ids: Any) -> None:
        client.complete(ids)
        assert asked(router) == pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=ids))
        assert router.requests[0].WhichOneof("input") == "prompt_token_ids"

    @pytest.mark.parametrize(
        ("once", "wanted"),
        [
            ((i for i in (1, 2, 3)), pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[1, 2, 3]))),
            (iter([]), pb.GenerateRequest(prompt_token_ids=pb.TokenIds())),
            (
                (message for message in [("user", "hi")]),
                pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])),
            ),
        ],
    )
    def test_what_can_be_read_only_once_is_not_sent_empty(
        self, router: ScriptedRouter, client: Client, once: Any, wanted: pb.GenerateRequest
    ) -> None:
        client.complete(once)
        assert asked(router) == wanted

    def test_bytes_are_no_token_ids(self, client: Client) -> None:
        with pytest.raises(TypeError, match="not bytes"):
            client.generate(b"hello")  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("prompt", "options", "field", "where"),
        [
            ("ab\ud800", {}, "prompt", "is"),
            ([("user", "hi"), ("user", "\udc00")], {}, "chat", r"messages\[1\]\.content is"),
            ([{"role": "\udfff", "content": "hi"}], {}, "chat", r"messages\[0\]\.role is"),
            ("hi", {"stop": "\ud83d"}, "stop", r"stop\[0\] is"),
            ("hi", {"stop": ["fine", "\ud83d"]}, "stop", r"stop\[1\] is"),
            ("hi", {"request_id": "\ud83d"}, "request_id", "is"),
            ("hi", {"model": "\ud83d"}, "model", "is"),
        ],
    )
    def test_text_that_is_not_unicode_is_refused_here(
        self, client: Client, prompt: Any, options: Any, field: str, where: str
    ) -> None:
        with pytest.raises(InvalidArgument, match=f"^{field}: {where} not valid Unicode: a lone surrogate") as caught:
            client.generate(prompt, **options)
        assert caught.value.field == field

    def test_an_id_that_is_not_unicode_is_refused_here(self, client: Client) -> None:
        with pytest.raises(InvalidArgument, match=r"^request_id: is not valid Unicode"):
            client.abort("\ud800")
        with pytest.raises(InvalidArgument, match=r"^worker_id: is not valid Unicode"):
            client.drain_worker("\ud800")

    def test_unknown_option_is_refused_here(self, client: Client) -> None:
        with pytest.raises(TypeError, match="unknown option: temprature"):
            client.generate("hi", temprature=0.5)

    @pytest.mark.parametrize(
        ("prompt", "options", "field"),
        [
            ("hi", {"seed": -1}, "seed"),
            ("hi", {"max_tokens": 2**31}, "max_tokens"),
            ("hi", {"stop_token_ids": [-1]}, "stop_token_ids"),
            ([-1], {}, "prompt_token_ids"),
        ],
    )
    def test_number_that_the_wire_cannot_carry_is_refused_here(
        self, client: Client, prompt: Any, options: Any, field: str
    ) -> None:
        with pytest.raises(InvalidArgument) as caught:
            client.generate(prompt, **options)
        assert caught.value.field == field

    @pytest.mark.parametrize("message", [{"role": "user", "text": "hi"}, {"role": "user"}, "hi", ("user",), 1.5])
    def test_what_is_not_a_message_is_refused_here(self, client: Client, message: Any) -> None:
        with pytest.raises(TypeError, match="role and content"):
            client.generate([message])

    @pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan")])
    def test_a_time_limit_in_which_nothing_can_happen_is_refused_here(self, client: Client, timeout_s: float) -> None:
        with pytest.raises(InvalidArgument, match="timeout_s: must be above 0"):
            client.generate("hi", timeout_s=timeout_s)

    @pytest.mark.parametrize("timeout_s", [float("inf"), 1e10, sys.maxsize])
    def test_an_endless_time_limit_is_none(self, client: Client, timeout_s: float) -> None:
        assert client.complete("hi", timeout_s=timeout_s).text == "Hello"
        assert client.server_info(timeout_s=timeout_s).version == "1"

    def test_a_string_may_name_several_routers(self, router: ScriptedRouter, patient: None) -> None:
        with Client(f"127.0.0.1:{unused_port()}, {router.address}") as client:
            assert client.complete("hi").text == "Hello"

    @pytest.mark.parametrize("addresses", ["", [], "127.0.0.1:1,", ["127.0.0.1:1", ""]])
    def test_an_address_that_is_missing_is_refused_here(self, addresses: Any) -> None:
        with pytest.raises(InvalidArgument, match="at least one router's host:port"):
            Client(addresses)


class TestOtherCalls:
    def test_infos_are_the_routers_own_messages(self, client: Client) -> None:
        assert client.model_info().eos_token_ids == [2]
        assert client.server_info().workers[0].worker_id == "decode-0"

    def test_where_one_router_is_gone_the_next_one_is_asked(self, router: ScriptedRouter, patient: None) -> None:
        addresses = f"127.0.0.1:{unused_port()},{router.address}"
        with Client(addresses) as client:
            assert client.server_info().workers[0].worker_id == "decode-0"
        assert run(lambda client: client.model_info(), addresses).eos_token_ids == [2]
        gone = f"127.0.0.1:{unused_port()},127.0.0.1:{unused_port()}"
        with Client(gone) as client, pytest.raises(Unavailable):
            client.server_info(timeout_s=1.0)

    def test_looking_for_another_router_takes_from_the_calls_own_time(self, router: ScriptedRouter) -> None:
        addresses = f"127.0.0.1:{unused_port()},{router.address}"
        with Client(addresses, clock=SteppingClock()) as client:
            with pytest.raises(Unavailable):
                client.server_info(timeout_s=1.0)  # two readings later
            assert client.server_info(timeout_s=DEADLINE_S).version == "1"

    def test_abort_of_an_unknown_request_is_not_found(self, client: Client) -> None:
        client.abort("r1")
        with pytest.raises(NotFound, match="no request 'r2' in flight"):
            client.abort("r2")

    def test_abort_finds_the_router_that_has_the_request(self, router: ScriptedRouter, other: ScriptedRouter) -> None:
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            gone, mute = unused_port(), silent.getsockname()[1]
            addresses = f"127.0.0.1:{mute},{other.address},127.0.0.1:{gone},{router.address}"
            with Client(addresses) as client:
                client.abort("r1", timeout_s=DEADLINE_S)
            run(lambda client: client.abort("r1", timeout_s=DEADLINE_S), addresses)

    def test_abort_is_not_found_where_no_router_has_the_request(
        self, router: ScriptedRouter, other: ScriptedRouter
    ) -> None:
        addresses = f"{router.address},127.0.0.1:{unused_port()},{other.address}"
        with Client(addresses) as client, pytest.raises(NotFound, match="no request 'r2' in flight"):
            client.abort("r2", timeout_s=DEADLINE_S)
        with pytest.raises(NotFound, match="no request 'r2' in flight"):
            run(lambda client: client.abort("r2", timeout_s=DEADLINE_S), addresses)

    def test_abort_where_no_router_answers_says_so(self) -> None:
        addresses = f"127.0.0.1:{unused_port()},127.0.0.1:{unused_port()}"
        with Client(addresses) as client, pytest.raises((Unavailable, DeadlineExceeded)):
            client.abort("r1", timeout_s=0.5)
        with pytest.raises((Unavailable, DeadlineExceeded)):
            run(lambda client: client.abort("r1", timeout_s=0.5), addresses)

    def test_health_follows_what_the_router_says(self, router: ScriptedRouter, client: Client) -> None:
        assert client.healthy(DEADLINE_S)
        router.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        assert not client.healthy(DEADLINE_S)

    def test_router_that_is_not_there_is_not_healthy(self) -> None:
        with Client(f"127.0.0.1:{unused_port()}") as client:
            assert not client.healthy(0.5)


def run(work: Callable[[AsyncClient], Any], address: str, clock: Clock | None = None) -> Any:
    """Run a coroutine with a client of its own, within the deadline."""

    async def bounded() -> Any:
        async with asyncio.timeout(DEADLINE_S), AsyncClient(address, clock=clock) as client:
            return await work(client)

    return asyncio.run(bounded())


async def happened(event: threading.Event) -> bool:
    return await asyncio.to_thread(event.wait, DEADLINE_S / 2)


class TestAsync:
    def test_deltas_and_result_are_the_blocking_ones(self, router: ScriptedRouter, client: Client) -> None:
        async def work(twin: AsyncClient) -> None:
            stream = twin.generate("hi", max_tokens=3, request_id="r1")
            assert (await stream.started()).request_id == "r1"
            assert [delta.text async for delta in stream] == ["Hel", "lo"]
            assert stream.result.token_ids == client.complete("hi", max_tokens=3, request_id="r1").token_ids
            assert (await twin.complete("hi")).text == "Hello"

        run(work, router.address)
        assert router.requests[0] == router.requests[1]

    def test_leaving_the_iteration_cancels_the_request(self, router: ScriptedRouter) -> None:
        router.script = script = HangingScript(started(), delta("a", 1))

        async def work(client: AsyncClient) -> bool:
            async for _ in client.generate("hi"):
                break
            return await happened(script.ended)

        assert run(work, router.address)

    def test_cancel_raises_cancelled_and_not_the_tasks_own(self, router: ScriptedRouter) -> None:
        router.script = script = HangingScript(started(), delta("a", 1))

        async def work(client: AsyncClient) -> bool:
            stream = client.generate("hi")
            deltas = aiter(stream)
            await anext(deltas)
            stream.cancel()
            with pytest.raises(Cancelled):
                await anext(deltas)
            return await happened(script.ended)

        assert run(work, router.address)

    def test_closing_the_client_ends_its_streams(self, router: ScriptedRouter) -> None:
        router.script = script = HangingScript(started(), delta("a", 1))

        async def work(client: AsyncClient) -> bool:
            deltas = aiter(client.generate("hi"))
            await anext(deltas)
            reading = asyncio.ensure_future(anext(deltas))
            await asyncio.sleep(0)  # it has begun
            await client.close()
            with pytest.raises(Cancelled):
                await reading
            return await happened(script.ended)

        assert run(work, router.address)

    def test_cancelled_task_cancels_the_request(self, router: ScriptedRouter) -> None:
        router.script = script = HangingScript(started(), delta("a", 1))

        async def work(client: AsyncClient) -> bool:
            stream = client.generate("hi")
            await stream.started()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(stream.read(), 0.05)
            return await happened(script.ended)

        assert run(work, router.address)

    def test_errors_are_the_same(self, router: ScriptedRouter) -> None:
        async def work(client: AsyncClient) -> None:
            router.script = aborting(grpc.StatusCode.INVALID_ARGUMENT, "top_p: is 2")
            with pytest.raises(InvalidArgument, match="top_p: is 2"):
                await client.complete("hi")
            router.answer()
            with pytest.raises(ProtocolError):
                await client.complete("hi")
            with pytest.raises(ProtocolError):
                await client.generate("hi").started()
            router.script = HangingScript(started())
            with pytest.raises(DeadlineExceeded):
                await client.complete("hi", timeout_s=0.2)
            with pytest.raises(RuntimeError, match="no result yet"):
                _ = client.generate("hi").result

        run(work, router.address)

    def test_other_calls(self, router: ScriptedRouter) -> None:
        async def work(client: AsyncClient) -> None:
            assert (await client.model_info()).model == "tiny"
            assert (await client.server_info()).version == "1"
            assert await client.healthy(DEADLINE_S)
            await client.abort("r1")
            with pytest.raises(NotFound):
                await client.abort("r2")

        run(work, router.address)

    def test_router_that_is_not_there_is_unavailable(self) -> None:
        async def work(client: AsyncClient) -> None:
            with pytest.raises(Unavailable):
                await client.complete("hi", timeout_s=DEADLINE_S)
            assert not await client.healthy(0.5)

        run(work, f"127.0.0.1:{unused_port()}")


def broken_off(
    *rest: pb.GenerateResponse, before: Callable[[grpc.ServicerContext], Any] = lambda context: None
) -> Script:
    """A stream whose connection is lost after its first token. At the next router: `before`, then `rest`."""

    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        if request.HasField("resume"):
            before(context)
            yield from rest
            return
        yield started()
        yield delta("Hel", 1)
        lose(context)

    return script


REST = (started(), delta("lo", 2, 3), finished())


@pytest.fixture(params=["blocking", "async"])
def complete(request: pytest.FixtureRequest) -> Callable[..., Result]:
    """A whole generation, by either client."""

    def by_blocking(address: str, clock: Clock | None = None, **options: Any) -> Result:
        with Client(address, clock=clock) as client:
            return client.complete("hi", **options)

    def by_async(address: str, clock: Clock | None = None, **options: Any) -> Result:
        return run(lambda client: client.complete("hi", **options), address, clock)

    return by_blocking if request.param == "blocking" else by_async


@pytest.mark.usefixtures("patient")
class TestLoss:
    """A stream whose router is lost, over real calls. What is decided then has its tests in test_resume.py."""

    def test_connection_that_breaks_after_the_end_takes_nothing_away(
        self, router: ScriptedRouter, complete: Callable[..., Result]
    ) -> None:
        def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
            yield from WHOLE
            lose(context)

        router.script = script
        assert complete(router.address).text == "Hello"
        assert len(router.requests) == 1

    def test_time_spent_looking_is_taken_from_the_streams_own(
        self, router: ScriptedRouter, complete: Callable[..., Result]
    ) -> None:
        clock, left = ManualClock(), []
        router.script = broken_off(*REST, before=lambda context: left.append(context.time_remaining()))
        router.health.on_check = lambda: clock.advance(60.0)
        assert complete(router.address, clock, timeout_s=100.0).text == "Hello"
        assert left[0] < 50.0, "about 40: gRPC rounds"

    def test_deadline_that_passes_while_the_stream_looks_ends_it(
        self, router: ScriptedRouter, complete: Callable[..., Result]
    ) -> None:
        clock = ManualClock()
        router.script = broken_off(*REST)
        router.health.on_check = lambda: clock.advance(60.0)
        with pytest.raises(DeadlineExceeded):
            complete(router.address, clock, timeout_s=60.0)
        assert len(router.requests) == 1

    def test_router_that_is_full_is_asked_again(self, router: ScriptedRouter, complete: Callable[..., Result]) -> None:
        def full_at_first(context: grpc.ServicerContext) -> None:
            if len(router.requests) <= 3:
                refuse_as_full(context, 10)

        router.script = broken_off(*REST, before=full_at_first)
        result = complete(router.address)
        assert (result.text, result.resumptions) == ("Hello", 1)
        assert len(router.requests) == 4

    def test_cancel_while_the_stream_looks_ends_it(self, router: ScriptedRouter, client: Client) -> None:
        router.script = broken_off(*REST)
        stream = client.generate("hi")
        router.health.on_check = stream.cancel
        with pytest.raises(Cancelled):
            stream.read()
        assert len(router.requests) == 1

    def test_cancel_while_an_async_stream_looks_ends_it(self, router: ScriptedRouter) -> None:
        router.script = broken_off(*REST)

        async def work(client: AsyncClient) -> None:
            stream, loop = client.generate("hi"), asyncio.get_running_loop()

            async def cancel() -> None:
                stream.cancel()

            router.health.on_check = lambda: asyncio.run_coroutine_threadsafe(cancel(), loop).result(DEADLINE_S)
            with pytest.raises(Cancelled):
                await stream.read()

        run(work, router.address)
        assert len(router.requests) == 1

    @pytest.mark.parametrize("end", [Stream.cancel, lambda stream: stream._client.close()])
    def test_end_between_the_look_and_the_next_call_is_noticed(
        self, router: ScriptedRouter, client: Client, monkeypatch: pytest.MonkeyPatch, end: Callable[[Stream], None]
    ) -> None:
        router.script = broken_off(*REST)
        stream = client.generate("hi")
        open_call = client.open

        def end_and_open(*args: Any) -> Any:
            end(stream)
            return open_call(*args)

        monkeypatch.setattr(client, "open", end_and_open)
        with pytest.raises(Cancelled):
            stream.read()

    def test_closing_the_client_while_a_stream_looks_ends_it(self, router: ScriptedRouter, client: Client) -> None:
        router.script = broken_off(*REST)
        router.health.on_check = client.close
        with pytest.raises(Cancelled):
            client.complete("hi")
        assert len(router.requests) == 1

    def test_closing_the_client_while_an_async_stream_looks_ends_it(self, router: ScriptedRouter) -> None:
        router.script = broken_off(*REST)

        async def work(client: AsyncClient) -> None:
            loop = asyncio.get_running_loop()
            router.health.on_check = lambda: asyncio.run_coroutine_threadsafe(client.close(), loop).result(DEADLINE_S)
            with pytest.raises(Cancelled):
                await client.complete("hi")

        run(work, router.address)
        assert len(router.requests) == 1
