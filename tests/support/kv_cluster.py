"""Prefill and decode workers with their real controls and links, and what a router does for them, on the simulation's
clock. Engines and network are simulated; one thread; a seed replays.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kvtransfer.link import Link
from kvtransfer.transports.faulty import FaultyTransport
from pdserve.clock import ManualClock
from pdserve.config import TransferConfig
from pdserve.errors import PdserveError, TransferError
from pdserve.kv_format import KVFormat
from pdserve.logs import logger
from pdserve.rpc import cluster_pb2 as pb
from pdserve.rpc import convert
from pdserve.tracing import Trace
from pdserve.types import Finish, Owner, SampledToken, SamplingParams, Ticket
from support import commands
from support.controls import TestedControl
from support.kv_engine import SimulatedEngine
from support.kv_simulation import NetworkFaults, Simulation, earliest, wait_until
from support.kv_store import FakeStore

LAYOUT = KVFormat(layer_count=2, kv_heads=1, head_dim=8, item="bfloat16")  # 32 bytes a token and layer
CONFIG = TransferConfig(
    window_bytes=1024,
    max_frame_bytes=300,
    ticket_ttl_ms=2_000,
    ping_interval_ms=250,
    deadline_ms=600_000,  # so long that a deadlock shows
    renewal_cooldown_ms=3_000,
)
PARAMS = SamplingParams(max_tokens=1)
TOKEN = SampledToken(5, -0.25, ((5, -0.25),))
POOL_TOKENS = 160  # two or three prompts


@dataclass(eq=False)
class Request:
    """A request and all that became of it. `prefill`: whoever has its ticket now, by the router's books."""

    owner: Owner
    token_ids: list[int]
    truth: FakeStore
    decode: SimulatedNode
    prefill: SimulatedNode | None = None
    epoch: int = 0
    aborted: bool = False
    tokens: list[SampledToken] = field(default_factory=list)
    outcomes: list[Finish | PdserveError | None] = field(default_factory=list)


class SteppedLink(Link):
    """A link whose turns somebody else takes, instead of a thread."""

    _wait_s = math.inf

    def start(self) -> None:
        self._accepting = True

    def step(self, clock: ManualClock) -> None:
        self.turn(self._wait_s)
        self._wait_s = wait_until(self.next_time(), clock)

    def next_time(self) -> float | None:
        return self._clock.now() if self._inbox else self._exchange.next_deadline()


class SimulatedNode:
    """A worker. The router hears what it reports after a delay, as over a session."""

    def __init__(self, cluster: SimulatedCluster, name: str) -> None:
        simulation = cluster.simulation
        faults, seed = simulation.network.faults, cluster.rng.getrandbits(32)
        self.name = name
        self.alive = True
        self._cluster = cluster
        self.transport = FaultyTransport(simulation.network.transport(name), faults.rules(), seed, simulation.clock)
        self.engine = SimulatedEngine(LAYOUT, POOL_TOKENS, cluster.rng, self.later, cluster.truth, TOKEN)
        trace, log = Trace(capacity=16), logger(f"simulated.{name}")
        self.link = SteppedLink(self.transport, LAYOUT, b"model", CONFIG, simulation.clock, trace, log)
        self.link.start()
        tested = TestedControl(
            self.engine,
            self.link,
            LAYOUT.layer_count,
            partial(cluster.on_message, self),
            turns=self,
            config=CONFIG,
            trace=trace,
            clock=simulation.clock,
        )
        self.control, self.tell = tested.control, tested.tell
        self.engine.listener = self.control

    def turn(self) -> None:
        if self.alive:
            self.link.step(self._cluster.simulation.clock)

    def next_time(self) -> float | None:
        return earliest(self.link.next_time(), self.transport.next_due())

    def post(self, call: Callable[[], None]) -> None:
        self.later(0.0, call)

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call, unless the worker is dead by then."""

        def still_alive() -> None:
            if self.alive:
                call()

        self._cluster.simulation.call_soon(delay_s, still_alive)

    def kill(self) -> None:
        """As SIGKILL."""
        self.alive = False
        self.transport.close()


class SimulatedCluster:
    """The workers and the router's part: places tickets, tells of the dead, passes aborts on.

    The router learns of a death late, and of some never.
    """

    def __init__(self, seed: int, faults: NetworkFaults, prefill: int, decode: int) -> None:
        self.simulation = Simulation(seed, faults, CONFIG)
        self.rng: random.Random = self.simulation.rng
        self.requests: dict[Owner, Request] = {}
        self.rungs: Counter[str] = Counter()
        self.prefill = [self._node(f"prefill-{number}") for number in range(prefill)]
        self.decode = [self._node(f"decode-{number}") for number in range(decode)]
        self._members = list(self.prefill)

    @property
    def nodes(self) -> list[SimulatedNode]:
        return [*self.prefill, *self.decode]

    def truth(self, owner: Owner) -> FakeStore:
        return self.requests[owner].truth

    def request_at(self, time_s: float, token_count: int) -> Request:
        """A request that starts then, at one of the decode workers."""
        number = len(self.requests)
        owner = Owner("tenant", f"request-{number}", "router", 1)
        ids = [number] * token_count
        request = Request(owner, ids, FakeStore.random(LAYOUT, token_count, number), self.rng.choice(self.decode))
        self.requests[owner] = request
        start = partial(request.decode.tell, commands.start_decode(owner, ids, (), PARAMS))
        self.simulation.call_at(time_s, partial(request.decode.later, 0.0, start))
        return request

    def abort_at(self, time_s: float, request: Request) -> None:
        def abort() -> None:
            request.aborted = True
            for node in (request.decode, request.prefill):
                if node is not None:
                    node.later(self._delay_s(), partial(node.tell, commands.abort(request.owner)))

        self.simulation.call_at(time_s, abort)

    def kill_at(self, time_s: float, node: SimulatedNode) -> None:
        """The router hears of it in up to a second, or never."""

        def kill() -> None:
            node.kill()
            if self.rng.random() < 0.8:
                self.simulation.call_soon(self.rng.uniform(0.0, 1.0), partial(self._on_death, node))

        self.simulation.call_at(time_s, kill)

    def on_ticket(self, node: SimulatedNode, owner: Owner, ticket: Ticket) -> None:
        request = self.requests[owner]
        if request.aborted:
            return
        request.epoch = ticket.epoch
        self.rungs["another sender"] += ticket.epoch > 1
        chosen = request.prefill = self.rng.choice(self._members) if self._members else None
        if chosen is None:
            node.later(self._delay_s(), partial(node.tell, commands.prefill_locally(owner)))
        else:
            start = commands.start_prefill(owner, request.token_ids, (), PARAMS, ticket)
            chosen.later(self._delay_s(), partial(chosen.tell, start))

    def on_prefill_end(self, node: SimulatedNode, owner: Owner, outcome: Finish | PdserveError | None) -> None:
        request = self.requests[owner]
        assert not isinstance(outcome, Finish)
        if outcome is not None and request.prefill is node:
            self._sender_lost(request, outcome)

    def on_message(self, node: SimulatedNode, message: pb.WorkerMessage) -> None:
        """What a worker tells the router."""
        kind = message.WhichOneof("message")
        if kind == "tokens":
            for item in message.tokens.batch:
                tokens = [convert.token_from_proto(token) for token in item.tokens]
                self.requests[convert.owner_from_proto(item.owner)].tokens += tokens
            return
        owner = convert.owner_from_proto(getattr(message, kind or "").owner)
        if kind == "local_prefill":
            self.rungs["local"] += 1
        elif kind == "ticket":
            ticket = convert.ticket_from_proto(message.ticket)
            self.simulation.call_soon(self._delay_s(), partial(self.on_ticket, node, owner, ticket))
        else:
            outcome = convert.terminal_from_proto(message.terminal)
            if node is self.requests[owner].decode:
                self.requests[owner].outcomes.append(outcome)
            else:
                self.simulation.call_soon(self._delay_s(), partial(self.on_prefill_end, node, owner, outcome))

    def _on_death(self, node: SimulatedNode) -> None:
        if node in self._members:
            self._members.remove(node)
        for request in self.requests.values():
            if request.prefill is node:
                self._sender_lost(request, TransferError(f"{node.name} is gone"))
            if request.decode is node and request.prefill is not None:
                request.aborted = True
                prefill = request.prefill
                prefill.later(self._delay_s(), partial(prefill.tell, commands.abort(request.owner)))

    def _sender_lost(self, request: Request, error: PdserveError) -> None:
        node = request.decode
        node.later(self._delay_s(), partial(node.tell, commands.sender_lost(request.owner, request.epoch, error)))

    def _node(self, name: str) -> SimulatedNode:
        node = SimulatedNode(self, name)
        self.simulation.add(node)
        return node

    def _delay_s(self) -> float:
        return self.rng.uniform(0.0, 0.02)
