"""The gRPC streams under a worker's sessions: one to each router, opened by the worker, and opened again when it ends.

Decides nothing: what is said, and when a stream is over, is session.py's business. Runs on the event loop of the thread
that owns the worker's control.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from functools import partial

import grpc
from grpc.aio import StreamStreamCall

from pdserve import logs
from pdserve.clock import Clock
from pdserve.rpc.cluster_pb2_grpc import ClusterStub
from worker.session import RECONNECT_S, RouterSession

_log = logs.logger("session")

_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),  # a router is reached directly, whatever the environment says of the web
    ("grpc.use_local_subchannel_pool", 1),  # a new connection after a break, not a shared channel in back-off
)

MakeSession = Callable[[Callable[[], None]], RouterSession]  # of a `wake`


class SessionStreams:
    """Keeps a stream to each address, from `open` to `close`. `turn` makes a call into what the control owns."""

    def __init__(
        self,
        addresses: Iterable[str],
        make_session: MakeSession,
        clock: Clock,
        turn: Callable[[Callable[[], None]], None],
    ) -> None:
        self._addresses = tuple(addresses)
        self._make_session = make_session
        self._clock = clock
        self._turn = turn
        self._sessions: set[RouterSession] = set()
        self._none_left = asyncio.Event()
        self._closing = False
        self._tasks: list[asyncio.Task[None]] = []

    def open(self) -> None:
        self._tasks = [asyncio.create_task(self._keep(address)) for address in self._addresses]

    async def close(self) -> None:
        """Leave every router in order: what waits to be sent still leaves, as far as it is read in time."""
        self._closing = True
        for session in list(self._sessions):
            session.finish()
        while self._sessions:
            self._none_left.clear()
            await self._none_left.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self, address: str) -> None:
        """Hold a session with one router for as long as the worker lives."""
        while not self._closing:
            try:
                await self._hold(address)
            except grpc.aio.AioRpcError as error:
                _log.debug("no session", address=address, code=error.code().name, details=error.details())
            except asyncio.CancelledError:  # of a call that this side broke off, which is no reason to leave the router
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
            await asyncio.sleep(RECONNECT_S)

    async def _hold(self, address: str) -> None:
        async with grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS) as channel:
            call = ClusterStub(channel).Session()
            to_send, to_see = asyncio.Event(), asyncio.Event()

            def wake() -> None:
                to_send.set()
                to_see.set()

            session = self._make_session(wake)
            self._sessions.add(session)
            helpers = [
                asyncio.create_task(self._write(call, session, to_send)),
                asyncio.create_task(self._watch(call, session, to_see)),
            ]
            try:
                while (message := await call.read()) is not grpc.aio.EOF:
                    self._turn(partial(session.on_message, message))
            finally:
                for task in helpers:
                    task.cancel()
                await asyncio.gather(*helpers, return_exceptions=True)
                call.cancel()
                self._turn(session.ended)
                self._sessions.discard(session)
                if not self._sessions:
                    self._none_left.set()

    async def _write(self, call: StreamStreamCall, session: RouterSession, to_send: asyncio.Event) -> None:
        try:
            while not session.said_all:
                to_send.clear()
                while (message := session.take()) is not None:
                    await call.write(message)
                if not session.said_all:
                    await to_send.wait()
            await call.done_writing()
        except BaseException:
            call.cancel()  # the reader ends as well
            raise

    async def _watch(self, call: StreamStreamCall, session: RouterSession, to_see: asyncio.Event) -> None:
        """Let it see to its deadlines; break the stream once it is over."""
        while not session.over:
            to_see.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(to_see.wait(), max(0.0, session.next_deadline() - self._clock.now()))
            self._turn(session.tick)
        call.cancel()
