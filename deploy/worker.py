"""A worker: one engine, one link, both services, its sessions. A plain object that runs without Ray.

Threads: the engine's steps, the link's transfers, the sessions' streams. Both services are always there; the role only
says what the worker offers itself for, so that changing it changes no process.

    loading ──start──► serving ──stop──► stopped
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Sequence as ListLike
from pathlib import Path

from decode_worker.service import DecodeService
from deploy.spec import WorkerSpec
from engine.build import build_engine
from kvtransfer.ladder import Ladder, LadderLimits
from kvtransfer.layout import KVLayout
from kvtransfer.link import Link
from kvtransfer.transports.zmq import ZmqTransport, ipc_endpoint
from pdserve import logs
from pdserve.clock import SystemClock
from pdserve.errors import PdserveError
from pdserve.rpc.worker_session import WorkerSessions
from pdserve.tracing import Trace, TraceEvent
from pdserve.types import Owner, SamplingParams, Ticket, WorkerInfo
from prefill_worker.service import PrefillService

_log = logs.logger("worker")

_IDLE_WAIT_S = 0.05


class Worker:
    """Serves the routers it is told of until it is stopped."""

    def __init__(self, spec: WorkerSpec) -> None:
        """Loads the model: seconds. Raises ConfigError where model and settings do not fit."""
        config = spec.config
        self._trace = Trace()
        built = build_engine(Path(spec.model_directory), config.model.kernels, config.model.dtype, config.engine)
        self._engine = built.engine
        self.load = self._engine.load()
        self._engine.add_after_step(self._after_step)
        incarnation = f"{spec.worker_id}-{secrets.token_hex(6)}"
        endpoint = ipc_endpoint(Path(spec.kv_socket_directory), incarnation)
        transport = ZmqTransport(endpoint, incarnation.encode())
        shape = self._engine.store.shape
        layout = KVLayout(shape.layer_count, shape.kv_heads, shape.head_dim, built.dtype)
        self._link = Link(
            transport,
            layout,
            bytes.fromhex(built.weights),
            config.transfer,
            SystemClock(),
            self._trace,
            logs.logger("kv"),
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
        )
        self._sessions = WorkerSessions(spec.router_addresses, self.info, self, lambda: self.load)
        max_queued = config.engine.max_queued
        self._prefill = PrefillService(self._engine, self._link, self._sessions.reports, self._trace, max_queued)
        ladder = Ladder(LadderLimits.from_config(config.transfer))
        reports = self._sessions.reports
        self._decode = DecodeService(self._engine, self._link, reports, ladder, SystemClock(), max_queued)
        self._stopping = threading.Event()
        self._engine_thread = threading.Thread(target=self._step_forever, name="engine", daemon=True)

    def start(self) -> None:
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
    ) -> None:
        self._decode.start(owner, prompt_ids, output_ids, params, local_prefill)

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

    def router_lost(self, router: str) -> None:
        for owner in [*self._prefill.owners(), *self._decode.owners()]:
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
