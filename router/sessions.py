"""The gRPC streams under a router's sessions, one a worker.

Decides nothing: what is said, and when a stream is over, is session.py's business.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc

from pdserve import crash_report
from pdserve.clock import Clock
from pdserve.rpc import cluster_pb2 as pb
from pdserve.rpc.cluster_pb2_grpc import ClusterServicer
from router.session import SessionTerms, WorkerSession, WorkerSessionEvents


class Sessions(ClusterServicer):
    """The servicer of pdserve.cluster.v1.Cluster."""

    def __init__(self, terms: SessionTerms, events: WorkerSessionEvents, clock: Clock) -> None:
        self._terms = terms
        self._events = events
        self._clock = clock

    async def Session(
        self, request_iterator: AsyncIterator[pb.WorkerMessage], context: grpc.aio.ServicerContext
    ) -> None:
        to_send, to_see = asyncio.Event(), asyncio.Event()

        def wake() -> None:
            to_send.set()
            to_see.set()

        session = WorkerSession(self._terms, self._events, self._clock, wake)
        reader = asyncio.create_task(self._read(session, request_iterator))
        helpers = [
            asyncio.create_task(self._write(session, context, to_send)),
            asyncio.create_task(self._watch(session, reader, to_see)),
        ]
        try:
            await reader
        except asyncio.CancelledError:
            if _being_cancelled():
                raise
        finally:
            for task in (reader, *helpers):
                task.cancel()
            broken = session.over
            session.ended(_report_of(session))
        if session.problem:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, session.problem)
        elif broken:
            await context.abort(grpc.StatusCode.CANCELLED, "the router has ended the worker's Session stream")

    async def _read(self, session: WorkerSession, messages: AsyncIterator[pb.WorkerMessage]) -> None:
        async for message in messages:
            session.on_message(message)

    async def _write(self, session: WorkerSession, context: grpc.aio.ServicerContext, to_send: asyncio.Event) -> None:
        while True:
            to_send.clear()
            while (message := session.take()) is not None:
                await context.write(message)
            await to_send.wait()

    async def _watch(self, session: WorkerSession, reader: asyncio.Task[None], to_see: asyncio.Event) -> None:
        """Let it see to its deadlines; stop reading once it is over."""
        while not session.over:
            to_see.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(to_see.wait(), max(0.0, session.next_deadline() - self._clock.now()))
            session.tick()
        reader.cancel()


def _report_of(session: WorkerSession) -> str | None:
    """What the worker's process left behind. The file is on its host."""
    return crash_report.read(session.info) if session.joined else None


def _being_cancelled() -> bool:
    """Whether it is the current task that is cancelled, and not one it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
