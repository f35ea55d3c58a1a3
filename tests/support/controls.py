"""A worker's control beside whatever engine and link a test has, with one session; its turns are taken by hand."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from pdserve.clock import Clock, SystemClock
from pdserve.config import TransferConfig
from pdserve.rpc import cluster_pb2 as pb
from pdserve.tracing import Trace
from pdserve.types import Load
from worker.assembly import make_control
from worker.ports import Observer, Turns


class HandTurns:
    """Keeps what is posted, from any thread, until the test has it called."""

    def __init__(self) -> None:
        self._posted: deque[Callable[[], None]] = deque()
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def post(self, call: Callable[[], None]) -> None:
        self._posted.append(call)

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        self.timers.append((delay_s, call))

    def take(self) -> None:
        """Call what was posted, and what that posts."""
        while self._posted:
            self._posted.popleft()()


class OneSession:
    """A session with the router whose owners a test uses. `on_message` gets what the worker sends."""

    def __init__(self, on_message: Callable[[pb.WorkerMessage], None], router: str = "router") -> None:
        self.router = router
        self._on_message = on_message

    def send(self, message: pb.WorkerMessage) -> None:
        self._on_message(message)


class NobodyWaits:
    """An observer of a worker that is never told to leave."""

    def left(self, owners_left: int) -> None:
        raise AssertionError("it was not told to leave")


class TestedControl:
    """A control and its session. `control` is the engine's listener; `tell` brings what the router says."""

    __test__ = False

    def __init__(
        self,
        engine: Any,
        link: Any,
        layer_count: int,
        on_message: Callable[[pb.WorkerMessage], None],
        *,
        turns: Turns,
        config: TransferConfig | None = None,
        trace: Trace | None = None,
        clock: Clock | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.control = make_control(
            engine,
            link,
            turns,
            observer or NobodyWaits(),
            clock or SystemClock(),
            trace or Trace(),
            config or TransferConfig(),
            layer_count=layer_count,
            max_queued=64,
            load=Load(),
        )
        self.session = OneSession(on_message)
        self.control.session_opened(self.session)

    def tell(self, message: pb.RouterMessage) -> None:
        self.control.on_message(self.session, message)
