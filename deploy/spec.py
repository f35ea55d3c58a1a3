"""What an actor is started with: plain values, so that whoever starts one need not import what it runs."""

from __future__ import annotations

from dataclasses import dataclass

from kvtransfer.transports.zmq import CurveKey
from pdserve.config import Config
from pdserve.types import Role


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """All a worker needs to come up, and to come up again after a crash."""

    worker_id: str
    role: Role
    model_directory: str
    model_name: str
    router_addresses: tuple[str, ...]
    kv_socket_directory: str
    log_path: str
    config: Config
    kv_key: CurveKey | None = None  # of the cluster; needed with transfer.network = "tcp"


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """All a router needs to come up."""

    router_id: str
    model_directory: str
    model_name: str
    log_path: str
    config: Config
