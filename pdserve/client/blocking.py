"""The blocking client. May be shared by threads; a Stream belongs to one."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Unpack

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.client.channel import (
    CHANNEL_OPTIONS,
    CONNECT_TIMEOUT_S,
    DEFAULT_TIMEOUT_S,
    LOOK_PAUSE_S,
    RESUME_TIMEOUT_S,
    UNARY_TIMEOUT_S,
    address_list,
    checked_timeout,
    error_from_rpc,
    own_errors,
    retry_pause_s,
)
from pdserve.client.request import GenerateOptions, Prompt, generate_request
from pdserve.client.resume import ENDED, MAX_LOSSES, ConnectionLost, identified, may_resume, resumption, time_left_s
from pdserve.client.stream import Delta, Result, Started, StreamFold
from pdserve.clock import Clock, SystemClock
from pdserve.errors import Cancelled, NotFound, PdserveError, ProtocolError, ResourceExhausted
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
        self._current = 0
        self._clock = clock or SystemClock()
        self.closed = False

    @property
    def _inference(self) -> inference_pb2_grpc.InferenceStub:
        return self._routes[self._current].inference

    def generate(
        self, prompt: Prompt, *, timeout_s: float | None = DEFAULT_TIMEOUT_S, **options: Unpack[GenerateOptions]
    ) -> Stream:
        """Start a generation for a text, a chat or token ids. Errors of the call come out of the stream."""
        request = identified(generate_request(prompt, options))
        return Stream(self, request, self._clock, checked_timeout(timeout_s))

    @property
    def has_others(self) -> bool:
        """Whether there is more than one router to ask. For Stream."""
        return len(self._routes) > 1

    @property
    def first_look_s(self) -> float:
        """How long a request that nobody has answered yet is offered to the other routers. For the stream."""
        return CONNECT_TIMEOUT_S * (len(self._routes) - 1)

    def open(self, request: pb.GenerateRequest, timeout_s: float | None) -> Any:
        """A call at the current router; for Stream."""
        return self._inference.Generate(request, timeout=timeout_s)

    def find_router(self, timeout_s: float, ended: Callable[[], bool] = lambda: False) -> bool:
        """Turn to the next router that says it serves; False if none does in time or before it has `ended`. For
        Stream."""
        deadline = self._clock.now() + timeout_s
        for index in itertools.cycle(range(len(self._routes))):
            remaining_s = deadline - self._clock.now()
            if remaining_s <= 0 or ended():
                return False
            candidate = (self._current + 1 + index) % len(self._routes)
            if self._routes[candidate].serves(min(CONNECT_TIMEOUT_S, remaining_s), wait_for_ready=True):
                self._current = candidate
                return True
            time.sleep(LOOK_PAUSE_S)
        raise AssertionError("unreachable")

    def complete(
        self, prompt: Prompt, *, timeout_s: float | None = DEFAULT_TIMEOUT_S, **options: Unpack[GenerateOptions]
    ) -> Result:
        """Generate and wait for the end."""
        return self.generate(prompt, timeout_s=timeout_s, **options).read()

    def abort(self, request_id: str, *, timeout_s: float = UNARY_TIMEOUT_S) -> None:
        """End a request, whoever sent it, at whichever router. Its stream ends with Cancelled. Raises NotFound if none
        is in flight."""
        request = pb.AbortRequest(request_id=request_id)
        deadline = self._clock.now() + timeout_s
        if self.has_others and self._abort_anywhere(request, timeout_s):
            return
        self._ask("Abort", request, max(0.0, deadline - self._clock.now()))

    def model_info(self, *, timeout_s: float = UNARY_TIMEOUT_S) -> pb.ModelInfo:
        return self._ask("GetModelInfo", pb.GetModelInfoRequest(), timeout_s)

    def server_info(self, *, timeout_s: float = UNARY_TIMEOUT_S) -> pb.ServerInfo:
        return self._ask("GetServerInfo", pb.GetServerInfoRequest(), timeout_s)

    def drain_worker(self, worker_id: str, *, cancel: bool = False, timeout_s: float = UNARY_TIMEOUT_S) -> None:
        """Let a worker finish what it has and take nothing new; `cancel`: work on. Raises NotFound. Returns at once."""
        self._ask("DrainWorker", pb.DrainWorkerRequest(worker_id=worker_id, cancel=cancel), timeout_s)

    def _ask(self, method: str, request: Message, timeout_s: float) -> Any:
        """A call that may be made twice: where the current router is lost, it goes to the next one that serves, within
        `timeout_s` in all."""
        deadline = self._clock.now() + timeout_s
        try:
            with own_errors():
                return getattr(self._inference, method)(request, timeout=timeout_s)
        except ConnectionLost:
            if not self.has_others or not self.find_router(deadline - self._clock.now()):
                raise
        with own_errors():
            return getattr(self._inference, method)(request, timeout=max(0.0, deadline - self._clock.now()))

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
        return self._routes[self._current].serves(timeout_s)

    def close(self) -> None:
        """Close the connections; streams still open end with Cancelled."""
        self.closed = True
        for route in self._routes:
            route.channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Stream:
    """A running generation: iterate it once for its Deltas. Leaving the iteration early cancels the request."""

    def __init__(self, client: Client, request: pb.GenerateRequest, clock: Clock, timeout_s: float | None) -> None:
        self._client = client
        self._request = request
        self._clock = clock
        sent_s = clock.now()
        self._deadline_s = None if timeout_s is None else sent_s + timeout_s
        self._fold = StreamFold(sent_s)
        self._cancelled = False
        self._losses = 0  # of the connection
        self._look_until_s = 0.0  # after the last one
        self._call = client.open(request, timeout_s)

    @property
    def started(self) -> Started:
        """What the router made of the request. Waits for it if it has not come yet."""
        while self._fold.started is None:
            if self._next_event() is None:
                raise ProtocolError("the router ended the stream before it started")
        return self._fold.started

    def __iter__(self) -> Iterator[Delta]:
        try:
            while (event := self._next_event()) is not None:
                if isinstance(event, Delta):
                    yield event
            self._fold.end()
        finally:
            self._call.cancel()

    def _next_event(self) -> Delta | bool | None:
        """The next delta; True for another event, None at the end. Goes on elsewhere where the router is lost."""
        try:
            with own_errors():
                event = next(self._call, None)
        except PdserveError as error:
            if self._fold.result is not None:
                return None  # all is there: how the call ends does not matter
            if not self._may_go_on(error) or not self._resume():
                raise
            return True
        if event is None:
            return None
        return self._fold.accept(event, self._clock.now()) or True

    def _may_go_on(self, error: PdserveError) -> bool:
        """Whether to look for a router after this error, and until when. Waits first where one is full."""
        if isinstance(error, ResourceExhausted) and self._fold.resuming:  # it refused; what broke off is the last loss
            self._pause(retry_pause_s(error))
            return True
        self._losses += 1
        if not may_resume(error, self._client.has_others) or self._losses > MAX_LOSSES:
            return False
        # Who never answered is down; who broke off may be back soon.
        look_s = RESUME_TIMEOUT_S if self._fold.started is not None else self._client.first_look_s
        self._look_until_s = self._clock.now() + look_s
        if self._deadline_s is not None:
            self._look_until_s = min(self._look_until_s, self._deadline_s)
        return True

    def _pause(self, pause_s: float) -> None:
        until_s = min(self._clock.now() + pause_s, self._look_until_s)
        while not self._ended() and self._clock.now() < until_s:
            time.sleep(LOOK_PAUSE_S)

    def _resume(self) -> bool:
        """Go on at the next router that serves; False if none does in time. Raises Cancelled, also where the stream was
        ended meanwhile, and DeadlineExceeded."""
        with self._closing_errors():
            found = self._client.find_router(self._look_until_s - self._clock.now(), self._ended)
            if self._ended():
                raise Cancelled(ENDED)
            if not found:
                return False
            remaining_s = time_left_s(self._deadline_s, self._clock.now())
            if self._fold.started is not None:
                self._fold.resume()
            self._call = self._client.open(resumption(self._request, self._fold), remaining_s)
        if self._ended():  # by another thread, which may have cancelled the call before this one
            self._call.cancel()
            raise Cancelled(ENDED)
        return True

    def _ended(self) -> bool:
        """Whether the caller wants no more of it."""
        return self._cancelled or self._client.closed

    @property
    def result(self) -> Result:
        """Only after the iteration has come to its end."""
        if self._fold.result is None:
            raise RuntimeError("the stream has no result yet: iterate it to its end, or use read()")
        return self._fold.result

    def read(self) -> Result:
        """Wait for the end."""
        for _ in self:
            pass
        return self.result

    def cancel(self) -> None:
        """End the request. May be called from any thread; the iteration raises Cancelled. No effect after the end."""
        self._cancelled = True
        self._call.cancel()

    @contextmanager
    def _closing_errors(self) -> Iterator[None]:
        """grpc tells of a channel that was closed here as of a wrong argument."""
        try:
            yield
        except ValueError:
            if self._client.closed:
                raise Cancelled(ENDED) from None
            raise

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
