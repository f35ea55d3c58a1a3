"""One start of a simulated worker: the real engine, link and services, composed as a worker composes them.

What three threads do in a real one happens here in turns: the engine steps, the link turns, sessions bring commands.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, replace
from functools import partial

from decode_worker.service import DecodeService
from kvtransfer.ladder import Ladder, LadderLimits
from kvtransfer.link import Link
from pdserve.config import EngineConfig, TransferConfig
from pdserve.errors import PdserveError
from pdserve.logs import logger
from pdserve.rpc import cluster_pb2 as pb
from pdserve.rpc import convert
from pdserve.rpc.worker_messages import Reports
from pdserve.tracing import Trace
from pdserve.types import Load, Owner, Role, SamplingParams, Ticket, WorkerInfo
from prefill_worker.service import PrefillService
from simulation import fences
from simulation.executor import LAYOUT, Poisoned, SimulatedEngine
from simulation.network import Death, Fabric, KvNetwork, kill
from simulation.oracle import EOS, Oracle, Violation
from simulation.sessions import RECONNECT_S, RouterSide, WorkerEnd
from simulation.timeline import Process

_TURN_S = 0.0001  # how long the link's thread takes to wake up
_SHORTEST_WAIT_S = 0.001
_STALLED_WAIT_S = 0.05


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """How one worker is made. `step_s`: the range of a step's duration. `colour`: which of two kinds it is of."""

    worker_id: str
    role: Role
    block_count: int
    step_s: tuple[float, float]
    colour: int = 0


class SimulatedWorker:
    """A worker process. Its `handler` is itself: what a router asks of a worker."""

    def __init__(
        self,
        plan: WorkerPlan,
        incarnation: str,
        fabric: Fabric,
        network: KvNetwork,
        oracle: Oracle,
        engine_config: EngineConfig,
        transfer_config: TransferConfig,
        routers: Mapping[str, RouterSide],
        counts: Counter[str],
    ) -> None:
        self.process = Process(fabric.timeline, plan.worker_id, incarnation)
        self.plan = plan
        self.max_queued = engine_config.max_queued
        self.counts = counts
        self._fabric = fabric
        self._rng = random.Random(f"{incarnation}/{fabric.rng.random()}")
        self._routers = routers
        self._sessions: dict[str, WorkerEnd] = {}
        self.started: Counter[tuple[str, Owner]] = Counter()
        self.ended: Counter[tuple[str, Owner]] = Counter()
        self.engine = SimulatedEngine(oracle, engine_config, plan.block_count, self._between_layers, plan.colour)
        self.transport = network.transport(self.process, self._wake_link)
        self.link = Link(
            self.transport,
            LAYOUT,
            b"tags",
            transfer_config,
            fabric.timeline,
            Trace(capacity=1),
            logger("kv"),
            max_transfers=engine_config.max_queued,
            random_bytes=self._rng.randbytes,
        )
        fences.watch(self.link._exchange)
        ladder = Ladder(LadderLimits.from_config(transfer_config))
        self.prefill = PrefillService(
            self.engine,
            self.link,
            Reports(partial(self._report, "prefill")),
            Trace(capacity=1),
            self.max_queued,
            transfer_config.mode,
        )
        decode_reports = Reports(partial(self._report, "decode"))
        self.decode = DecodeService(
            self.engine, self.link, decode_reports, ladder, fabric.timeline, max_queued=self.max_queued
        )
        self.draining = False
        self.on_poisoned: Callable[[], None] = lambda: None
        self._drain_notes = 0
        self._load = self.engine.load()
        self.engine.add_after_step(self._after_step)
        self._engine_busy = False
        self._link_due_at: float | None = None
        self._link_wait_s = 0.0
        self.info = WorkerInfo(
            worker_id=plan.worker_id,
            incarnation=incarnation,
            role=plan.role,
            pid=1,
            host=plan.worker_id,
            kv_endpoint=self.link.endpoint,
            fingerprint=f"kind {plan.colour}",
            model="tags",
            limits=self.engine.limits,
            eos_token_ids=(EOS,),
        )
        self.link.accept()
        self._plan_link_turn()
        for address in routers:
            self._connect(address)

    @property
    def load(self) -> Load:
        return replace(self._load, draining=self.draining)

    @property
    def handler(self) -> SimulatedWorker:
        return self

    # What the routers ask.

    def start_decode(
        self,
        owner: Owner,
        prompt_ids: ListLike[int],
        output_ids: ListLike[int],
        params: SamplingParams,
        local_prefill: bool,
        share: Owner | None,
    ) -> None:
        self.started["decode", owner] += 1
        self.decode.start(owner, prompt_ids, output_ids, params, local_prefill, share)

    def start_prefill(
        self,
        owner: Owner,
        prompt_ids: ListLike[int],
        output_ids: ListLike[int],
        params: SamplingParams,
        ticket: Ticket,
    ) -> None:
        self.started["prefill", owner] += 1
        self.counts["another sender"] += ticket.epoch > 1
        self.prefill.start(owner, prompt_ids, output_ids, params, ticket)

    def sender_lost(self, owner: Owner, epoch: int, error: PdserveError) -> None:
        self.decode.sender_lost(owner, epoch, error)

    def prefill_locally(self, owner: Owner) -> None:
        self.decode.prefill_locally(owner)

    def abort(self, owner: Owner) -> None:
        self.prefill.abort(owner)
        self.decode.abort(owner)

    def drain_noted(self) -> None:
        self._drain_notes += 1

    def drain(self, cancel: bool) -> None:
        self.draining = not cancel
        self._drain_notes = 0

    @property
    def drained(self) -> bool:
        """Every router knows that it drains, and nothing is left here."""
        return self._drain_notes >= len(self._sessions) and not self.prefill.owners() and not self.decode.owners()

    def router_lost(self, router: str) -> None:
        for owner in [*self.prefill.owners(), *self.decode.owners()]:
            if owner.router == router:
                self.abort(owner)

    # Sessions.

    def _connect(self, address: str) -> None:
        router = self._routers.get(address)
        if router is None or not router.process.alive:
            self.process.after(RECONNECT_S, "timer", lambda: self._connect(address))
            return
        WorkerEnd(self._fabric, self, router, address)

    def session_opened(self, router: str, session: WorkerEnd) -> None:
        self._sessions[router] = session

    def session_ended(self, router: str | None, session: WorkerEnd) -> None:
        if router is not None:
            if self._sessions.get(router) is session:
                del self._sessions[router]
            self.router_lost(router)
        self.process.after(RECONNECT_S, "timer", lambda: self._connect(session.address))

    def _report(self, service: str, router: str, message: pb.WorkerMessage) -> None:
        kind = message.WhichOneof("message")
        if kind == "terminal":
            self._note_end(service, message.terminal)
        elif kind == "local_prefill":
            self.counts["preempted import" if message.local_prefill.reason == "preempted" else "local prefill"] += 1
        session = self._sessions.get(router)
        if session is not None:
            session.send(message)

    def _note_end(self, service: str, terminal: pb.Terminal) -> None:
        owner = convert.owner_from_proto(terminal.owner)
        self.ended[service, owner] += 1
        if self.ended[service, owner] > self.started[service, owner]:
            raise Violation(f"{service} at {self.process.name} ended {owner} more often than it was started")

    # The engine's thread.

    def look_for_work(self) -> None:
        """Whatever has just happened: the engine's thread wakes up for a command."""
        if not self._engine_busy and self.engine.has_commands:
            self._engine_busy = True
            self.process.after(_TURN_S, "engine", self._step)

    def _step(self) -> None:
        try:
            self._engine_busy = self.engine.step()
        except Poisoned:
            self.on_poisoned()
            return
        if self._engine_busy:
            self.process.after(self._rng.uniform(*self.plan.step_s), "engine", self._step)
        elif self.engine.has_waiting:
            self._engine_busy = True
            self.process.after(_STALLED_WAIT_S, "timer", self._step)

    def _after_step(self) -> None:
        self._load = self.engine.load()
        if self.engine.idle():
            self.engine.check_integrity()

    def _between_layers(self) -> None:
        """The link's thread does not wait for a step to end."""
        if self._rng.random() < 0.3:
            self._link_turn()

    # The link's thread.

    def _wake_link(self) -> None:
        self._plan_link_turn(self._fabric.timeline.now() + _TURN_S)

    def _plan_link_turn(self, due_at: float | None = None) -> None:
        """Turn then, or when the link wants to at the latest."""
        now = self._fabric.timeline.now()
        if due_at is None:
            self._link_wait_s = max(self.link.wait_s(), _SHORTEST_WAIT_S)
        wanted_at = now + self._link_wait_s if due_at is None else due_at
        if self._link_due_at is not None and self._link_due_at <= wanted_at:
            return
        self._link_due_at = wanted_at
        self.process.at(wanted_at, "timer" if due_at is None else "link", partial(self._link_turn_due, wanted_at))

    def _link_turn_due(self, due_at: float) -> None:
        if due_at == self._link_due_at:
            self._link_turn()

    def _link_turn(self) -> None:
        self._link_due_at = None
        self.link.turn(self._link_wait_s)
        self._plan_link_turn()
        self.look_for_work()

    # Ends.

    def kill(self, death: Death) -> None:
        kill(self.process, death)
        self.transport.close()
        self.note_counts()

    def note_counts(self) -> None:
        """Add what this start of the worker met to the run's counts."""
        stats = self.link.stats()
        self.counts.update(
            {
                "preemption": self.engine.preemptions,
                "prompt shared": self.engine.prompts_shared,
                "frame sent again": stats.frames_resent,
                "frame refused": stats.frames_refused,
                "damaged payload": stats.checksum_failures,
                "transfer failed": stats.transfers_failed,
            }
        )

    def at_rest(self) -> list[str]:
        """What is still held or under way; nothing, when all is quiet."""
        exchange, stats = self.link._exchange, self.link.stats()
        held = {
            "blocks leased": self.engine.load().blocks.leased,
            "sequences": 0 if self.engine.idle() else 1,
            "exports": len(self.prefill.owners()),
            "imports": len(self.decode.owners()),
            "places of outgoing transfers": stats.outgoing,
            "places of incoming transfers": stats.incoming,
            "outgoing transfers": len(exchange._outgoing),
            "incoming transfers": len(exchange._incoming),
            "lingering transfers": len(exchange._lingering),
            "connections in use": sum(connection.users > 0 for connection in exchange._connections.values()),
            "starts without an end": (self.started - self.ended).total(),
        }
        return [f"{self.process.name}: {count} {what}" for what, count in held.items() if count]
