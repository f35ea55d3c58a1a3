"""The client for asyncio. Belongs to one event loop, in which it must be made."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
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
        self.channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self.inference = inference_pb2_grpc.InferenceStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    async def serves(self, timeout_s: float, *, wait_for_ready: bool = False) -> bool:
        """Whether it answers in time that it serves; `wait_for_ready`: with the connection's making in that time."""
        request = health_pb2.HealthCheckRequest()
        try:
            with own_errors():
                answer = await self.health.Check(request, timeout=timeout_s, wait_for_ready=wait_for_ready)
        except PdserveError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def abort(self, request: pb.AbortRequest, timeout_s: float) -> PdserveError | None:
        """The error, if it is one."""
        try:
            with own_errors():
                await self.inference.Abort(request, timeout=timeout_s)
        except PdserveError as error:
            return error
        return None


class AsyncClient:
    """As Client, with coroutines."""

    def __init__(self, addresses: str | Sequence[str], *, clock: Clock | None = None) -> None:
        self._routes = [_Route(address) for address in address_list(addresses)]
        self._current = 0
        self._clock = clock or SystemClock()
        self.closed = False

    @property
    def _inference(self) -> inference_pb2_grpc.InferenceStub:
        return self._routes[self._current].inference

    def generate(
        self, prompt: Prompt, *, timeout_s: float | None = DEFAULT_TIMEOUT_S, **options: Unpack[GenerateOptions]
    ) -> AsyncStream:
        """Start a generation. Not a coroutine: `async for delta in client.generate(...)`."""
        request = identified(generate_request(prompt, options))
        return AsyncStream(self, request, self._clock, checked_timeout(timeout_s))

    @property
    def has_others(self) -> bool:
        """Whether there is more than one router to ask. For Stream."""
        return len(self._routes) > 1

    @property
    def first_look_s(self) -> float:
        """How long a request that nobody has answered yet is offered to the other routers. For the stream."""
        return CONNECT_TIMEOUT_S * (len(self._routes) - 1)

    def open(self, request: pb.GenerateRequest, timeout_s: float | None) -> Any:
        """A call at the current router; for AsyncStream."""
        return self._inference.Generate(request, timeout=timeout_s)

    async def find_router(self, timeout_s: float, ended: Callable[[], bool] = lambda: False) -> bool:
        """Turn to the next router that answers; False if none does in time or before it has `ended`. For
        AsyncStream."""
        deadline = self._clock.now() + timeout_s
        for index in itertools.cycle(range(len(self._routes))):
            remaining_s = deadline - self._clock.now()
            if remaining_s <= 0 or ended():
                return False
            candidate = (self._current + 1 + index) % len(self._routes)
            if await self._routes[candidate].serves(min(CONNECT_TIMEOUT_S, remaining_s), wait_for_ready=True):
                self._current = candidate
                return True
            await asyncio.sleep(LOOK_PAUSE_S)
        raise AssertionError("unreachable")

    async def complete(
        self, prompt: Prompt, *, timeout_s: float | None = DEFAULT_TIMEOUT_S, **options: Unpack[GenerateOptions]
    ) -> Result:
        return await self.generate(prompt, timeout_s=timeout_s, **options).read()

    async def abort(self, request_id: str, *, timeout_s: float = UNARY_TIMEOUT_S) -> None:
        request = pb.AbortRequest(request_id=request_id)
        deadline = self._clock.now() + timeout_s
        if self.has_others and await self._abort_anywhere(request, timeout_s):
            return
        await self._ask("Abort", request, max(0.0, deadline - self._clock.now()))

    async def model_info(self, *, timeout_s: float = UNARY_TIMEOUT_S) -> pb.ModelInfo:
        return await self._ask("GetModelInfo", pb.GetModelInfoRequest(), timeout_s)

    async def server_info(self, *, timeout_s: float = UNARY_TIMEOUT_S) -> pb.ServerInfo:
        return await self._ask("GetServerInfo", pb.GetServerInfoRequest(), timeout_s)

    async def drain_worker(self, worker_id: str, *, cancel: bool = False, timeout_s: float = UNARY_TIMEOUT_S) -> None:
        """Let a worker finish what it has and take nothing new; `cancel`: work on. Raises NotFound. Returns at once."""
        await self._ask("DrainWorker", pb.DrainWorkerRequest(worker_id=worker_id, cancel=cancel), timeout_s)

    async def _ask(self, method: str, request: Message, timeout_s: float) -> Any:
        """A call that may be made twice: where the current router is lost, it goes to the next one that serves, within
        `timeout_s` in all."""
        deadline = self._clock.now() + timeout_s
        try:
            with own_errors():
                return await getattr(self._inference, method)(request, timeout=timeout_s)
        except ConnectionLost:
            if not self.has_others or not await self.find_router(deadline - self._clock.now()):
                raise
        with own_errors():
            return await getattr(self._inference, method)(request, timeout=max(0.0, deadline - self._clock.now()))

    async def _abort_anywhere(self, request: pb.AbortRequest, timeout_s: float) -> bool:
        """Ask all routers at once: one that drains serves nothing new but may have it, and a silent one takes no time
        from the others. False if none answers. Raises NotFound if those that do have not got it."""
        asks = [asyncio.ensure_future(route.abort(request, timeout_s)) for route in self._routes]
        unknown = None
        try:
            for answer in asyncio.as_completed(asks):
                error = await answer
                if error is None:
                    return True
                unknown = error if isinstance(error, NotFound) else unknown
        finally:
            for ask in asks:
                ask.cancel()
        if unknown is not None:
            raise unknown
        return False

    async def healthy(self, timeout_s: float = 1.0) -> bool:
        return await self._routes[self._current].serves(timeout_s)

    async def close(self) -> None:
        self.closed = True
        for route in self._routes:
            await route.channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncStream:
    """As Stream. After leaving the iteration early the request is cancelled when the loop next runs; `async with` or
    cancel() do it at once."""

    def __init__(self, client: AsyncClient, request: pb.GenerateRequest, clock: Clock, timeout_s: float | None) -> None:
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

    async def started(self) -> Started:
        """What the router made of the request. Waits for it if it has not come yet."""
        while self._fold.started is None:
            if await self._next_event() is None:
                raise ProtocolError("the router ended the stream before it started")
        return self._fold.started

    async def __aiter__(self) -> AsyncIterator[Delta]:
        try:
            while (event := await self._next_event()) is not None:
                if isinstance(event, Delta):
                    yield event
            self._fold.end()
        finally:
            self._call.cancel()

    async def _next_event(self) -> Delta | bool | None:
        """The next delta; True for another event, None at the end. Goes on elsewhere where the router is lost."""
        try:
            with self._stream_errors():
                event = await self._call.read()
        except PdserveError as error:
            if self._fold.result is not None:
                return None  # all is there: how the call ends does not matter
            if not await self._may_go_on(error) or not await self._resume():
                raise
            return True
        if event is grpc.aio.EOF:
            return None
        return self._fold.accept(event, self._clock.now()) or True

    async def _may_go_on(self, error: PdserveError) -> bool:
        """Whether to look for a router after this error, and until when. Waits first where one is full."""
        if isinstance(error, ResourceExhausted) and self._fold.resuming:  # it refused; what broke off is the last loss
            await self._pause(retry_pause_s(error))
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

    async def _pause(self, pause_s: float) -> None:
        until_s = min(self._clock.now() + pause_s, self._look_until_s)
        while not self._ended() and self._clock.now() < until_s:  # noqa: ASYNC110 - the client's closing ends it too
            await asyncio.sleep(LOOK_PAUSE_S)

    async def _resume(self) -> bool:
        """Go on at the next router that serves; False if none does in time. Raises Cancelled, also where the stream was
        ended meanwhile, and DeadlineExceeded."""
        with self._stream_errors():
            found = await self._client.find_router(self._look_until_s - self._clock.now(), self._ended)
            if self._ended():
                raise Cancelled(ENDED)
            if not found:
                return False
            remaining_s = time_left_s(self._deadline_s, self._clock.now())
            if self._fold.started is not None:
                self._fold.resume()
            self._call = self._client.open(resumption(self._request, self._fold), remaining_s)
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

    async def read(self) -> Result:
        """Wait for the end."""
        async for _ in self:
            pass
        return self.result

    def cancel(self) -> None:
        """End the request; the iteration raises Cancelled. No effect after the end."""
        self._cancelled = True
        self._call.cancel()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    @contextmanager
    def _stream_errors(self) -> Iterator[None]:
        """grpc tells of a call cancelled here, or of its channel's closing, as it tells of a cancelled task; the caller
        must see them apart."""
        try:
            with own_errors():
                yield
        except asyncio.CancelledError:
            if self._ended():
                raise Cancelled(ENDED) from None
            raise
