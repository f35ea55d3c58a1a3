"""The seeded network: how long things take between two hosts, and what is lost, doubled or damaged on the KV wire.

Two kinds of connection use it. A `Wire` is a TCP connection: ordered, whole, but it may stall, break, or end with its
process. The KV network carries single messages, which may be lost, doubled, damaged and late, each on its own.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvtransfer.transports.base import Event, Message, Part, Peer, fresh_buffer
from simulation.timeline import Process, Timeline

_NOTICE_S = (0.001, 0.05, 0.6)


@dataclass(frozen=True, slots=True)
class Conditions:
    """`delay_s`: the usual range between two hosts. The others are chances for each message of the KV wire; one that is
    `late` takes up to `late_s` more, so later ones overtake it. `max_unsent`: how many messages wait for a peer of a
    session before that one counts as too slow."""

    delay_s: tuple[float, float] = (0.0002, 0.001)
    lost: float = 0.0
    doubled: float = 0.0
    damaged: float = 0.0
    late: float = 0.0
    late_s: float = 0.1
    max_unsent: int = 10_000

    def healed(self) -> Conditions:
        return Conditions(delay_s=self.delay_s)


class Fabric:
    """What all connections have in common: the state of the paths between hosts."""

    def __init__(self, timeline: Timeline, rng: random.Random, conditions: Conditions) -> None:
        self.timeline = timeline
        self.rng = rng
        self.conditions = conditions
        self._parted_until: dict[frozenset[str], float] = {}
        self._slow_until: dict[frozenset[str], tuple[float, float]] = {}

    def part(self, one: str, other: str, duration_s: float) -> None:
        """Nothing passes between these hosts for a while. Nobody is told."""
        self._parted_until[frozenset((one, other))] = self.timeline.now() + duration_s

    def slow(self, one: str, other: str, extra_s: float, duration_s: float) -> None:
        """Everything between these hosts takes up to `extra_s` longer for a while."""
        self._slow_until[frozenset((one, other))] = self.timeline.now() + duration_s, extra_s

    def parted_until(self, one: str, other: str) -> float:
        """When the path is open again; the past if it is."""
        return self._parted_until.get(frozenset((one, other)), 0.0)

    def delay(self, one: str, other: str) -> float:
        until, extra_s = self._slow_until.get(frozenset((one, other)), (0.0, 0.0))
        more_s = self.rng.uniform(0.0, extra_s) if self.timeline.now() < until else 0.0
        return self.rng.uniform(*self.conditions.delay_s) + more_s


class Wire:
    """A TCP connection between two processes. `on_closed(process)` is called at an end when it learns of the end."""

    def __init__(self, fabric: Fabric, one: Process, other: Process, on_closed: Callable[[Process], None]) -> None:
        self._fabric = fabric
        self._ends = (one, other)
        self._on_closed = on_closed
        self._arrival = {one: 0.0, other: 0.0}
        self._closed: set[Process] = set()  # ends that have closed it or know that it is closed
        self._lost = False
        self.unread = {one: 0, other: 0}
        self.on_delivered: Callable[[Process], None] = lambda sender: None  # there is room for another message of it
        for end in self._ends:
            end.wires.append(self)

    def send(self, sender: Process, label: str, deliver: Callable[[], None], detail: object = None) -> None:
        """Have `deliver` called at the other end, after everything sent before; never if the connection ends first."""
        if sender not in self._closed:
            self.unread[self._peer(sender)] += 1
            self._arrive(self._peer(sender), label, lambda: self._deliver(self._peer(sender), deliver), detail)

    def close(self, closer: Process) -> None:
        """End it from this side: what was sent before still arrives, what comes is not read."""
        if closer not in self._closed:
            self._closed.add(closer)
            closer.wires.remove(self)
            self._arrive(self._peer(closer), "connection ends", lambda: self._end(self._peer(closer)))

    def joins(self, host: str) -> bool:
        """Whether one of its ends is there."""
        return any(end.host == host for end in self._ends)

    def break_(self) -> None:
        """A reset: both ends learn of it, each in its own time, and what is on its way is lost."""
        self._lost = True
        for end in self._ends:
            notice_s = self._fabric.rng.choice(_NOTICE_S)
            self._fabric.timeline.after(notice_s, "connection reset", lambda end=end: self._end(end), end)

    def lose(self) -> None:
        """Nothing that is on its way arrives any more."""
        self._lost = True

    def _peer(self, end: Process) -> Process:
        return self._ends[1] if end is self._ends[0] else self._ends[0]

    def _arrive(self, end: Process, label: str, call: Callable[[], None], detail: object = None) -> None:
        sender = self._peer(end)
        start = max(self._fabric.timeline.now(), self._fabric.parted_until(sender.host, end.host))
        self._arrival[end] = max(self._arrival[end], start + self._fabric.delay(sender.host, end.host))
        self._fabric.timeline.at(self._arrival[end], label, call, end, detail)

    def _deliver(self, end: Process, deliver: Callable[[], None]) -> None:
        self.unread[end] -= 1
        if end not in self._closed and not self._lost:
            deliver()
        self.on_delivered(self._peer(end))

    def _end(self, end: Process) -> None:
        if end not in self._closed:
            self._closed.add(end)
            end.wires.remove(self)
            self._on_closed(end)


class Death(StrEnum):
    """What others learn of a process that dies."""

    CLEAN = "clean"  # its machine closes its connections, after all it had sent
    LOSSY = "lossy"  # and what it had sent is lost
    SILENT = "silent"  # nothing: its machine is gone


def kill(process: Process, death: Death) -> None:
    """As SIGKILL."""
    process.kill()
    for wire in list(process.wires):
        if death is not Death.CLEAN:
            wire.lose()
        if death is not Death.SILENT:
            wire.close(process)


class KvNetwork:
    """The KV wire between workers. Endpoints are named after incarnations, so a dead worker's is never heard again."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._transports: dict[str, SimulatedTransport] = {}
        self.died_at: dict[str, float] = {}  # by endpoint

    def transport(self, process: Process, wake: Callable[[], None]) -> SimulatedTransport:
        transport = SimulatedTransport(self, process, wake)
        self._transports[transport.endpoint] = transport
        return transport

    def remove(self, endpoint: str) -> None:
        self.died_at[endpoint] = self._fabric.timeline.now()
        self._transports.pop(endpoint, None)

    def carry(self, sender: Process, endpoint: str, message: Message) -> None:
        receiver = self._transports.get(endpoint)
        fabric, rng, conditions = self._fabric, self._fabric.rng, self._fabric.conditions
        if receiver is None:
            return
        for _ in range(2 if rng.random() < conditions.doubled else 1):
            now, host = fabric.timeline.now(), receiver.process.host
            if rng.random() < conditions.lost or now < fabric.parted_until(sender.host, host):
                continue
            delay_s = fabric.delay(sender.host, host)
            if rng.random() < conditions.late:
                delay_s += rng.uniform(0.0, conditions.late_s)
            arriving = self._damaged(message) if rng.random() < conditions.damaged else message
            receiver.process.after(
                delay_s, "frame", lambda arriving=arriving: self._arrive(receiver, arriving), arriving
            )

    def _arrive(self, receiver: SimulatedTransport, message: Message) -> None:
        receiver.arrived.append(message)
        receiver.wake()

    def _damaged(self, message: Message) -> Message:
        rng = self._fabric.rng
        parts = [bytearray(part) for part in message.parts]
        part = parts[rng.randrange(len(parts))]
        if part:
            part[rng.randrange(len(part))] ^= 1 << rng.randrange(8)
        return Message(message.peer, [bytes(part) for part in parts])


class SimulatedTransport:
    """A Transport that never waits. A peer is the other's endpoint, after ">" for one connected to and "<" for one who
    connected to us."""

    def __init__(self, network: KvNetwork, process: Process, wake: Callable[[], None]) -> None:
        self.endpoint = f"simulated://{process.name}"
        self.process = process
        self.wake = wake
        self.arrived: deque[Message] = deque()
        self._network = network

    def connect(self, endpoint: str) -> Peer:
        return b">" + endpoint.encode()

    def disconnect(self, peer: Peer) -> None:
        pass

    def buffer(self, peer: Peer, byte_count: int) -> memoryview:
        return fresh_buffer(byte_count)

    def send(self, peer: Peer, parts: Sequence[Part]) -> None:
        direction = b"<" if peer[:1] == b">" else b">"
        message = Message(direction + self.endpoint.encode(), [bytes(part) for part in parts])
        self._network.carry(self.process, peer[1:].decode(), message)

    def receive(self, timeout_s: float) -> list[Event]:
        events: list[Event] = list(self.arrived)
        self.arrived.clear()
        return events

    def close(self) -> None:
        self._network.remove(self.endpoint)
