"""A worker: one engine, one link, both services, its sessions. A plain object that runs without Ray.

Threads: the engine's steps, the link's transfers, the sessions' streams. Both services are always there; the role only
says what the worker offers itself for, so that changing it changes no process.

    loading ──start──► serving ──drain──► draining ──stop──► stopped
                          ▲──drain cancelled──┘
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Sequence as ListLike
from dataclasses import replace
from pathlib import Path

from decode_worker.service import DecodeService
from deploy.spec import WorkerSpec
from drills import faulty_wire
from engine.engine import SWITCH_INTERVAL_S
from kvtransfer.ladder import Ladder, LadderLimits
from kvtransfer.layout import KVLayout
from kvtransfer.link import Link
from kvtransfer.transports.assembly import worker_transport
from model.build import build_engine
from pdserve import crash_report, logs
from pdserve.clock import SystemClock
from pdserve.errors import PdserveError
from pdserve.tracing import Trace, TraceEvent
from pdserve.types import Load, Owner, SamplingParams, Ticket, WorkerInfo
from prefill_worker.service import PrefillService
from worker.session import WorkerSessions

_log = logs.logger("worker")

_IDLE_WAIT_S = 0.05
_DRAIN_LOOK_S = 0.05
_FLUSH_TIMEOUT_S = 1.0
_NOTED_TIMEOUT_S = 2.0


class Worker:
    """Serves the routers it is told of until it is stopped."""

    def __init__(self, spec: WorkerSpec) -> None:
        """Loads the model: seconds. Raises ConfigError where model and settings do not fit."""
        config = spec.config
        self._trace = Trace()
        model = config.model
        built = build_engine(
            Path(spec.model_directory), model.kernels, model.dtype, config.engine, cpu_path=model.cpu_path
        )
        self._engine = built.engine
        self.load = self._engine.load()
        self._engine.add_after_step(self._after_step)
        incarnation = f"{spec.worker_id}-{secrets.token_hex(6)}"
        sockets, log = Path(spec.kv_socket_directory), logs.logger("kv")
        transport = worker_transport(config.transfer, incarnation, sockets, spec.kv_key, SystemClock(), log)
        if faults_file := os.environ.get(faulty_wire.VARIABLE):  # only a build under test is started with it
            transport = faulty_wire.SwitchedFaults(transport, Path(faults_file), SystemClock())
        shape = self._engine.store.shape
        layout = KVLayout(shape.layer_count, shape.kv_heads, shape.head_dim, built.dtype)
        self._link = Link(
            transport,
            layout,
            bytes.fromhex(built.weights),
            config.transfer,
            SystemClock(),
            self._trace,
            log,
            max_transfers=config.engine.max_queued,
        )
        self.info = WorkerInfo(
            worker_id=spec.worker_id,
            incarnation=incarnation,
            role=spec.role,
            pid=os.getpid(),
            host=socket.gethostname(),
            kv_endpoint=self._link.endpoint,
            fingerprint=built.fingerprint,
            model=spec.model_name,
            limits=self._engine.limits,
            eos_token_ids=self._engine.decoder.config.eos_token_ids,
            crash_report=str(crash_report.path_for(Path(spec.log_path).parent, incarnation)),
        )
        self._draining = False
        self._drain_notes = 0  # routers that know of it
        self._sessions = WorkerSessions(spec.router_addresses, self.info, self, self._current_load)
        max_queued = config.engine.max_queued
        reports, mode = self._sessions.reports, config.transfer.mode
        self._prefill = PrefillService(self._engine, self._link, reports, self._trace, max_queued, mode)
        ladder = Ladder(LadderLimits.from_config(config.transfer))
        self._decode = DecodeService(self._engine, self._link, reports, ladder, SystemClock(), max_queued)
        self._stopping = threading.Event()
        self._engine_thread = threading.Thread(target=self._step_forever, name="engine", daemon=True)

    def start(self) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._link.start()
        self._engine_thread.start()
        self._sessions.start()
        _log.info("worker serves", worker=self.info.incarnation, role=self.info.role.value)

    def stop(self) -> None:
        """Break the sessions, end the threads, remove the socket. Bounded in time."""
        self._sessions.close()
        self._stopping.set()
        self._engine_thread.join(timeout=10.0)
        self._link.close()

    def drain_and_stop(self, timeout_s: float) -> None:
        """Take nothing new, finish what is here, send what is computed; then stop. What is left after `timeout_s` goes
        on at another worker."""
        self.drain(cancel=False)
        deadline = time.monotonic() + timeout_s
        # Before the routers know, something may be on its way here.
        noted = min(deadline, time.monotonic() + _NOTED_TIMEOUT_S)
        while self._drain_notes < self._sessions.open_count and time.monotonic() < noted:
            time.sleep(_DRAIN_LOOK_S)
        while not self.idle and time.monotonic() < deadline:
            time.sleep(_DRAIN_LOOK_S)
        self._sessions.flush(_FLUSH_TIMEOUT_S)
        _log.info("drained", worker=self.info.incarnation, left=len(self._owners()))
        self.stop()

    @property
    def idle(self) -> bool:
        """No request and no transfer is here."""
        return not self._owners()

    def _owners(self) -> list[Owner]:
        return [*self._prefill.owners(), *self._decode.owners()]

    def _current_load(self) -> Load:
        return replace(self.load, draining=self._draining)

    def trace_events(self, since_ns: int = 0) -> list[TraceEvent]:
        return self._trace.events(since_ns)

    # What the routers ask: the session thread.

    def start_decode(
        self,
        owner: Owner,
        prompt_ids: ListLike[int],
        output_ids: ListLike[int],
        params: SamplingParams,
        local_prefill: bool,
        share: Owner | None,
    ) -> None:
        self._decode.start(owner, prompt_ids, output_ids, params, local_prefill, share)

    def start_prefill(
        self,
        owner: Owner,
        prompt_ids: ListLike[int],
        output_ids: ListLike[int],
        params: SamplingParams,
        ticket: Ticket,
    ) -> None:
        self._prefill.start(owner, prompt_ids, output_ids, params, ticket)

    def sender_lost(self, owner: Owner, epoch: int, error: PdserveError) -> None:
        self._decode.sender_lost(owner, epoch, error)

    def prefill_locally(self, owner: Owner) -> None:
        self._decode.prefill_locally(owner)

    def abort(self, owner: Owner) -> None:
        self._prefill.abort(owner)
        self._decode.abort(owner)

    def drain_noted(self) -> None:
        self._drain_notes += 1

    def drain(self, cancel: bool) -> None:
        self._draining = not cancel
        self._drain_notes = 0
        _log.info("working on" if cancel else "draining", worker=self.info.incarnation)

    def router_lost(self, router: str) -> None:
        for owner in self._owners():
            if owner.router == router:
                self.abort(owner)

    # The engine's thread.

    def _step_forever(self) -> None:
        try:
            while not self._stopping.is_set():
                self._engine.step(wait_s=_IDLE_WAIT_S)
        except Exception:  # noqa: BLE001 - a worker whose engine is broken must not look alive
            _log.exception("engine thread died, leaving")
            os._exit(1)

    def _after_step(self) -> None:
        self.load = self._engine.load()
        if self._engine.idle():
            self._engine.check_integrity()
