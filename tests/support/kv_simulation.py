"""Workers' exchanges on one virtual clock, over a network whose faults come from a seed.

One thread, no sockets: a failing seed replays exactly.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtransfer.exchange import Exchange
from kvtransfer.frames import Credit, FrameError, Layer, decode
from kvtransfer.stats import LinkStats
from kvtransfer.transports.base import Event, Message, Part, Peer, fresh_buffer
from kvtransfer.transports.faulty import Fault, FaultRule, FaultyTransport
from pdserve.clock import ManualClock
from pdserve.config import TransferConfig
from pdserve.logs import logger
from pdserve.tracing import Trace


@dataclass(frozen=True, slots=True)
class NetworkFaults:
    """Chances for each message, and the range of its delay in seconds: unequal delays reorder."""

    drop: float = 0.0
    double: float = 0.0
    corrupt: float = 0.0
    min_delay_s: float = 0.001
    max_delay_s: float = 0.001

    def rules(self) -> list[FaultRule]:
        """What is not delay."""
        rates = ((Fault.DROP, self.drop), (Fault.DUPLICATE, self.double), (Fault.CORRUPT, self.corrupt))
        return [FaultRule(fault, rate=rate) for fault, rate in rates if rate]


class SimulatedNetwork:
    """Carries messages in virtual time and watches that nobody sends beyond its credit."""

    def __init__(self, clock: ManualClock, rng: random.Random, faults: NetworkFaults) -> None:
        self.clock = clock
        self.rng = rng
        self.faults = faults
        self.overspent = 0
        self._granted: dict[tuple[bytes, int], int] = {}
        self._transports: dict[str, SimulatedTransport] = {}
        self._flying: list[tuple[float, int, str, Message]] = []
        self._count = 0

    def transport(self, name: str) -> SimulatedTransport:
        endpoint = f"simulated://{name}"
        self._transports[endpoint] = SimulatedTransport(self, endpoint)
        return self._transports[endpoint]

    def next_delivery(self) -> float | None:
        return self._flying[0][0] if self._flying else None

    def deliver_due(self) -> None:
        """Bring what is due to its transport; what goes to a closed one is lost."""
        while self._flying and self._flying[0][0] <= self.clock.now():
            _, _, endpoint, message = heapq.heappop(self._flying)
            if endpoint in self._transports:
                self._transports[endpoint].arrived.append(message)

    def remove(self, endpoint: str) -> None:
        self._transports.pop(endpoint, None)

    def carry(self, endpoint: str, message: Message) -> None:
        self._watch(message.parts)
        arrival = self.clock.now() + self.rng.uniform(self.faults.min_delay_s, self.faults.max_delay_s)
        self._count += 1
        heapq.heappush(self._flying, (arrival, self._count, endpoint, message))

    def _watch(self, parts: Sequence[Part]) -> None:
        try:
            frame = decode(parts).frame
        except FrameError:
            return
        key = frame.transfer, frame.epoch
        if isinstance(frame, Credit):
            self._granted[key] = max(self._granted.get(key, 0), frame.total)
        if isinstance(frame, Layer) and frame.spent > self._granted.get(key, 0):
            self.overspent += 1


class SimulatedTransport:
    """A Transport that never waits. Peers are named as in the memory transport."""

    def __init__(self, network: SimulatedNetwork, endpoint: str) -> None:
        self._network = network
        self.endpoint = endpoint
        self.arrived: deque[Message] = deque()
        self._closed = False

    def connect(self, endpoint: str) -> Peer:
        return b">" + endpoint.encode()

    def disconnect(self, peer: Peer) -> None:
        pass

    def buffer(self, peer: Peer, byte_count: int) -> memoryview:
        return fresh_buffer(byte_count)

    def send(self, peer: Peer, parts: Sequence[Part]) -> None:
        if self._closed:
            return  # the dead send nothing
        direction = b"<" if peer[:1] == b">" else b">"
        message = Message(direction + self.endpoint.encode(), [bytes(part) for part in parts])
        self._network.carry(peer[1:].decode(), message)

    def receive(self, timeout_s: float) -> list[Event]:
        events: list[Event] = list(self.arrived)
        self.arrived.clear()
        return events

    def wake(self) -> None:
        pass

    def close(self) -> None:
        self._closed = True
        self._network.remove(self.endpoint)


class Simulated(Protocol):
    """What a simulation runs: a worker, dead or alive."""

    alive: bool

    def turn(self) -> None:
        """Do what there is to do now."""
        ...

    def next_time(self) -> float | None:
        """When the next turn is due at the latest, but for what the network brings."""
        ...


def earliest(*times: float | None) -> float | None:
    """The first of those moments that ever come."""
    return min((time for time in times if time is not None and time != math.inf), default=None)


def wait_until(time: float | None, clock: ManualClock) -> float:
    """How long a turn may wait whose next one is due then at the latest."""
    return math.inf if time is None else max(time - clock.now(), 0.0)


class SimulatedWorker:
    """An exchange with its own transport and counts. While it is paused it does nothing; what it is told waits."""

    def __init__(self, network: SimulatedNetwork, name: str, config: TransferConfig) -> None:
        self._clock = network.clock
        self._wait_s = math.inf
        self._paused_until = -math.inf
        self._inbox: list[Callable[[], None]] = []
        seed = network.rng.getrandbits(32)
        self.transport = FaultyTransport(network.transport(name), network.faults.rules(), seed, network.clock)
        self.stats = LinkStats()
        self.alive = True
        self.exchange = Exchange(
            self.transport, config, network.clock, Trace(), logger(f"simulated.{name}"), self.stats
        )

    def turn(self) -> None:
        if not self.alive or self._paused:
            return
        events = self.transport.receive(0.0)
        self.exchange.listened(self._wait_s)
        inbox, self._inbox = self._inbox, []
        for command in inbox:
            command()
        for event in events:
            self.exchange.on_event(event)
        self.exchange.tick()
        self._wait_s = wait_until(self.next_time(), self._clock)

    def next_time(self) -> float | None:
        if self._paused:
            return self._paused_until
        return earliest(self.exchange.next_deadline(), self.transport.next_due())

    def command(self, call: Callable[[], None]) -> None:
        """What somebody else tells the exchange to do."""
        if self._paused:
            self._inbox.append(call)
        else:
            call()

    def pause(self, seconds: float) -> None:
        """Its thread, or its whole process, stands still for so long."""
        self._paused_until = self._clock.now() + seconds

    @property
    def _paused(self) -> bool:
        return self._clock.now() < self._paused_until

    def kill(self) -> None:
        """As SIGKILL: no callback, no farewell."""
        self.alive = False
        self.transport.close()


class Simulation:
    """Runs workers and scheduled calls until nothing is left to happen or the time is up."""

    def __init__(self, seed: int, faults: NetworkFaults, config: TransferConfig) -> None:
        self.clock = ManualClock()
        self.rng = random.Random(seed)
        self.config = config
        self.network = SimulatedNetwork(self.clock, self.rng, faults)
        self._workers: list[Simulated] = []
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def worker(self, name: str) -> SimulatedWorker:
        worker = SimulatedWorker(self.network, name, self.config)
        self.add(worker)
        return worker

    def add(self, worker: Simulated) -> None:
        self._workers.append(worker)

    def call_at(self, time_s: float, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._calls, (time_s, self._count, call))

    def call_soon(self, delay_s: float, call: Callable[[], None]) -> None:
        self.call_at(self.clock.now() + delay_s, call)

    def run(self, until_s: float) -> None:
        while True:
            for worker in self._workers:
                worker.turn()
            upcoming = self._next_time()
            if upcoming is None or upcoming > until_s:
                return
            self.clock.advance(max(0.0, upcoming - self.clock.now()))
            self.network.deliver_due()
            while self._calls and self._calls[0][0] <= self.clock.now():
                heapq.heappop(self._calls)[2]()

    def _next_time(self) -> float | None:
        times = [worker.next_time() for worker in self._workers if worker.alive]
        return earliest(*times, self.network.next_delivery(), self._calls[0][0] if self._calls else None)
