"""The blocking client. May be shared by threads; a Stream belongs to one."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.client.channel import CHANNEL_OPTIONS, DEFAULT_TIMEOUT_S, UNARY_TIMEOUT_S, own_errors
from pdserve.client.request import GenerateOptions, Prompt, generate_request
from pdserve.client.stream import Delta, Result, Started, StreamFold
from pdserve.clock import Clock, SystemClock
from pdserve.errors import PdserveError, ProtocolError
from pdserve.rpc import inference_pb2 as pb
from pdserve.rpc import inference_pb2_grpc


class Client:
    """One router. Connects with the first call, and again whenever the connection was lost."""

    def __init__(self, address: str, *, clock: Clock | None = None) -> None:
        """`address`: host:port. `clock` measures TTFT and TPOT."""
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._clock = clock or SystemClock()

    def generate(
        self, prompt: Prompt, *, timeout_s: float | None = DEFAULT_TIMEOUT_S, **options: Unpack[GenerateOptions]
    ) -> Stream:
        """Start a generation for a text, a chat or token ids. Errors of the call come out of the stream."""
        request = generate_request(prompt, options)
        fold = StreamFold(self._clock.now())
        return Stream(self._inference.Generate(request, timeout=timeout_s), fold, self._clock)

    def complete(
        self, prompt: Prompt, *, timeout_s: float | None = DEFAULT_TIMEOUT_S, **options: Unpack[GenerateOptions]
    ) -> Result:
        """Generate and wait for the end."""
        return self.generate(prompt, timeout_s=timeout_s, **options).read()

    def abort(self, request_id: str, *, timeout_s: float = UNARY_TIMEOUT_S) -> None:
        """End a request, whoever sent it. Its stream ends with Cancelled. Raises NotFound if none is in flight."""
        with own_errors():
            self._inference.Abort(pb.AbortRequest(request_id=request_id), timeout=timeout_s)

    def model_info(self, *, timeout_s: float = UNARY_TIMEOUT_S) -> pb.ModelInfo:
        with own_errors():
            return self._inference.GetModelInfo(pb.GetModelInfoRequest(), timeout=timeout_s)

    def server_info(self, *, timeout_s: float = UNARY_TIMEOUT_S) -> pb.ServerInfo:
        with own_errors():
            return self._inference.GetServerInfo(pb.GetServerInfoRequest(), timeout=timeout_s)

    def healthy(self, timeout_s: float = 1.0) -> bool:
        """Whether the router answers in time that it serves. Never raises a PdserveError."""
        try:
            with own_errors():
                answer = self._health.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except PdserveError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def close(self) -> None:
        """Close the connection; streams still open end with Cancelled."""
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Stream:
    """A running generation: iterate it once for its Deltas. Leaving the iteration early cancels the request."""

    def __init__(self, call: Any, fold: StreamFold, clock: Clock) -> None:
        self._call = call
        self._fold = fold
        self._clock = clock

    @property
    def started(self) -> Started:
        """What the router made of the request. Waits for it if it has not come yet."""
        if self._fold.started is None:
            with own_errors():
                event = next(self._call, None)
            if event is None:
                raise ProtocolError("the router ended the stream before it started")
            self._fold.accept(event, self._clock.now())
        assert self._fold.started is not None
        return self._fold.started

    def __iter__(self) -> Iterator[Delta]:
        try:
            with own_errors():
                for event in self._call:
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

    def read(self) -> Result:
        """Wait for the end."""
        for _ in self:
            pass
        return self.result

    def cancel(self) -> None:
        """End the request. May be called from any thread; the iteration raises Cancelled. No effect after the end."""
        self._call.cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
