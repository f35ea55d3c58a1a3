"""Routers and workers find, lose and find each other again; what is lost returns its leases. No Ray here."""

import asyncio
import queue
import threading
from dataclasses import replace

import grpc
import pytest

from deploy.ports import PortReservation
from pdserve.client import AsyncClient, Client, resume
from pdserve.client.resume import OpenCall
from pdserve.config import RouterConfig
from pdserve.errors import Cancelled, NotFound, Unavailable
from pdserve.rpc import cluster_pb2 as pb
from pdserve.rpc import convert, inference_pb2
from pdserve.rpc.cluster_pb2_grpc import ClusterStub
from pdserve.rpc.outbox import Outbox
from pdserve.types import ModelLimits, Role, SamplingParams, WorkerInfo
from router.actions import Request
from router.control import Control
from support.clusters import wait_for
from support.routers import MODEL, RouterThread, make_worker
from worker.session import RouterSession

INFO = WorkerInfo("decode-0", "decode-0-a", Role.DECODE, 1, "h", "ipc://x", "print", MODEL, ModelLimits(100, 99, 99))


@pytest.fixture
def sockets(tmp_path):
    folder = tmp_path / "kv"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def port():
    """Nobody else's while the test runs."""
    reservation = PortReservation("127.0.0.1", 0, "a test's port")
    yield reservation.port
    reservation.release()


def joined(router):
    async def ready():  # on the router's own thread
        return [worker.worker_id for worker in router.router.status().workers if worker.state == "ready"]

    return router.call(ready())


def joined_worker(checkpoint, sockets, *routers):
    """A worker that all these routers have as a member."""
    worker = make_worker(checkpoint, sockets, *routers)
    worker.start()
    wait_for(lambda: all(joined(router) for router in routers), "the worker joins")
    return worker


def refusal(router, hello):
    """How the router answers this hello: the status of the broken stream."""
    with grpc.insecure_channel(router.router.session_address) as channel:
        call = ClusterStub(channel).Session(iter([pb.WorkerMessage(hello=hello)]), timeout=5)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    return caught.value.code().name, caught.value.details()


def test_a_worker_that_loses_its_router_returns_all_leases_and_joins_the_next_one(
    small_checkpoint, sockets, port, monkeypatch
):
    monkeypatch.setattr(resume, "RESUME_TIMEOUT_S", 1.0)  # no router comes back at that address
    config = RouterConfig(grpc_port=0, session_port=port, placement_timeout_ms=500)
    with RouterThread(small_checkpoint, config) as router:
        worker = joined_worker(small_checkpoint, sockets, router)
        with Client(router.router.grpc_address) as client:
            stream = iter(client.generate("Hello", temperature=0, max_tokens=3000, ignore_eos=True))
            next(stream)
            assert worker.load.blocks.leased > 0
            router.stop()
            with pytest.raises(Unavailable):
                list(stream)
        wait_for(lambda: worker.load.blocks.leased == 0, "the leases' return")
        router.__init__(small_checkpoint, config)
        wait_for(lambda: joined(router), "the worker joins the new router")
        with Client(router.router.grpc_address) as client:
            assert client.complete("Hello", temperature=0, max_tokens=3, ignore_eos=True).attempts == 1
        worker.stop()
        wait_for(lambda: not joined(router), "its leaving is noticed")
    assert not list(sockets.iterdir())


def test_a_worker_of_another_model_is_refused_with_both_names(small_checkpoint):
    with RouterThread(small_checkpoint) as router:
        code, details = refusal(router, convert.worker_to_hello(replace(INFO, model="other")))
        assert code == "FAILED_PRECONDITION"
        assert "'other'" in details
        assert f"'{MODEL}'" in details
        assert joined(router) == []


@pytest.mark.parametrize(
    ("hello", "word"),
    [
        (pb.Hello(version=99), "version 99"),
        (pb.Hello(version=convert.SESSION_VERSION, role="cook"), "'cook'"),
        (pb.Hello(version=convert.SESSION_VERSION, role="decode"), "worker_id"),
    ],
)
def test_a_hello_that_makes_no_sense_is_refused(small_checkpoint, hello, word):
    with RouterThread(small_checkpoint) as router:
        code, details = refusal(router, hello)
        assert code == "FAILED_PRECONDITION"
        assert word in details


def test_a_silent_worker_is_lost_after_the_timeout(small_checkpoint):
    config = RouterConfig(grpc_port=0, renew_interval_ms=50, worker_timeout_ms=200)
    messages = queue.SimpleQueue()
    messages.put(pb.WorkerMessage(hello=convert.worker_to_hello(INFO)))
    with (
        RouterThread(small_checkpoint, config) as router,
        grpc.insecure_channel(router.router.session_address) as channel,
    ):
        call = ClusterStub(channel).Session(iter(messages.get, None), timeout=20)
        assert next(call).HasField("welcome")
        wait_for(lambda: joined(router) == [], "its loss", timeout_s=5.0)  # long before the call's own deadline
        (worker,) = router.router.status().workers
        assert (worker.worker_id, worker.state) == ("decode-0", "lost")
        with pytest.raises(grpc.RpcError):
            list(call)
        messages.put(None)


def test_without_any_worker_a_request_ends_unavailable_and_health_says_so(small_checkpoint):
    with RouterThread(small_checkpoint) as router, Client(router.router.grpc_address) as client:
        assert not client.healthy()
        with pytest.raises(Unavailable, match="no worker has joined"):
            client.complete("Hello", timeout_s=10)


@pytest.mark.parametrize("name", ["r" * 100_000, "é" * 50_000])
def test_a_name_of_any_length_gets_its_own_status(small_checkpoint, name):
    with RouterThread(small_checkpoint) as router, Client(router.router.grpc_address) as client:
        with pytest.raises(NotFound, match="request_id"):
            client.abort(name)
        with pytest.raises(NotFound, match="worker_id"):
            client.drain_worker(name)


def test_a_late_goodbye_of_an_old_handler_spares_the_next_request_of_that_id(small_checkpoint):
    async def scenario(router):
        request = Request("again", (1, 2), SamplingParams())
        first = router.submit(request)
        router.cancel("again")
        second = router.submit(request)
        first.abandon()
        still_there = router.cancel("again")
        return still_there, second is not first

    with RouterThread(small_checkpoint) as router:
        assert router.call(scenario(router.router)) == (True, True)


def test_a_worker_that_was_told_to_stop_with_streams_left_ends_in_order(small_checkpoint, sockets, monkeypatch):
    left, worker_left = [], Control.worker_left

    def noted(self, session, reason, crashed):
        left.append((reason, crashed))
        worker_left(self, session, reason, crashed)

    monkeypatch.setattr(Control, "worker_left", noted)
    with RouterThread(small_checkpoint) as router:
        worker = joined_worker(small_checkpoint, sockets, router)
        with Client(router.router.grpc_address) as client:
            stream = iter(client.generate("Hello", temperature=0, max_tokens=3000, ignore_eos=True))
            next(stream)
            worker.stop()
            worker.stop()
            with pytest.raises(Unavailable):
                list(stream)
    assert left == [("the worker ended its session", False)]
    assert not list(sockets.iterdir())


def test_a_worker_that_broke_its_session_because_a_router_reads_too_slowly_comes_back(
    small_checkpoint, sockets, monkeypatch
):
    send, broken = RouterSession.send, threading.Event()

    def full_once(self, message):
        if not message.HasField("load") and not broken.is_set():
            self._outbox = Outbox(0)
            broken.set()
        send(self, message)

    config = RouterConfig(grpc_port=0, placement_timeout_ms=20_000, worker_timeout_ms=3_000)
    with RouterThread(small_checkpoint, config) as router:
        worker = joined_worker(small_checkpoint, sockets, router)
        monkeypatch.setattr(RouterSession, "send", full_once)
        with Client(router.router.grpc_address) as client:
            result = client.complete("Hello", temperature=0, max_tokens=5, ignore_eos=True)
        assert broken.is_set()
        assert (len(result.token_ids), result.attempts) == (5, 2)
        worker.stop()


SAMPLED = {"temperature": 0.9, "seed": 3, "max_tokens": 300, "ignore_eos": True, "stop": ["never to be seen"]}


def same(one, other):
    fields = ("token_ids", "text", "finish_reason", "stop", "usage", "prompt_token_ids", "seed", "model")
    return all(getattr(one, name) == getattr(other, name) for name in fields)


def test_a_stream_goes_on_at_another_router_where_it_stood(small_checkpoint, sockets):
    with RouterThread(small_checkpoint) as first, RouterThread(small_checkpoint) as second:
        worker = joined_worker(small_checkpoint, sockets, first, second)
        addresses = [first.router.grpc_address, second.router.grpc_address]
        with Client(addresses) as client:
            undisturbed = client.complete("Hello", **SAMPLED)
            stream = client.generate("Hello", **SAMPLED)
            received = 0
            for delta in stream:
                received += len(delta.token_ids)
                if received == 50:
                    first.stop()
            assert same(stream.result, undisturbed)
            assert stream.result.resumptions == 1
            later = client.complete("Hello", **(SAMPLED | {"max_tokens": 3}))
            assert later.resumptions == 0, "later requests go to the living router"
        wait_for(lambda: worker.load.blocks.leased == 0, "the leases' return")
        worker.stop()


def test_an_async_stream_goes_on_at_another_router_too(small_checkpoint, sockets):
    async def scenario(first, addresses):
        async with AsyncClient(addresses) as client:
            undisturbed = await client.complete("Hello", **SAMPLED)
            stream, received = client.generate("Hello", **SAMPLED), 0
            async for delta in stream:
                received += len(delta.token_ids)
                if received == 50:
                    await asyncio.to_thread(first.stop)
            return undisturbed, stream.result

    with RouterThread(small_checkpoint) as first, RouterThread(small_checkpoint) as second:
        worker = joined_worker(small_checkpoint, sockets, first, second)
        undisturbed, result = asyncio.run(scenario(first, [first.router.grpc_address, second.router.grpc_address]))
        assert same(result, undisturbed)
        assert result.resumptions == 1
        worker.stop()


@pytest.mark.parametrize("received", [0, 1, 20, 39, 40])
def test_a_resumed_request_gives_the_rest_and_only_the_rest(small_checkpoint, sockets, received):
    with RouterThread(small_checkpoint) as router:
        worker = joined_worker(small_checkpoint, sockets, router)
        with Client(router.router.grpc_address) as client:
            whole = client.complete("Hello", request_id="r", temperature=0.9, max_tokens=40, ignore_eos=True)
            request = inference_pb2.GenerateRequest(request_id="r")
            request.prompt_token_ids.ids.extend(whole.prompt_token_ids)
            request.sampling.MergeFrom(
                inference_pb2.SamplingParams(temperature=0.9, seed=whole.seed, max_tokens=40, ignore_eos=True)
            )
            request.resume.outputs.add(ids=whole.token_ids[:received])
            events = list(client.open(OpenCall(0, request, 10.0)))
        rest = [token_id for event in events for token_id in event.delta.token_ids]
        text = "".join(event.delta.text for event in events)
        assert rest == list(whole.token_ids[received:])
        assert whole.text.endswith(text)
        assert events[-1].finished.usage.completion_tokens == 40
        worker.stop()


def test_a_resumption_ends_what_the_same_router_still_has_of_the_request(small_checkpoint, sockets):
    with RouterThread(small_checkpoint) as router:
        worker = joined_worker(small_checkpoint, sockets, router)
        with Client(router.router.grpc_address) as client:
            old = client.generate("Hello", request_id="r", temperature=0, max_tokens=2000, ignore_eos=True)
            iterator = iter(old)
            token_ids = next(iterator).token_ids
            request = inference_pb2.GenerateRequest(request_id="r", prompt="Hello")
            request.sampling.MergeFrom(inference_pb2.SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
            request.resume.outputs.add(ids=token_ids)
            assert list(client.open(OpenCall(0, request, 10.0)))[-1].finished.usage.completion_tokens == 5
            with pytest.raises(Cancelled, match="resumed"):
                list(iterator)
        worker.stop()
