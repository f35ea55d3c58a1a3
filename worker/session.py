"""A worker's end of the Session stream with one router, as a state machine. No socket, no task: who carries messages is
`session_streams.py` over gRPC, a simulation in memory.

    hello sent ──welcome──► open ──silence, full outbox──► over ──stream ended──► ended
        └────────no welcome─────────────────────────────────▲
                              └──finish──► finishing: what is in the outbox still leaves, goodbye last

The stream is the membership. Once it has ended, `session_ended` is told, and all that this router's owners hold must be
dropped; nothing is kept for a router that is not there.

Who carries it: takes messages while there are any; brings those that come; calls `tick` when `next_deadline` has come;
breaks the stream when the session is `over`, or closes its own side once it is `said_all`; and says when the stream has
ended, for whatever reason. It looks whenever `wake` is called.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, Protocol

from pdserve import logs
from pdserve.clock import Clock
from pdserve.errors import PdserveError
from pdserve.rpc import cluster_pb2 as pb
from pdserve.rpc import convert
from pdserve.rpc.outbox import MAX_UNSENT, Outbox
from pdserve.types import Load, WorkerInfo

_log = logs.logger("session")

RECONNECT_S: Final = 0.2  # after a stream has ended, until the next one is opened
_WELCOME_TIMEOUT_S = 5.0
_FINISH_TIMEOUT_S = 1.0


class SessionEvents(Protocol):
    """Who is told what comes over the sessions: the worker's control."""

    @property
    def load(self) -> Load: ...

    def session_opened(self, session: RouterSession) -> None: ...

    def session_ended(self, session: RouterSession) -> None: ...

    def on_message(self, session: RouterSession, message: pb.RouterMessage) -> None: ...


class RouterSession:
    """See the module's docstring. `router`: its incarnation, once it is open."""

    def __init__(
        self,
        info: WorkerInfo,
        events: SessionEvents,
        clock: Clock,
        wake: Callable[[], None],
        max_unsent: int = MAX_UNSENT,
    ) -> None:
        self.router = ""
        self.over = False
        self._events = events
        self._clock = clock
        self._wake = wake
        self._outbox: Outbox[pb.WorkerMessage] = Outbox(max_unsent)
        self._outbox.put(pb.WorkerMessage(hello=convert.worker_to_hello(info)))
        self._finishing = False
        self._timeout_s = _WELCOME_TIMEOUT_S
        self._silent_at = clock.now() + _WELCOME_TIMEOUT_S
        self._load_interval_s = math.inf
        self._load_at = math.inf

    @property
    def unsent(self) -> int:
        return len(self._outbox)

    @property
    def said_all(self) -> bool:
        """Whether it is finishing, and nothing is left to send."""
        return self._finishing and not self._outbox

    def take(self) -> pb.WorkerMessage | None:
        """The next message for the stream."""
        return None if self.over else self._outbox.take()

    def send(self, message: pb.WorkerMessage) -> None:
        """Pass a message on, in order. A router that reads too slowly loses the session."""
        if self.over or self._finishing:
            return
        if not self._outbox.put(message):
            self._break("router reads too slowly")
        self._wake()

    def finish(self) -> None:
        """Say no more than what waits to be sent, and leave in order."""
        if not self.router:
            self.over = True
            self._wake()
        elif not self.over:
            self.send(pb.WorkerMessage(goodbye=pb.Goodbye()))
            self._finishing = True
            self._silent_at = self._clock.now() + _FINISH_TIMEOUT_S
            self._load_at = math.inf
            self._wake()

    def on_message(self, message: pb.RouterMessage) -> None:
        """What has come over the stream."""
        if self.over or self._finishing:
            return
        self._silent_at = self._clock.now() + self._timeout_s
        if self.router:
            try:
                self._events.on_message(self, message)
            except PdserveError as error:
                self._break(f"router sends what makes no sense: {error}")
        elif message.HasField("welcome"):
            self._open(message.welcome)
        else:
            self._break("router begins without a welcome")

    def next_deadline(self) -> float:
        """When `tick` has something to do."""
        return min(self._silent_at, self._load_at)

    def tick(self) -> None:
        now = self._clock.now()
        if self.over:
            return
        if now >= self._silent_at:
            self._break("router is silent")
        elif now >= self._load_at:
            self._load_at = now + self._load_interval_s
            self.send(pb.WorkerMessage(load=convert.load_to_proto(self._events.load)))

    def ended(self) -> None:
        """The stream is gone."""
        self.over = True
        if self.router:
            _log.info("session left" if self._finishing else "session broken", router=self.router)
            self._events.session_ended(self)

    def _open(self, welcome: pb.Welcome) -> None:
        self.router = welcome.router
        self._timeout_s = welcome.timeout_ms / 1000
        self._silent_at = self._clock.now() + self._timeout_s
        self._load_interval_s = welcome.renew_interval_ms / 1000
        _log.info("session open", router=self.router)
        self._events.session_opened(self)
        self._load_at = self._clock.now()
        self.tick()

    def _break(self, problem: str) -> None:
        _log.warning(problem, router=self.router, unsent=self.unsent)
        self.over = True
        self._wake()
