"""The client for asyncio. Belongs to one event loop, in which it must be made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.client.channel import CHANNEL_OPTIONS, DEFAULT_TIMEOUT_S, UNARY_TIMEOUT_S, own_errors
from pdserve.client.request import GenerateOptions, Prompt, generate_request
from pdserve.client.stream import Delta, Result, Started, StreamFold
from pdserve.clock import Clock, SystemClock
from pdserve.errors import Cancelled, PdserveError, ProtocolError
from pdserve.rpc import inference_pb2 as pb
from pdserve.rpc import inference_pb2_grpc


class AsyncClient:
    """As Client, with coroutines."""

    def __init__(self, address: str, *, clock: Clock | None = None) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._clock = clock or SystemClock()

    def generate(
        self, prompt: Prompt, *, timeout_s: float | None = DEFAULT_TIMEOUT_S, **options: Unpack[GenerateOptions]
    ) -> AsyncStream:
        """Start a generation. Not a coroutine: `async for delta in client.generate(...)`."""
        request = generate_request(prompt, options)
        fold = StreamFold(self._clock.now())
        return AsyncStream(self._inference.Generate(request, timeout=timeout_s), fold, self._clock)

    async def complete(
        self, prompt: Prompt, *, timeout_s: float | None = DEFAULT_TIMEOUT_S, **options: Unpack[GenerateOptions]
    ) -> Result:
        return await self.generate(prompt, timeout_s=timeout_s, **options).read()

    async def abort(self, request_id: str, *, timeout_s: float = UNARY_TIMEOUT_S) -> None:
        with own_errors():
            await self._inference.Abort(pb.AbortRequest(request_id=request_id), timeout=timeout_s)

    async def model_info(self, *, timeout_s: float = UNARY_TIMEOUT_S) -> pb.ModelInfo:
        with own_errors():
            return await self._inference.GetModelInfo(pb.GetModelInfoRequest(), timeout=timeout_s)

    async def server_info(self, *, timeout_s: float = UNARY_TIMEOUT_S) -> pb.ServerInfo:
        with own_errors():
            return await self._inference.GetServerInfo(pb.GetServerInfoRequest(), timeout=timeout_s)

    async def healthy(self, timeout_s: float = 1.0) -> bool:
        try:
            with own_errors():
                answer = await self._health.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except PdserveError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncStream:
    """As Stream. After leaving the iteration early the request is cancelled when the loop next runs; `async with` or
    cancel() do it at once."""

    def __init__(self, call: Any, fold: StreamFold, clock: Clock) -> None:
        self._call = call
        self._fold = fold
        self._clock = clock
        self._cancelled = False

    async def started(self) -> Started:
        """What the router made of the request. Waits for it if it has not come yet."""
        if self._fold.started is None:
            with self._stream_errors():
                event = await self._call.read()
            if event is grpc.aio.EOF:
                raise ProtocolError("the router ended the stream before it started")
            self._fold.accept(event, self._clock.now())
        assert self._fold.started is not None
        return self._fold.started

    async def __aiter__(self) -> AsyncIterator[Delta]:
        try:
            while True:
                with self._stream_errors():
                    event = await self._call.read()
                if event is grpc.aio.EOF:
                    break
                delta = self._fold.accept(event, self._clock.now())
                if delta is not None:
                    yield delta
            self._fold.end()
        finally:
            self._call.cancel()

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
        """grpc tells of a call cancelled here as it tells of a cancelled task; the caller must see them apart."""
        try:
            with own_errors():
                yield
        except asyncio.CancelledError:
            if self._cancelled:
                raise Cancelled("the stream was cancelled") from None
            raise
