"""A worker: one engine, one link, one control, its sessions. A plain object that runs without Ray.

Threads: the engine's steps, the link's transfers, and the control's, which has the sessions' streams on its event loop.
Both roles are always there; the role of the spec only says what the worker offers itself for, so that changing it
changes no process. Nothing here decides anything: that is control.py's business.

    loading ──start──► serving ──drain_and_stop──► stopped
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from engine.engine import SWITCH_INTERVAL_S, Engine
from engine.events import EngineEvent
from kvtransfer.link import Link
from kvtransfer.transports.assembly import worker_transport
from kvtransfer.transports.base import Transport
from model.build import build_model
from pdserve import crash_report, logs
from pdserve.clock import SystemClock
from pdserve.tracing import Trace, TraceEvent
from pdserve.types import Load, WorkerInfo
from worker.assembly import make_control
from worker.loop import ControlLoop
from worker.session import RouterSession
from worker.session_streams import SessionStreams
from worker.spec import WorkerSpec

_log = logs.logger("worker")

_IDLE_WAIT_S = 0.05
_CLOSE_TIMEOUT_S = 5.0
_LEAVE_MARGIN_S = 5.0


class Worker:
    """Serves the routers it is told of until it is stopped."""

    def __init__(self, spec: WorkerSpec) -> None:
        """Loads the model: seconds. Raises ConfigError where model and settings do not fit."""
        config, clock = spec.config, SystemClock()
        self._clock = clock
        self._trace = Trace()
        model = config.model
        built = build_model(
            Path(spec.model_directory), model.kernels, model.dtype, config.engine, cpu_path=model.cpu_path
        )
        self._engine = Engine(built.executor, config.engine, built.max_model_len, self)
        incarnation = f"{spec.worker_id}-{secrets.token_hex(6)}"
        max_queued, kv_format = config.engine.max_queued, built.executor.format
        self._link = Link(
            _transport(spec, incarnation),
            kv_format,
            bytes.fromhex(built.weights),
            config.transfer,
            clock,
            self._trace,
            logs.logger("kv"),
            max_transfers=max_queued,
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
            eos_token_ids=built.executor.capacity.eos_token_ids,
            crash_report=str(crash_report.path_for(Path(spec.log_path).parent, incarnation)),
        )
        self._loop = ControlLoop(broken=_leave_at_once)
        self._control = make_control(
            self._engine,
            self._link,
            self._loop,
            self,
            clock,
            self._trace,
            config.transfer,
            layer_count=kv_format.layer_count,
            max_queued=max_queued,
            load=self._engine.load(),
        )
        self._streams = SessionStreams(spec.router_addresses, self._session, clock, self._loop.turn)
        self._done = threading.Event()  # nothing is left here, or the time for it is over
        self._stopping = threading.Event()
        self._stop_once = threading.Lock()
        self._engine_thread = threading.Thread(target=self._step_forever, name="engine", daemon=True)

    def start(self) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._link.start()
        self._loop.start()
        self._engine_thread.start()
        self._loop.post(self._streams.open)
        _log.info("worker serves", worker=self.info.incarnation, role=self.info.role.value)

    def stop(self) -> None:
        """Leave the routers in order, end the threads, remove the socket. Bounded in time. A second call, as one during
        the drain after a SIGTERM, waits for the end of the first."""
        with self._stop_once:
            if self._stopping.is_set():
                return
            try:
                self._loop.run(self._streams.close(), _CLOSE_TIMEOUT_S)
            except TimeoutError:
                _log.error("the sessions did not end", timeout_s=_CLOSE_TIMEOUT_S)
            self._loop.close()
            self._stopping.set()
            self._engine_thread.join(timeout=10.0)
            self._link.close()

    def drain_and_stop(self, timeout_s: float) -> None:
        """Take nothing new, finish what is here, send what is computed; then stop. What is left after `timeout_s` goes
        on at another worker."""
        self._loop.post(partial(self._control.leave, timeout_s))
        self._done.wait(timeout_s + _LEAVE_MARGIN_S)
        self.stop()

    @property
    def load(self) -> Load:
        """What the routers are told now."""
        return self._loop.ask(lambda: self._control.load)

    def trace_events(self, since_ns: int = 0) -> list[TraceEvent]:
        return self._trace.events(since_ns)

    # What the control tells.

    def left(self, owners_left: int) -> None:
        _log.info("drained", worker=self.info.incarnation, left=owners_left)
        self._done.set()

    def _session(self, wake: Callable[[], None]) -> RouterSession:
        return RouterSession(self.info, self._control, self._clock, wake)

    # The engine's thread.

    def on_engine(self, events: tuple[EngineEvent, ...], load: Load) -> None:
        self._control.on_engine(events, load)

    def _step_forever(self) -> None:
        try:
            while not self._stopping.is_set():
                self._engine.step(wait_s=_IDLE_WAIT_S)
        except Exception:  # noqa: BLE001 - a worker whose engine is broken must not look alive
            _log.exception("engine thread died, leaving")
            _leave_at_once()


def _transport(spec: WorkerSpec, incarnation: str) -> Transport:
    clock, log, sockets = SystemClock(), logs.logger("kv"), Path(spec.kv_socket_directory)
    transport = worker_transport(spec.config.transfer, incarnation, sockets, spec.kv_key, clock, log)
    return transport if spec.under_test is None else spec.under_test.transport(transport, clock)


def _leave_at_once() -> None:
    os._exit(1)
