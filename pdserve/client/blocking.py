"""The blocking client. May be shared by threads; a Stream belongs to one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Unpack

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.client.channel import (
    CHANNEL_OPTIONS,
    DEFAULT_TIMEOUT_S,
    UNARY_TIMEOUT_S,
    address_list,
    bounded,
    checked_timeout,
    error_from_rpc,
    own_errors,
)
from pdserve.client.request import GenerateOptions, Prompt, abort_request, drain_request, generate_request
from pdserve.client.resume import (
    AskRouter,
    ConnectionLost,
    Deliver,
    Done,
    Fail,
    OpenCall,
    Receive,
    ResumeMachine,
    Routers,
    RouterSearch,
    StreamAction,
    Wait,
)
from pdserve.client.stream import Delta, Result, Started
from pdserve.clock import Clock, SystemClock
from pdserve.errors import NotFound, PdserveError
from pdserve.rpc import inference_pb2 as pb
from pdserve.rpc import inference_pb2_grpc


class _Route:
    """A connection to one router."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self.inference = inference_pb2_grpc.InferenceStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    def serves(self, timeout_s: float, *, wait_for_ready: bool = False) -> bool:
        """Whether it answers in time that it serves; `wait_for_ready`: with the connection's making in that time."""
        request = health_pb2.HealthCheckRequest()
        try:
            with own_errors():
                answer = self.health.Check(request, timeout=timeout_s, wait_for_ready=wait_for_ready)
        except PdserveError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


class Client:
    """One router, or several of a cluster. Connects with the first call, and again whenever a connection was lost.

    A stream whose router is lost goes on at the next one (or at the same, once it is back), where it stood.
    """

    def __init__(self, addresses: str | Sequence[str], *, clock: Clock | None = None) -> None:
        """`addresses`: host:port of each router, several as a sequence or with commas between. `clock` measures TTFT
        and TPOT."""
        self._routes = [_Route(address) for address in address_list(addresses)]
        self._routers = Routers(len(self._routes))
        self._clock = clock or SystemClock()

    @property
    def closed(self) -> bool:
        return self._routers.closed

    @property
    def _inference(self) -> Any:
        return self._routes[self._routers.current].inference

    def generate(
        self, prompt: Prompt, *, timeout_s: float | None = DEFAULT_TIMEOUT_S, **options: Unpack[GenerateOptions]
    ) -> Stream:
        """Start a generation for a text, a chat or token ids. Errors of the call come out of the stream."""
        request = generate_request(prompt, options)
        machine = ResumeMachine(request, self._routers, self._clock.now(), checked_timeout(timeout_s))
        return Stream(self, machine, self._clock)

    def open(self, call: OpenCall) -> Any:
        """Make a call. For Stream."""
        return self._routes[call.router].inference.Generate(call.request, timeout=call.timeout_s)

    def serves(self, ask: AskRouter) -> bool:
        """Whether a router answers in time that it serves. For Stream."""
        return self._routes[ask.router].serves(ask.timeout_s, wait_for_ready=True)

    def complete(
        self, prompt: Prompt, *, timeout_s: float | None = DEFAULT_TIMEOUT_S, **options: Unpack[GenerateOptions]
    ) -> Result:
        """Generate and wait for the end."""
        return self.generate(prompt, timeout_s=timeout_s, **options).read()

    def abort(self, request_id: str, *, timeout_s: float = UNARY_TIMEOUT_S) -> None:
        """End a request, whoever sent it, at whichever router. Its stream ends with Cancelled. Raises NotFound if none
        is in flight."""
        request, timeout_s = abort_request(request_id), bounded(timeout_s)
        deadline = self._clock.now() + timeout_s
        if self._routers.has_others and self._abort_anywhere(request, timeout_s):
            return
        self._ask("Abort", request, max(0.0, deadline - self._clock.now()))

    def model_info(self, *, timeout_s: float = UNARY_TIMEOUT_S) -> pb.ModelInfo:
        info: pb.ModelInfo = self._ask("GetModelInfo", pb.GetModelInfoRequest(), timeout_s)
        return info

    def server_info(self, *, timeout_s: float = UNARY_TIMEOUT_S) -> pb.ServerInfo:
        info: pb.ServerInfo = self._ask("GetServerInfo", pb.GetServerInfoRequest(), timeout_s)
        return info

    def drain_worker(self, worker_id: str, *, cancel: bool = False, timeout_s: float = UNARY_TIMEOUT_S) -> None:
        """Let a worker finish what it has and take nothing new; `cancel`: work on. Raises NotFound. Returns at once."""
        self._ask("DrainWorker", drain_request(worker_id, cancel), timeout_s)

    def _ask(self, method: str, request: Message, timeout_s: float) -> Any:
        """A call that may be made twice: where the current router is lost, it goes to the next one that serves, within
        `timeout_s` in all."""
        timeout_s = bounded(timeout_s)
        deadline = self._clock.now() + timeout_s
        try:
            with own_errors():
                return getattr(self._inference, method)(request, timeout=timeout_s)
        except ConnectionLost:
            if not self._routers.has_others or not self._find_router(deadline - self._clock.now()):
                raise
        with own_errors():
            return getattr(self._inference, method)(request, timeout=max(0.0, deadline - self._clock.now()))

    def _find_router(self, timeout_s: float) -> bool:
        """Turn to the next router that serves; False if none does in time."""
        search = RouterSearch(self._routers, self._clock.now() + timeout_s)
        while (step := search.next(self._clock.now())) is not None:
            if isinstance(step, Wait):
                time.sleep(step.seconds)
            elif search.answered(self.serves(step)):
                return True
        return False

    def _abort_anywhere(self, request: pb.AbortRequest, timeout_s: float) -> bool:
        """Ask all routers at once: one that drains serves nothing new but may have it, and a silent one takes no time
        from the others. False if none answers. Raises NotFound if those that do have not got it."""
        answers: SimpleQueue[Any] = SimpleQueue()
        for route in self._routes:
            route.inference.Abort.future(request, timeout=timeout_s).add_done_callback(answers.put)
        unknown = None
        for _ in self._routes:
            answer = answers.get()
            if answer.code() is grpc.StatusCode.OK:
                return True
            error = error_from_rpc(answer)
            unknown = error if isinstance(error, NotFound) else unknown
        if unknown is not None:
            raise unknown
        return False

    def healthy(self, timeout_s: float = 1.0) -> bool:
        """Whether the router answers in time that it serves. Never raises a PdserveError."""
        return self._routes[self._routers.current].serves(timeout_s)

    def close(self) -> None:
        """Close the connections; streams still open end with Cancelled."""
        self._routers.closed = True
        for route in self._routes:
            route.channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Stream:
    """A running generation: iterate it once for its Deltas. Leaving the iteration early cancels the request.

    The machine says what to do; this does it, and tells the machine what came of it.
    """

    def __init__(self, client: Client, machine: ResumeMachine, clock: Clock) -> None:
        self._client = client
        self._machine = machine
        self._clock = clock
        self._call = client.open(machine.start())
        self._next = machine.on_opened()

    @property
    def started(self) -> Started:
        """What the router made of the request. Waits for it if it has not come yet."""
        while self._machine.started is None:
            self._step()
        return self._machine.started

    def __iter__(self) -> Iterator[Delta]:
        try:
            while not isinstance(self._next, Done):
                if (delta := self._step()) is not None:
                    yield delta
        finally:
            self._call.cancel()

    def _step(self) -> Delta | None:
        """Do what is next. Returns a delta if that is it; raises what the stream ended with."""
        match self._next:
            case OpenCall() as call:
                self._next = self._open(call)
            case Receive():
                self._next = self._receive()
            case AskRouter() as ask:
                serves = self._client.serves(ask)
                self._next = self._machine.on_health(serves, self._clock.now())
            case Wait(seconds):
                time.sleep(seconds)
                self._next = self._machine.on_time(self._clock.now())
            case Deliver(delta):
                self._next = Receive()
                return delta
            case Fail(error):
                self._call.cancel()
                raise error
        return None

    def _open(self, call: OpenCall) -> StreamAction:
        try:
            self._call = self._client.open(call)
        except ValueError:  # so grpc tells of a channel that was closed here
            if not self._client.closed:
                raise
        return self._machine.on_opened()

    def _receive(self) -> StreamAction:
        try:
            with own_errors():
                message = next(self._call, None)
        except PdserveError as error:
            return self._machine.on_failure(error, self._clock.now())
        return self._machine.on_end() if message is None else self._machine.on_message(message, self._clock.now())

    @property
    def result(self) -> Result:
        """Only after the iteration has come to its end."""
        if self._machine.result is None:
            raise RuntimeError("the stream has no result yet: iterate it to its end, or use read()")
        return self._machine.result

    def read(self) -> Result:
        """Wait for the end."""
        for _ in self:
            pass
        return self.result

    def cancel(self) -> None:
        """End the request. May be called from any thread; the iteration raises Cancelled. No effect after the end."""
        self._machine.cancel()
        self._call.cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
