"""A worker's side of the Session stream: one to each router, opened by the worker and opened again when it breaks.

    connect -> Hello -> Welcome -> Load at the router's interval, commands in, reports out -> broken -> wait -> connect

The stream is the membership. When it breaks, or the router has been silent for its timeout, the handler hears
`router_lost` and must drop all that this router's owners hold; nothing is buffered for a router that is not there.

A thread of its own runs the streams. Handlers are called on it and must only enqueue; reports come from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable

import grpc

from pdserve import logs
from pdserve.rpc import cluster_pb2 as pb
from pdserve.rpc import convert, worker_messages
from pdserve.rpc.cluster_pb2_grpc import ClusterStub
from pdserve.rpc.worker_messages import SessionHandler
from pdserve.types import Load, WorkerInfo

_log = logs.logger("session")

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),  # a router is reached directly, whatever the environment says of the web
    ("grpc.use_local_subchannel_pool", 1),  # a new connection after a break, not a shared channel in back-off
)
_WELCOME_TIMEOUT_S = 5.0
_RECONNECT_S = 0.2
_MAX_UNSENT = 10_000


class WorkerSessions:
    """The sessions of one worker with all its routers. `reports` is where its services report to, from any thread."""

    def __init__(
        self, addresses: Iterable[str], info: WorkerInfo, handler: SessionHandler, load: Callable[[], Load]
    ) -> None:
        self._addresses = tuple(addresses)
        self._info = info
        self._handler = handler
        self._load = load
        self._outboxes: dict[str, asyncio.Queue[pb.WorkerMessage]] = {}
        self.reports = worker_messages.Reports(self._send)
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="sessions", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Break the sessions and end the thread."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(timeout_s)

    @property
    def open_count(self) -> int:
        """How many routers there is a session with."""
        return len(self._outboxes)

    def flush(self, timeout_s: float) -> None:
        """Wait until what was reported so far has been written to the routers, or the time is over."""
        asyncio.run_coroutine_threadsafe(self._flush(timeout_s), self._loop).result(timeout_s + 1.0)

    def _send(self, router: str, message: pb.WorkerMessage) -> None:
        """Any thread. After `close` nobody is left to tell."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._enqueue, router, message)

    def _enqueue(self, router: str, message: pb.WorkerMessage) -> None:
        outbox = self._outboxes.get(router)
        if outbox is None:
            return
        if outbox.qsize() >= _MAX_UNSENT:
            _log.error("router reads too slowly, session broken", router=router, unsent=outbox.qsize())
            del self._outboxes[router]
            return
        outbox.put_nowait(message)

    # The session thread.

    async def _flush(self, timeout_s: float) -> None:
        writing = [asyncio.create_task(outbox.join()) for outbox in self._outboxes.values()]
        if writing:
            _, late = await asyncio.wait(writing, timeout=timeout_s)
            for task in late:
                task.cancel()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._keep_all())
        finally:
            self._loop.close()

    async def _keep_all(self) -> None:
        tasks = [asyncio.create_task(self._keep(address)) for address in self._addresses]
        await self._stopping.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, address: str) -> None:
        """Hold a session with one router for as long as the worker lives."""
        while True:
            try:
                await self._hold(address)
            except grpc.aio.AioRpcError as error:
                _log.debug("no session", address=address, code=error.code().name, details=error.details())
            except TimeoutError:
                _log.warning("router is silent", address=address)
            except asyncio.CancelledError:  # of a call that this side broke off, which is no reason to leave the router
                if self._stopping.is_set():
                    raise
            await asyncio.sleep(_RECONNECT_S)

    async def _hold(self, address: str) -> None:
        async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            call = ClusterStub(channel).Session()
            await call.write(pb.WorkerMessage(hello=convert.worker_to_hello(self._info)))
            welcome = await asyncio.wait_for(call.read(), _WELCOME_TIMEOUT_S)
            if welcome is grpc.aio.EOF:
                return
            router = welcome.welcome.router
            outbox: asyncio.Queue[pb.WorkerMessage] = asyncio.Queue()
            self._outboxes[router] = outbox
            _log.info("session open", router=router, address=address)
            writers = [
                asyncio.create_task(self._write(call, router, outbox)),
                asyncio.create_task(self._renew(outbox, welcome.welcome.renew_interval_ms / 1000)),
            ]
            try:
                await self._read(call, welcome.welcome.timeout_ms / 1000)
            finally:
                for task in writers:
                    task.cancel()
                await asyncio.gather(*writers, return_exceptions=True)
                call.cancel()
                if self._outboxes.get(router) is outbox:
                    del self._outboxes[router]
                _log.info("session broken", router=router, address=address)
                self._handler.router_lost(router)

    async def _write(self, call: grpc.aio.StreamStreamCall, router: str, outbox: asyncio.Queue) -> None:
        try:
            while self._outboxes.get(router) is outbox:
                await call.write(await outbox.get())
                outbox.task_done()
        finally:
            call.cancel()  # the reader ends as well

    async def _renew(self, outbox: asyncio.Queue, interval_s: float) -> None:
        while True:
            outbox.put_nowait(pb.WorkerMessage(load=convert.load_to_proto(self._load())))
            await asyncio.sleep(interval_s)

    async def _read(self, call: grpc.aio.StreamStreamCall, timeout_s: float) -> None:
        while True:
            message = await asyncio.wait_for(call.read(), timeout_s)
            if message is grpc.aio.EOF:
                return
            worker_messages.deliver(message, self._handler)
