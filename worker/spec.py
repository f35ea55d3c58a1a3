"""What a worker is started with: plain values, so that whoever starts one need not import what it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvtransfer.transports.base import Transport
from kvtransfer.transports.zmq import CurveKey
from pdserve.clock import Clock
from pdserve.config import Config
from pdserve.types import Role


class UnderTest(Protocol):
    """What a process that is under test does otherwise than in use. Passed along with the spec, so a plain value. No
    process in use has one."""

    def before_start(self) -> None:
        """Called first of all in the process."""
        ...

    def transport(self, inner: Transport, clock: Clock) -> Transport:
        """What a worker's KV wire goes over, instead of `inner` or round it."""
        ...


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
    under_test: UnderTest | None = None
