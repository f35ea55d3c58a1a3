"""Traffic in the background of a measurement: a gRPC echo between a server and a client of this process."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType

import grpc

_METHOD = "/pdserve.bench.Echo/Echo"
_CHANNEL_OPTIONS = (("grpc.enable_http_proxy", 0),)
_MESSAGE = bytes(256)  # about a step's tokens of a few streams


class EchoTraffic:
    """While entered, an event loop on a thread of this process is busy with calls, as a worker's is with reports."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="echo", daemon=True)
        self._stop = asyncio.Event()
        self.calls = 0

    def __enter__(self) -> EchoTraffic:
        self._thread.start()
        self._done = asyncio.run_coroutine_threadsafe(self._run(), self._loop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._done.result(30.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        self._loop.close()

    async def _run(self) -> None:
        server = grpc.aio.server()
        handler = grpc.unary_unary_rpc_method_handler(self._echo)
        service, method = _METHOD.strip("/").split("/")
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=_CHANNEL_OPTIONS) as channel:
            call = channel.unary_unary(_METHOD)
            await self._keep_calling(call)
        await server.stop(0)

    async def _echo(self, message: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return message

    async def _keep_calling(self, call: grpc.aio.UnaryUnaryMultiCallable) -> None:
        while not self._stop.is_set():
            await call(_MESSAGE)
            self.calls += 1
