"""The router's side of the Session streams: workers come, renew, report and go.

Each stream has an outbox. Commands put into it leave in order; when it grows beyond its limit, the worker does not read
and its session is broken.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

import grpc

from pdserve import crash_report, logs
from pdserve.errors import FailedPrecondition, PdserveError, ProtocolError
from pdserve.rpc import cluster_pb2 as pb
from pdserve.rpc import convert
from pdserve.rpc.cluster_pb2_grpc import ClusterServicer
from pdserve.types import Finish, Load, Owner, SampledToken, Ticket, WorkerInfo
from router.control import Session

_log = logs.logger("router")

_HELLO_TIMEOUT_S = 5.0
_MAX_UNSENT = 10_000


class SessionEvents(Protocol):
    """What the streams tell the router, on its event loop."""

    def worker_joined(self, session: Session) -> None: ...

    def worker_left(self, session: Session, reason: str, crashed: bool) -> None: ...

    def renewed(self, worker: str, load: Load) -> None: ...

    def ticket(self, worker: str, owner: Owner, ticket: Ticket) -> None: ...

    def local_prefill(self, worker: str, owner: Owner, reason: str) -> None: ...

    def tokens(self, worker: str, owner: Owner, first_position: int, tokens: tuple[SampledToken, ...]) -> None: ...

    def terminal(self, worker: str, owner: Owner, outcome: Finish | PdserveError | None) -> None: ...


class WorkerSession:
    """One worker's open stream."""

    def __init__(self, info: WorkerInfo, reader: asyncio.Task[None]) -> None:
        self.info = info
        self._reader = reader
        self._outbox: asyncio.Queue[pb.RouterMessage] = asyncio.Queue(_MAX_UNSENT)

    def send(self, message: pb.RouterMessage) -> None:
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            self.close()

    def close(self) -> None:
        """Break the stream from this side."""
        self._reader.cancel()

    async def write_to(self, context: grpc.aio.ServicerContext) -> None:
        while True:
            await context.write(await self._outbox.get())

    async def renew(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            self.send(pb.RouterMessage(renew=pb.Renew()))


class Sessions(ClusterServicer):
    """The servicer of pdserve.cluster.v1.Cluster."""

    def __init__(
        self, incarnation: str, model: str, events: SessionEvents, renew_interval_ms: int, timeout_ms: int
    ) -> None:
        self._model = model
        self._events = events
        self._renew_interval_s = renew_interval_ms / 1000
        self._welcome = pb.Welcome(
            version=convert.SESSION_VERSION,
            router=incarnation,
            renew_interval_ms=renew_interval_ms,
            timeout_ms=timeout_ms,
        )

    async def Session(
        self, request_iterator: AsyncIterator[pb.WorkerMessage], context: grpc.aio.ServicerContext
    ) -> None:
        try:
            info = await self._receive_hello(request_iterator)
        except (PdserveError, TimeoutError) as error:
            _log.warning("worker refused", peer=context.peer(), error=error)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error) or "no hello in time")
        reader = asyncio.create_task(self._read(info.incarnation, request_iterator))
        session = WorkerSession(info, reader)
        session.send(pb.RouterMessage(welcome=self._welcome))
        helpers = [
            asyncio.create_task(session.write_to(context)),
            asyncio.create_task(session.renew(self._renew_interval_s)),
        ]
        self._events.worker_joined(session)
        reason, broke = "the worker ended its session", False
        try:
            await reader
        except asyncio.CancelledError:
            reason, broke = "its session broke", True
            if _being_cancelled():
                raise
            await context.abort(grpc.StatusCode.CANCELLED, "the router has ended the worker's Session stream")
        except PdserveError as error:
            reason = str(error)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
        finally:
            for task in (reader, *helpers):
                task.cancel()
            report = crash_report.read(info) if broke else ""
            self._events.worker_left(session, f"{reason}: {report}" if report else reason, crashed=report != "")

    async def _read(self, worker: str, messages: AsyncIterator[pb.WorkerMessage]) -> None:
        async for message in messages:
            deliver(worker, message, self._events)

    async def _receive_hello(self, messages: AsyncIterator[pb.WorkerMessage]) -> WorkerInfo:
        first = await asyncio.wait_for(anext(messages), _HELLO_TIMEOUT_S)
        if first.WhichOneof("message") != "hello":
            raise ProtocolError(f"the first message is {first.WhichOneof('message')}, not hello")
        info = convert.worker_from_hello(first.hello)
        if info.model != self._model:
            raise FailedPrecondition(f"model: worker {info.worker_id} has {info.model!r}, this router {self._model!r}")
        return info


def deliver(worker: str, message: pb.WorkerMessage, events: SessionEvents) -> None:
    """Tell the router what a worker's message says. Raises ProtocolError for one that should not come."""
    match message.WhichOneof("message"):
        case "load":
            events.renewed(worker, convert.load_from_proto(message.load))
        case "tokens":
            for item in message.tokens.batch:
                tokens = tuple(convert.token_from_proto(token) for token in item.tokens)
                events.tokens(worker, convert.owner_from_proto(item.owner), item.first_position, tokens)
        case "ticket":
            owner = convert.owner_from_proto(message.ticket.owner)
            events.ticket(worker, owner, convert.ticket_from_proto(message.ticket))
        case "local_prefill":
            owner = convert.owner_from_proto(message.local_prefill.owner)
            events.local_prefill(worker, owner, message.local_prefill.reason)
        case "terminal":
            owner = convert.owner_from_proto(message.terminal.owner)
            events.terminal(worker, owner, convert.terminal_from_proto(message.terminal))
        case unexpected:
            raise ProtocolError(f"unexpected message {unexpected} from {worker}")


def _being_cancelled() -> bool:
    """Whether it is the current task that is cancelled, and not one it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
