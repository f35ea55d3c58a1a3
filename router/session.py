"""A router's end of the Session stream with one worker, as a state machine. No socket, no task: who carries messages is
`sessions.py` over gRPC, a simulation in memory.

    waiting for hello ──hello──► joined ──closed, full outbox, what must not come──► over ──stream ended──► ended
        └──another model or version, no hello in time───────────────────────────────►

Whoever carries it: takes messages while there are any; brings those that come; calls `tick` when `next_deadline` has
come; ends the stream when the session is `over`; and says when the stream has ended. It looks whenever `wake` is
called.

How a session ended decides whether a request on that worker may have crashed it, and here alone that is decided: not
where the worker said goodbye; else its crash report tells; and where nobody can read that, it may have.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from pdserve import logs
from pdserve.clock import Clock
from pdserve.errors import FailedPrecondition, PdserveError, ProtocolError
from pdserve.rpc import cluster_pb2 as pb
from pdserve.rpc import convert
from pdserve.rpc.outbox import MAX_UNSENT, Outbox
from pdserve.types import Finish, Load, Owner, SampledToken, Ticket, WorkerInfo

_log = logs.logger("router")

_HELLO_TIMEOUT_S: Final = 5.0


class WorkerSessionEvents(Protocol):
    """Who is told what comes over the sessions: the router's control."""

    def worker_joined(self, session: WorkerSession) -> None: ...

    def worker_left(self, session: WorkerSession, reason: str, crashed: bool) -> None: ...

    def renewed(self, worker: str, load: Load) -> None: ...

    def ticket(self, worker: str, owner: Owner, ticket: Ticket) -> None: ...

    def local_prefill(self, worker: str, owner: Owner, reason: str) -> None: ...

    def tokens(self, worker: str, owner: Owner, first_position: int, tokens: tuple[SampledToken, ...]) -> None: ...

    def terminal(self, worker: str, owner: Owner, outcome: Finish | PdserveError | None, epoch: int) -> None: ...


@dataclass(frozen=True, slots=True)
class SessionTerms:
    """What a router offers every worker. `router`: its incarnation; `model`: the only one it takes."""

    router: str
    model: str
    renew_interval_ms: int
    timeout_ms: int


class WorkerSession:
    """See the module's docstring. `problem`: why the stream must be refused or broken off, where it is the worker's."""

    info: WorkerInfo  # once it has joined

    def __init__(
        self,
        terms: SessionTerms,
        events: WorkerSessionEvents,
        clock: Clock,
        wake: Callable[[], None],
        max_unsent: int = MAX_UNSENT,
    ) -> None:
        self.over = False
        self.problem = ""
        self._terms = terms
        self._events = events
        self._clock = clock
        self._wake = wake
        self._outbox: Outbox[pb.RouterMessage] = Outbox(max_unsent)
        self._joined = False
        self._said_goodbye = False
        self._hello_by = clock.now() + _HELLO_TIMEOUT_S
        self._renew_at = math.inf

    @property
    def joined(self) -> bool:
        return self._joined

    @property
    def unsent(self) -> int:
        return len(self._outbox)

    def take(self) -> pb.RouterMessage | None:
        """The next message for the stream."""
        return None if self.over else self._outbox.take()

    def send(self, message: pb.RouterMessage) -> None:
        """Pass a message on, in order. A worker that reads too slowly loses the session."""
        if self.over:
            return
        if not self._outbox.put(message):
            self.over = True
        self._wake()

    def close(self) -> None:
        """Break the session from this side: nothing that comes is heard any more."""
        self.over = True
        self._wake()

    def on_message(self, message: pb.WorkerMessage) -> None:
        """What has come over the stream."""
        if self.over:
            return
        try:
            if self._joined:
                self._deliver(message)
            else:
                self._join(message)
        except PdserveError as error:
            self._break(str(error))

    def next_deadline(self) -> float:
        """When `tick` has something to do."""
        return self._renew_at if self._joined else self._hello_by

    def tick(self) -> None:
        now = self._clock.now()
        if self.over or now < self.next_deadline():
            return
        if not self._joined:
            self._break("no hello in time")
            return
        self._renew_at = now + self._terms.renew_interval_ms / 1000
        self.send(pb.RouterMessage(renew=pb.Renew()))

    def ended(self, crash_report: str | None) -> None:
        """The stream is gone. `crash_report`: what the worker's process left, as pdserve.crash_report reads it."""
        self.over = True
        if not self._joined:
            return
        if self.problem:
            self._events.worker_left(self, self.problem, crashed=False)
            return
        crashed = bool(crash_report) if self._said_goodbye else crash_report != ""
        end = "the worker ended its session" if self._said_goodbye else "its session broke"
        reason = f"{end}: {crash_report}" if crash_report else end
        self._events.worker_left(self, reason, crashed)

    def _join(self, message: pb.WorkerMessage) -> None:
        if not message.HasField("hello"):
            raise ProtocolError(f"the first message is {message.WhichOneof('message')}, not hello")
        info = convert.worker_from_hello(message.hello)
        if info.model != self._terms.model:
            raise FailedPrecondition(
                f"model: worker {info.worker_id} has {info.model!r}, this router {self._terms.model!r}"
            )
        self.info = info
        self._joined = True
        self._renew_at = self._clock.now() + self._terms.renew_interval_ms / 1000
        self.send(pb.RouterMessage(welcome=self._welcome()))
        self._events.worker_joined(self)

    def _welcome(self) -> pb.Welcome:
        return pb.Welcome(
            version=convert.SESSION_VERSION,
            router=self._terms.router,
            renew_interval_ms=self._terms.renew_interval_ms,
            timeout_ms=self._terms.timeout_ms,
        )

    def _deliver(self, message: pb.WorkerMessage) -> None:
        """Tell the router what a message says. Raises ProtocolError for one that should not come."""
        worker, events = self.info.incarnation, self._events
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
                outcome = convert.terminal_from_proto(message.terminal)
                events.terminal(worker, owner, outcome, message.terminal.epoch)
            case "goodbye":
                self._said_goodbye = True
            case unexpected:
                raise ProtocolError(f"unexpected message {unexpected} from {worker}")

    def _break(self, problem: str) -> None:
        _log.warning("session broken off" if self._joined else "worker refused", reason=problem)
        self.problem = problem
        self.over = True
        self._wake()
