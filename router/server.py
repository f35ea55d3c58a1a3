"""The router as a process: joins dispatch, membership, the Session streams and the gRPC front on one event loop.

It carries what control.py decides. Nothing here decides anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator
from importlib.metadata import version
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from pdserve import logs
from pdserve.clock import Clock, SystemClock
from pdserve.config import RouterConfig
from pdserve.errors import ConfigError, NotFound, PdserveError, Unavailable
from pdserve.rpc import cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from pdserve.types import Finish, ModelLimits
from router.actions import End, Request, StreamEvent
from router.control import TICK_S, Control
from router.frontend import Frontend
from router.session import SessionTerms
from router.sessions import Sessions
from router.status import ModelStatus, RouterStatus, worker_statuses
from router.text import Tokenizer

_log = logs.logger("router")

_VERSION = version("pdserve")  # read once: a process short of descriptors can still say how it is
_SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
_HEALTH_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.max_send_message_length", 64 * 1024 * 1024),
    ("grpc.so_reuseport", 1),  # whoever starts the router may hold its ports for it
    ("grpc.keepalive_time_ms", 30_000),  # a peer whose machine has vanished sends no goodbye
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),  # clients and workers ask for signs of life too
)


class RequestStream:
    """What has happened to one request's outputs, for who serves its client. Bounded by max_tokens."""

    def __init__(self, control: Control, request_id: str, n: int) -> None:
        self.request_id = request_id
        self._control = control
        self._left = n
        self._events: asyncio.Queue[StreamEvent] = asyncio.Queue()

    def put(self, event: StreamEvent) -> bool:
        """Add an event; True if it is the last one."""
        self._events.put_nowait(event)
        self._left -= isinstance(event, End)
        return self._left == 0

    async def __aiter__(self) -> AsyncIterator[StreamEvent]:
        """All events in order, until each output has had its End."""
        while self._left or not self._events.empty():
            yield await self._events.get()

    def finish(self, output: int, finish: Finish) -> None:
        """End an output regularly: a stop string matched in its text."""
        self._control.finish(self, output, finish)

    def abandon(self) -> None:
        """Nobody listens any more: end the request if it has not ended."""
        self._control.abandon(self)


class Router:
    """One router process. Everything runs on the event loop that calls `start`."""

    def __init__(
        self, model_directory: Path, model_name: str, config: RouterConfig, clock: Clock | None = None
    ) -> None:
        self.model = model_name
        self.incarnation = f"router-{secrets.token_hex(8)}"
        self.grpc_address = ""
        self.session_address = ""
        self._config = config
        self._clock = clock or SystemClock()
        self._control = Control(self.incarnation, config, self._clock, self)
        self._membership = self._control.membership
        self._dispatch = self._control.dispatch
        self._tokenizer = Tokenizer.load(model_directory)
        self._limits: ModelLimits | None = None
        self._eos_token_ids: tuple[int, ...] = ()
        self._first_join = asyncio.Event()
        self._joined = asyncio.Event()
        self._all_ended = asyncio.Event()
        self._health = health_aio.HealthServicer()
        self._servers: list[grpc.aio.Server] = []
        self._ticker: asyncio.Task[None] | None = None

    # Life.

    async def start(self) -> None:
        """Listen. Raises ConfigError where it cannot."""
        front = grpc.aio.server(options=_SERVER_OPTIONS)
        inference_pb2_grpc.add_InferenceServicer_to_server(Frontend(self, self._tokenizer), front)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, front)
        reflection.enable_server_reflection((_SERVICE, _HEALTH_SERVICE), front)
        self.grpc_address = await self._listen(front, self._config.grpc_port)
        back = grpc.aio.server(options=_SERVER_OPTIONS)
        terms = SessionTerms(
            self.incarnation, self.model, self._config.renew_interval_ms, self._config.worker_timeout_ms
        )
        cluster_pb2_grpc.add_ClusterServicer_to_server(Sessions(terms, self._control, self._clock), back)
        self.session_address = await self._listen(back, self._config.session_port)
        await self._update_health()
        self._ticker = asyncio.create_task(self._tick_forever())
        _log.info("router listens", grpc=self.grpc_address, sessions=self.session_address, model=self.model)

    async def drain(self, timeout_s: float) -> None:
        """Say NOT_SERVING, take nothing new, and wait until every stream has ended or the time is over."""
        _log.info("router drains", running=len(self._dispatch))
        self._control.drain()
        await self._update_health()
        self._all_ended.clear()
        if len(self._dispatch):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_ended.wait(), timeout_s)
        _log.info("router drained", left=len(self._dispatch))

    async def stop(self, grace_s: float = 1.0) -> None:
        """End what is in flight and close both ports."""
        if self._ticker is not None:
            self._ticker.cancel()
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))

    async def _listen(self, server: grpc.aio.Server, port: int) -> str:
        try:
            bound = server.add_insecure_port(f"{self._config.host}:{port}")
        except RuntimeError as error:
            raise ConfigError(f"the router cannot listen at {self._config.host}:{port}: {error}") from None
        await server.start()
        self._servers.append(server)
        return f"{self._config.host}:{bound}"

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self._control.tick()
            except Exception:  # noqa: BLE001 - the timer's supervisor: without it no silence would end any more
                _log.exception("a tick failed")

    async def _update_health(self) -> None:
        answers = health_pb2.HealthCheckResponse
        status = answers.SERVING if self._control.serves else answers.NOT_SERVING
        for service in ("", _SERVICE):
            await self._health.set(service, status)

    # The front's calls.

    async def limits(self) -> ModelLimits:
        """What a request must fit, by the smallest worker. Waits for the first worker; Unavailable if none comes."""
        try:
            await asyncio.wait_for(self._first_join.wait(), self._config.placement_timeout_ms / 1000)
        except TimeoutError:
            raise Unavailable("no worker has joined this router yet") from None
        assert self._limits is not None
        return self._limits

    def submit(self, request: Request, resumed: bool = False) -> RequestStream:
        """Take a request over; a resumed one from whoever had it. Raises as Control."""
        stream = RequestStream(self._control, request.request_id, request.n)
        self._control.submit(request, stream, resumed)
        return stream

    def cancel(self, request_id: str, error: PdserveError | None = None) -> bool:
        """End a request with an error; False if it is not in flight."""
        return self._control.cancel(request_id, error)

    async def wait_members(self, worker_ids: frozenset[str]) -> None:
        """Return once all these workers are members. The caller sets the deadline."""
        while worker_ids - {member.info.worker_id for member in self._membership}:
            self._joined.clear()
            await self._joined.wait()

    def drain_worker(self, worker_id: str, cancel: bool) -> None:
        """Ask a worker to finish what it has and take nothing new. Raises NotFound."""
        member = next((member for member in self._membership if member.info.worker_id == worker_id), None)
        if member is None:
            known = ", ".join(sorted(member.info.worker_id for member in self._membership)) or "none"
            raise NotFound(f"worker_id: no worker {worker_id!r} is alive; there are: {known}")
        self._control.drain_worker(member.info.incarnation, cancel)

    async def model_status(self) -> ModelStatus:
        """Waits for the first worker; raises Unavailable if none comes."""
        limits = await self.limits()
        return ModelStatus(self.model, limits.vocab_size, limits.max_model_len, self._eos_token_ids)

    def status(self) -> RouterStatus:
        return RouterStatus(
            version=_VERSION,
            model=self.model,
            grpc_address=self.grpc_address,
            session_address=self.session_address,
            running_requests=len(self._dispatch),
            pid=os.getpid(),
            workers=worker_statuses(self._membership, self._dispatch),
        )

    # What the control tells.

    def all_ended(self) -> None:
        self._all_ended.set()

    def members_changed(self) -> None:
        if len(list(self._membership)):
            self._note_limits()
        asyncio.get_running_loop().create_task(self._update_health())

    def _note_limits(self) -> None:
        limits = [member.info.limits for member in self._membership]
        self._limits = ModelLimits(
            vocab_size=min(each.vocab_size for each in limits),
            max_model_len=min(each.max_model_len for each in limits),
            pool_tokens=min(each.pool_tokens for each in limits),
        )
        self._eos_token_ids = next(iter(self._membership)).info.eos_token_ids
        self._first_join.set()
        self._joined.set()
