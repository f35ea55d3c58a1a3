"""Sessions between simulated workers and routers: what the gRPC streams and their tasks do, without them.

The messages are the real ones, made and read by the real code; only how they are carried, and when a timer looks, is
of this module.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from pdserve.errors import PdserveError
from pdserve.rpc import cluster_pb2 as pb
from pdserve.rpc import convert, worker_messages
from pdserve.types import Load, WorkerInfo
from router import sessions as router_sessions
from router.control import Control
from simulation.network import Fabric, Wire
from simulation.timeline import Process

WELCOME_TIMEOUT_S = 5.0
RECONNECT_S = 0.2
IDLE = frozenset({"load", "renew", "tick", "timer"})  # labels of what happens also where nothing is going on


class RouterSide(Protocol):
    """What a session needs of a router process."""

    process: Process
    incarnation: str
    control: Control
    renew_interval_s: float
    timeout_s: float


class WorkerSide(Protocol):
    """What a session needs of a worker process."""

    process: Process
    info: WorkerInfo
    handler: worker_messages.SessionHandler
    counts: Counter[str]

    @property
    def load(self) -> Load: ...

    def session_opened(self, router: str, session: WorkerEnd) -> None: ...

    def session_ended(self, router: str | None, session: WorkerEnd) -> None: ...


class WorkerEnd:
    """A worker's end: Hello, Welcome, then Loads and reports up and commands down, until it breaks."""

    def __init__(self, fabric: Fabric, worker: WorkerSide, router: RouterSide, address: str) -> None:
        self.address = address
        self._worker = worker
        self._router: str | None = None  # its incarnation, from the Welcome
        self._timeout_s = WELCOME_TIMEOUT_S
        self._heard_at = worker.process.timeline.now()
        self._over = self._full = False
        self._router_process = router.process
        self._fabric = fabric
        self.wire = Wire(fabric, worker.process, router.process, self._closed)
        self._other = RouterEnd(self, router, self.wire, fabric)
        hello = convert.worker_to_hello(worker.info)
        self.wire.send(worker.process, "hello", lambda: self._other.on_hello(hello))
        self._watch()

    @property
    def process(self) -> Process:
        return self._worker.process

    def send(self, message: pb.WorkerMessage) -> None:
        """To the router; one that reads too slowly loses the session."""
        if self.wire.unread[self._router_process] >= self._fabric.conditions.max_unsent:
            self._worker.counts["outbox full"] += not self._full
            self._full = True
            self._worker.process.after(0.0, "outbox full", self._end)
            return
        label = message.WhichOneof("message") or ""
        self.wire.send(self._worker.process, label, lambda: self._other.on_message(message), message)

    def on_message(self, message: pb.RouterMessage) -> None:
        if self._over:
            return
        self._heard_at = self._worker.process.timeline.now()
        if message.WhichOneof("message") == "welcome":
            self._router = message.welcome.router
            self._timeout_s = message.welcome.timeout_ms / 1000
            self._worker.session_opened(self._router, self)
            self._renew(message.welcome.renew_interval_ms / 1000)
        else:
            worker_messages.deliver(message, self._worker.handler)

    def _renew(self, interval_s: float) -> None:
        if not self._over:
            self.send(pb.WorkerMessage(load=convert.load_to_proto(self._worker.load)))
            self._worker.process.after(interval_s, "timer", lambda: self._renew(interval_s))

    def _watch(self) -> None:
        """Silence ends the session."""
        silent_at = self._heard_at + self._timeout_s
        if self._over:
            return
        if self._worker.process.timeline.now() >= silent_at:
            self._end()
        else:
            self._worker.process.at(silent_at, "timer", self._watch)

    def _closed(self, end: Process) -> None:
        if end is self._worker.process:
            self._end()
        else:
            self._other.leave("the worker ended its session")

    def _end(self) -> None:
        if not self._over:
            self._over = True
            self.wire.close(self._worker.process)
            self._worker.session_ended(self._router, self)


class RouterEnd:
    """A router's end: a Session of its Control."""

    info: WorkerInfo

    def __init__(self, other: WorkerEnd, router: RouterSide, wire: Wire, fabric: Fabric) -> None:
        self._other = other
        self._router = router
        self._wire = wire
        self._fabric = fabric
        self._joined = False
        self._over = False

    def on_hello(self, hello: pb.Hello) -> None:
        if self._over:
            return
        self.info = convert.worker_from_hello(hello)
        welcome = pb.Welcome(
            version=convert.SESSION_VERSION,
            router=self._router.incarnation,
            renew_interval_ms=round(self._router.renew_interval_s * 1000),
            timeout_ms=round(self._router.timeout_s * 1000),
        )
        self.send(pb.RouterMessage(welcome=welcome))
        self._joined = True
        self._router.control.worker_joined(self)
        self._renew()

    def on_message(self, message: pb.WorkerMessage) -> None:
        if self._over:
            return
        try:
            router_sessions.deliver(self.info.incarnation, message, self._router.control)
        except PdserveError as error:
            self.leave(str(error))

    def send(self, message: pb.RouterMessage) -> None:
        if self._wire.unread[self._other.process] >= self._fabric.conditions.max_unsent:
            self.close()
            return
        label = message.WhichOneof("message") or ""
        self._wire.send(self._router.process, label, lambda: self._other.on_message(message), message)

    def close(self) -> None:
        """Nothing that comes is handled any more; the rest happens in an event of its own, as a task's end does."""
        if not self._over:
            self._over = True
            self._router.process.after(0.0, "session closed", lambda: self._leave("its session broke"))

    def leave(self, reason: str) -> None:
        if not self._over:
            self._over = True
            self._leave(reason)

    def _leave(self, reason: str) -> None:
        self._wire.close(self._router.process)
        if self._joined:
            self._router.control.worker_left(self, reason)

    def _renew(self) -> None:
        if not self._over:
            self.send(pb.RouterMessage(renew=pb.Renew()))
            self._router.process.after(self._router.renew_interval_s, "timer", self._renew)
