"""The Ray actors: thin shells round Worker and Router. Ray places, starts, restarts and watches them.

No request, token or KV passes through Ray; its calls serve starting, stopping and looking in from outside.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import ray

import deploy.own_modules  # noqa: F401  before anything of the product is imported
from deploy.spec import RouterSpec
from deploy.termination import on_sigterm
from pdserve import crash_report, logs
from pdserve.errors import ConfigError
from pdserve.tracing import TraceEvent
from worker.spec import WorkerSpec

_log = logs.logger("actor")

# A call of these that finds its actor restarting waits for it; without, Ray refuses it, although whoever asks means to
# wait, and a restarted actor serves some moments before its driver hears of it.
_WAITS_FOR_A_RESTART = ray.method(max_task_retries=-1)


@ray.remote
class WorkerActor:
    """A prefill or decode worker. The constructor does all, so that a restarted actor comes back by itself."""

    def __init__(self, spec: WorkerSpec) -> None:
        from worker.process import Worker  # torch is needed only here

        logs.configure(spec.config.logging.level, spec.worker_id, Path(spec.log_path))
        if spec.under_test is not None:
            spec.under_test.before_start()
        self._error: ConfigError | None = None
        try:
            self._worker = Worker(spec)
            crash_report.enable(Path(self._worker.info.crash_report), spec.worker_id)
            self._worker.start()
            drain_s = spec.config.router.drain_timeout_ms / 1000
            on_sigterm(lambda: self._worker.drain_and_stop(drain_s))
        except ConfigError as error:
            self._error = error  # for `ready` to tell: an actor that dies in its constructor only says that it died
            _log.error("worker cannot serve", error=error)

    @_WAITS_FOR_A_RESTART
    def ready(self) -> str:
        """The incarnation, once the worker serves. Raises ConfigError where it cannot."""
        if self._error is not None:
            raise self._error
        return self._worker.info.incarnation

    def trace_events(self, since_ns: int) -> list[TraceEvent]:
        return self._worker.trace_events(since_ns)

    def stop(self) -> None:
        if self._error is None:
            self._worker.stop()


@ray.remote
class RouterActor:
    """A router, on an event loop and thread of its own. Restarted, it listens at the same addresses again."""

    def __init__(self, spec: RouterSpec) -> None:
        from router.server import Router

        logs.configure(spec.config.logging.level, spec.router_id, Path(spec.log_path))
        if spec.under_test is not None:
            spec.under_test.before_start()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="router", daemon=True)
        self._thread.start()
        self._error: ConfigError | None = None
        try:
            self._router = Router(Path(spec.model_directory), spec.model_name, spec.config.router)
            self._call(self._router.start())
            on_sigterm(lambda: self._drain_and_stop(spec.config.router.drain_timeout_ms / 1000))
        except ConfigError as error:
            self._error = error
            _log.error("router cannot serve", error=error)

    @_WAITS_FOR_A_RESTART
    def ready(self) -> str:
        """The gRPC address, once it listens. Raises ConfigError where it cannot."""
        if self._error is not None:
            raise self._error
        return self._router.grpc_address

    @_WAITS_FOR_A_RESTART
    def wait_members(self, worker_ids: frozenset[str], timeout_s: float) -> bool:
        """Wait until all these workers have joined; False if time ran out."""
        try:
            self._call(asyncio.wait_for(self._router.wait_members(worker_ids), timeout_s), timeout_s + 5.0)
        except TimeoutError:
            return False
        return True

    def stop(self) -> None:
        if self._error is None:
            self._call(self._router.stop())

    def _drain_and_stop(self, timeout_s: float) -> None:
        self._call(self._router.drain(timeout_s), timeout_s + 5.0)
        self._call(self._router.stop())

    def _call(self, coroutine: Coroutine[Any, Any, None], timeout_s: float = 30.0) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)
