"""Session streams between simulated workers and routers: carry the messages of the product's two session machines.

What is said, and when a session is over, they decide; of this module is only how long it takes, and what is lost.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from pdserve.types import WorkerInfo
from router.control import Control as RouterControl
from router.session import SessionTerms, WorkerSession
from simulation.network import Fabric, Wire
from simulation.oracle import Violation
from simulation.timeline import Process
from simulation.turns import WorkerThreads
from worker.control import Control as WorkerControl
from worker.session import RouterSession

IDLE = frozenset({"load", "renew", "tick", "timer"})  # labels of what happens also where nothing is going on
_OUTBOX = 4  # of what the network has not taken: as many messages as it has, divided by this


class RouterSide(Protocol):
    """What a session needs of a router process."""

    process: Process
    control: RouterControl
    terms: SessionTerms


class WorkerSide(Protocol):
    """What a session needs of a worker process."""

    process: Process
    threads: WorkerThreads
    info: WorkerInfo
    control: WorkerControl
    counts: Counter[str]

    @property
    def crash_report(self) -> str | None: ...

    def session_over(self, end: WorkerEnd) -> None:
        """Its stream has ended."""
        ...


class Machine(Protocol):
    """What the two session machines have in common."""

    over: bool

    @property
    def unsent(self) -> int: ...

    def take(self) -> Any: ...

    def on_message(self, message: Any) -> None: ...

    def next_deadline(self) -> float: ...

    def tick(self) -> None: ...


class End:
    """Carries what one machine says to the other end. A session that is over ends in an event of its own."""

    session: Machine
    other: End

    def __init__(self, fabric: Fabric, wire: Wire, process: Process) -> None:
        self.process = process
        self.wire = wire
        self._fabric = fabric
        self._gone = False
        self._tick_at = math.inf

    def look(self) -> None:
        """As who carries a session looks whenever something may have changed."""
        if self._gone:
            return
        if self.session.over:
            self.process.after(0.0, "session over", self.end)
            return
        peer, room = self.other.process, self._fabric.conditions.max_unsent
        while self.wire.unread[peer] < room and (message := self.session.take()) is not None:
            self.wire.send(self.process, message.WhichOneof("message"), partial(self.other.hear, message), message)
        self._plan_tick()

    def hear(self, message: Any) -> None:
        if not self._gone:
            self._turn(partial(self.session.on_message, message))
            self.look()

    def end(self) -> None:
        """The stream has ended, or is ended from this side."""
        if not self._gone:
            self._gone = True
            self.wire.close(self.process)
            self._ended()

    def _plan_tick(self) -> None:
        due_at = self.session.next_deadline()
        if due_at < self._tick_at:
            self._tick_at = due_at
            self.process.at(due_at, "timer", partial(self._tick, due_at))

    def _tick(self, due_at: float) -> None:
        if due_at == self._tick_at and not self._gone:
            self._tick_at = math.inf
            self._turn(self.session.tick)
            self.look()

    def _turn(self, call: Callable[[], None]) -> None:
        """Call into what one thread of the process owns."""
        raise NotImplementedError

    def _ended(self) -> None:
        raise NotImplementedError


class WorkerEnd(End):
    """A worker's. `address`: the router's."""

    session: RouterSession

    def __init__(self, fabric: Fabric, worker: WorkerSide, router: RouterSide, address: str) -> None:
        super().__init__(fabric, Wire(fabric, worker.process, router.process, self._closed), worker.process)
        self.address = address
        self._worker = worker
        self._finished = False
        self.session = RouterSession(worker.info, worker.control, fabric.timeline, self.look, outbox_limit(fabric))
        self.other = self._router_end = RouterEnd(fabric, self, worker, router)
        self.wire.on_delivered = self._delivered
        self.look()
        self.other.look()

    def look(self) -> None:
        super().look()
        if self.session.said_all and not self._finished:
            self._finished = True
            self.wire.send(self.process, "session finished", self._router_end.finished)

    def _delivered(self, sender: Process) -> None:
        """A message was read: there is room for another one."""
        end = self if sender is self.process else self.other
        if end.session.unsent:
            sender.after(0.0, "timer", end.look)

    def _closed(self, at: Process) -> None:
        (self if at is self.process else self.other).end()

    def _turn(self, call: Callable[[], None]) -> None:
        self._worker.threads.control_turn(call)

    def _ended(self) -> None:
        self._worker.counts["outbox full"] += self.session.over and self.session.unsent > 0
        self._turn(self.session.ended)
        self._worker.session_over(self)


class RouterEnd(End):
    """A router's."""

    session: WorkerSession

    def __init__(self, fabric: Fabric, other: WorkerEnd, worker: WorkerSide, router: RouterSide) -> None:
        super().__init__(fabric, other.wire, router.process)
        self.other = other
        self._worker = worker
        self._control = router.control
        self.session = WorkerSession(router.terms, router.control, fabric.timeline, self.look, outbox_limit(fabric))

    def finished(self) -> None:
        """The worker has closed its side, in order: nobody may be suspected of a crash."""
        entries = self._control.dispatch._requests.values()
        suspicions = [(entry.suspicion, entry.suspicion.crashes) for entry in entries]
        self.end()
        if any(suspicion.crashes > crashes for suspicion, crashes in suspicions):
            raise Violation(f"{self._worker.process.name} left in order, and requests are suspected of a crash")

    def _turn(self, call: Callable[[], None]) -> None:
        call()

    def _ended(self) -> None:
        self.session.ended(self._worker.crash_report)


def outbox_limit(fabric: Fabric) -> int:
    """How many messages may wait beside those that the network has taken."""
    return max(1, fabric.conditions.max_unsent // _OUTBOX)
