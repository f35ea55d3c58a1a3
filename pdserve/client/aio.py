"""The client for asyncio. Belongs to one event loop, in which it must be made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
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


class _AsyncRoute:
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
        self._routes = [_AsyncRoute(address) for address in address_list(addresses)]
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
    ) -> AsyncStream:
        """Start a generation. Not a coroutine: `async for delta in client.generate(...)`."""
        request = generate_request(prompt, options)
        machine = ResumeMachine(request, self._routers, self._clock.now(), checked_timeout(timeout_s))
        return AsyncStream(self, machine, self._clock)

    def open(self, call: OpenCall) -> Any:
        """Make a call. For AsyncStream."""
        return self._routes[call.router].inference.Generate(call.request, timeout=call.timeout_s)

    async def serves(self, ask: AskRouter) -> bool:
        """Whether a router answers in time that it serves. For AsyncStream."""
        return await self._routes[ask.router].serves(ask.timeout_s, wait_for_ready=True)

    async def complete(
        self, prompt: Prompt, *, timeout_s: float | None = DEFAULT_TIMEOUT_S, **options: Unpack[GenerateOptions]
    ) -> Result:
        return await self.generate(prompt, timeout_s=timeout_s, **options).read()

    async def abort(self, request_id: str, *, timeout_s: float = UNARY_TIMEOUT_S) -> None:
        request, timeout_s = abort_request(request_id), bounded(timeout_s)
        deadline = self._clock.now() + timeout_s
        if self._routers.has_others and await self._abort_anywhere(request, timeout_s):
            return
        await self._ask("Abort", request, max(0.0, deadline - self._clock.now()))

    async def model_info(self, *, timeout_s: float = UNARY_TIMEOUT_S) -> pb.ModelInfo:
        info: pb.ModelInfo = await self._ask("GetModelInfo", pb.GetModelInfoRequest(), timeout_s)
        return info

    async def server_info(self, *, timeout_s: float = UNARY_TIMEOUT_S) -> pb.ServerInfo:
        info: pb.ServerInfo = await self._ask("GetServerInfo", pb.GetServerInfoRequest(), timeout_s)
        return info

    async def drain_worker(self, worker_id: str, *, cancel: bool = False, timeout_s: float = UNARY_TIMEOUT_S) -> None:
        """Let a worker finish what it has and take nothing new; `cancel`: work on. Raises NotFound. Returns at once."""
        await self._ask("DrainWorker", drain_request(worker_id, cancel), timeout_s)

    async def _ask(self, method: str, request: Message, timeout_s: float) -> Any:
        """A call that may be made twice: where the current router is lost, it goes to the next one that serves, within
        `timeout_s` in all."""
        timeout_s = bounded(timeout_s)
        deadline = self._clock.now() + timeout_s
        try:
            with own_errors():
                return await getattr(self._inference, method)(request, timeout=timeout_s)
        except ConnectionLost:
            if not self._routers.has_others or not await self._find_router(deadline - self._clock.now()):
                raise
        with own_errors():
            return await getattr(self._inference, method)(request, timeout=max(0.0, deadline - self._clock.now()))

    async def _find_router(self, timeout_s: float) -> bool:
        """Turn to the next router that serves; False if none does in time."""
        search = RouterSearch(self._routers, self._clock.now() + timeout_s)
        while (step := search.next(self._clock.now())) is not None:
            if isinstance(step, Wait):
                await asyncio.sleep(step.seconds)
            elif search.answered(await self.serves(step)):
                return True
        return False

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
        return await self._routes[self._routers.current].serves(timeout_s)

    async def close(self) -> None:
        self._routers.closed = True
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

    def __init__(self, client: AsyncClient, machine: ResumeMachine, clock: Clock) -> None:
        self._client = client
        self._machine = machine
        self._clock = clock
        self._call = client.open(machine.start())
        self._next = machine.on_opened()

    async def started(self) -> Started:
        """What the router made of the request. Waits for it if it has not come yet."""
        while self._machine.started is None:
            await self._step()
        return self._machine.started

    async def __aiter__(self) -> AsyncIterator[Delta]:
        try:
            while not isinstance(self._next, Done):
                if (delta := await self._step()) is not None:
                    yield delta
        finally:
            self._call.cancel()

    async def _step(self) -> Delta | None:
        """Do what is next. Returns a delta if that is it; raises what the stream ended with."""
        match self._next:
            case Deliver(delta):
                self._next = Receive()
                return delta
            case Fail(error):
                self._call.cancel()
                raise error
        try:
            self._next = await self._perform(self._next)
        except asyncio.CancelledError:  # so grpc tells of a call cancelled here, or of its channel's closing, as well
            if not self._machine.ended:
                raise
            self._next = self._machine.on_cancelled()
        return None

    async def _perform(self, action: StreamAction) -> StreamAction:
        """Do it; returns what the machine says to what came of it."""
        match action:
            case OpenCall() as call:
                self._call = self._client.open(call)
                return self._machine.on_opened()
            case AskRouter() as ask:
                serves = await self._client.serves(ask)
                return self._machine.on_health(serves, self._clock.now())
            case Wait(seconds):
                await asyncio.sleep(seconds)
                return self._machine.on_time(self._clock.now())
        return await self._receive()

    async def _receive(self) -> StreamAction:
        try:
            with own_errors():
                message = await self._call.read()
        except PdserveError as error:
            return self._machine.on_failure(error, self._clock.now())
        at_end = message is grpc.aio.EOF
        return self._machine.on_end() if at_end else self._machine.on_message(message, self._clock.now())

    @property
    def result(self) -> Result:
        """Only after the iteration has come to its end."""
        if self._machine.result is None:
            raise RuntimeError("the stream has no result yet: iterate it to its end, or use read()")
        return self._machine.result

    async def read(self) -> Result:
        """Wait for the end."""
        async for _ in self:
            pass
        return self.result

    def cancel(self) -> None:
        """End the request; the iteration raises Cancelled. No effect after the end."""
        self._machine.cancel()
        self._call.cancel()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
