"""A worker's control beside whatever engine and link a test has, with one session; its turns are taken by hand."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from decode_worker.ladder import Ladder, LadderLimits
from decode_worker.role import DecodeRole
from pdserve.clock import Clock, SystemClock
from pdserve.config import TransferConfig
from pdserve.rpc import cluster_pb2 as pb
from pdserve.tracing import Trace
from pdserve.types import Load
from prefill_worker.outlet import LinkOutlet
from prefill_worker.role import PrefillRole
from worker.control import Control
from worker.ports import Turns


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
        max_queued: int = 64,
    ) -> None:
        config = config or TransferConfig()
        make_outlet = partial(LinkOutlet, link, trace or Trace(), config.mode, layer_count)
        self.prefill = PrefillRole(make_outlet, max_queued)
        self.decode = DecodeRole(Ladder(LadderLimits.from_config(config)), max_queued)
        self.control = Control(
            self.prefill, self.decode, engine, link, turns, clock or SystemClock(), NobodyWaits(), Load()
        )
        self.session = OneSession(on_message)
        self.control.session_opened(self.session)

    def tell(self, message: pb.RouterMessage) -> None:
        self.control.on_message(self.session, message)
