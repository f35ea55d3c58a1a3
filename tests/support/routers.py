"""A router on a thread of this process, and workers beside it: the whole system without Ray."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from kvtransfer.transports.zmq import CurveKey
from pdserve.config import Config, RouterConfig, TransferConfig
from pdserve.types import Role
from router.server import Router
from worker.process import Worker
from worker.spec import WorkerSpec

MODEL = "small"


class RouterThread:
    """A Router and the event loop it runs on."""

    def __init__(self, model: Path, config: RouterConfig | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.router = Router(
            model, MODEL, config or RouterConfig(grpc_port=0, placement_timeout_ms=500, worker_timeout_ms=3_000)
        )
        self.call(self.router.start())

    def call(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float = 30.0) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    def stop(self) -> None:
        if self._loop.is_closed():
            return
        self.call(self.router.stop(grace_s=0))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def __enter__(self) -> RouterThread:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def make_worker(
    model: Path,
    sockets: Path,
    *routers: RouterThread,
    role: Role = Role.DECODE,
    transfer: TransferConfig | None = None,
    kv_key: CurveKey | None = None,
) -> Worker:
    """A worker of these routers that is not started yet."""
    config = Config(transfer=transfer or TransferConfig())
    config = replace(config, engine=replace(config.engine, threads=1, kv_cache_mb=32))
    return Worker(
        WorkerSpec(
            worker_id=f"{role.value}-0",
            role=role,
            model_directory=str(model),
            model_name=MODEL,
            router_addresses=tuple(router.router.session_address for router in routers),
            kv_socket_directory=str(sockets),
            log_path="",
            config=config,
            kv_key=kv_key,
        )
    )
