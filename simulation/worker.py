"""One start of a simulated worker: the product's control, sessions, engine and link, composed as in a process.

What the three threads of a real one do happens here in turns: the engine steps, the link turns, the control acts.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from engine.engine import Engine
from engine.events import EngineEvent, Preempted
from kvtransfer.link import Link
from pdserve.config import EngineConfig, TransferConfig
from pdserve.logs import logger
from pdserve.tracing import Trace
from pdserve.types import Load, Role, WorkerInfo
from simulation import fences
from simulation.executor import KV_FORMAT, LAYERS, Poisoned, TagExecutor
from simulation.network import Death, Fabric, KvNetwork, kill
from simulation.oracle import EOS, Oracle
from simulation.sessions import RouterSide, WorkerEnd
from simulation.timeline import Process
from simulation.turns import WorkerThreads
from worker.assembly import make_control
from worker.session import RECONNECT_S

_TURN_S = 0.0001  # how long a thread takes to wake up
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
    """A worker process. `reports`: whether a crash's report can be read. `on_poisoned`: what follows when it computes
    what crashes it."""

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
        reports: bool,
    ) -> None:
        self.process = Process(fabric.timeline, plan.worker_id, incarnation)
        self.plan = plan
        self.max_queued = engine_config.max_queued
        self.counts = counts
        self.crash_report: str | None = "" if reports else None
        self.on_poisoned: Callable[[], None] = lambda: None
        self._fabric = fabric
        self._rng = random.Random(f"{incarnation}/{fabric.rng.random()}")
        self._routers = routers
        self._ends: list[WorkerEnd] = []
        self._told_to_leave: list[Callable[[bool], None]] = []
        self._closing = False
        executor = TagExecutor(oracle, plan.block_count, engine_config.block_tokens, self._between_layers, plan.colour)
        self.executor = executor
        self.pool = executor.pool
        self.engine = Engine(
            executor, engine_config, max_model_len=executor.capacity.pool_tokens, listener=self, pool=executor.pool
        )
        self.transport = network.transport(self.process, self._wake_link)
        self.link = Link(
            self.transport,
            KV_FORMAT,
            b"tags",
            transfer_config,
            fabric.timeline,
            Trace(capacity=1),
            logger("kv"),
            max_transfers=self.max_queued,
            random_bytes=self._rng.randbytes,
        )
        fences.watch_epochs(self.link._exchange)
        self.threads = WorkerThreads(self.process)
        self.control = make_control(
            self.engine,
            self.link,
            self.threads,
            self,
            fabric.timeline,
            Trace(capacity=1),
            transfer_config,
            layer_count=LAYERS,
            max_queued=self.max_queued,
            load=self.engine.load(),
        )
        self.attempts = fences.watch_control(self.control, self.threads, incarnation, counts)
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

    # Its streams, and its end.

    def _connect(self, address: str) -> None:
        router = self._routers.get(address)
        if self._closing:
            return
        if router is None or not router.process.alive:
            self.process.after(RECONNECT_S, "timer", lambda: self._connect(address))
            return
        self._ends.append(WorkerEnd(self._fabric, self, router, address))

    def session_over(self, end: WorkerEnd) -> None:
        self._ends.remove(end)
        self._stop_if_closed()
        self.process.after(RECONNECT_S, "timer", lambda: self._connect(end.address))

    def operator(self, cancel: bool) -> None:
        """Somebody on its host has it drain, or serve again."""
        self.threads.post(lambda: self.control.drain(cancel))

    def leave(self, patience_s: float, gone: Callable[[bool], None]) -> None:
        """As SIGTERM. `gone`: it has ended, in order or by something else that was faster."""
        self._told_to_leave.append(gone)
        self.threads.post(lambda: self.control.leave(patience_s))

    def left(self, owners_left: int) -> None:
        """The control is done: the streams are closed in order, then the process ends."""
        self._closing = True
        for end in list(self._ends):
            end.session.finish()
        self.threads.post(self._stop_if_closed)

    def _stop_if_closed(self) -> None:
        if self._closing and not self._ends and self.process.alive:
            self._end(Death.CLEAN, in_order=True)

    def kill(self, death: Death) -> None:
        self._end(death, in_order=False)

    def _end(self, death: Death, in_order: bool) -> None:
        kill(self.process, death)
        self.transport.close()
        self.note_counts()
        for gone in self._told_to_leave:
            gone(in_order)
            in_order = False  # for who came later, the first one was faster

    # The engine's thread.

    def look_for_work(self) -> None:
        """Whatever has just happened: the engine's thread wakes up for a command."""
        if not self._engine_busy and self.engine.has_commands():
            self._engine_busy = True
            self.process.after(_TURN_S, "engine", self._step)

    def _step(self) -> None:
        try:
            self.threads.turn("engine", self._one_step)
        except Poisoned:
            self.crash_report = None if self.crash_report is None else "poisoned"
            self.on_poisoned()
            return
        if self._engine_busy:
            self.process.after(self._rng.uniform(*self.plan.step_s), "engine", self._step)
        elif self.engine.has_work():
            self._engine_busy = True
            self.process.after(_STALLED_WAIT_S, "timer", self._step)

    def _one_step(self) -> None:
        self._engine_busy = self.engine.step()

    def on_engine(self, events: tuple[EngineEvent, ...], load: Load) -> None:
        self.counts["preemption"] += sum(isinstance(event, Preempted) for event in events)
        self.control.on_engine(events, load)

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
        self.threads.turn("link", lambda: self.link.turn(self._link_wait_s))
        self._plan_link_turn()
        self.look_for_work()

    # What a run looks at.

    def note_counts(self) -> None:
        """Add what this start of the worker met to the run's counts."""
        stats = self.link.stats()
        self.counts.update(
            {
                "prompt shared": self.pool.prompts_shared,
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
            "attempts": len(self.control.owners),
            "places of outgoing transfers": stats.outgoing,
            "places of incoming transfers": stats.incoming,
            "outgoing transfers": len(exchange._outgoing),
            "incoming transfers": len(exchange._incoming),
            "lingering transfers": len(exchange._lingering),
            "connections in use": sum(connection.users > 0 for connection in exchange._connections.values()),
            "starts without an end": self.attempts.open,
        }
        return [f"{self.process.name}: {count} {what}" for what, count in held.items() if count]
