"""What a router tells about itself and its workers, as values."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from pdserve.types import BlockCounts, Role
from router.dispatch import Dispatch
from router.membership import Membership


class WorkerState(StrEnum):
    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker. `queue`: what waits there, as it last told; `requests`: attempts of this router that it has."""

    worker_id: str
    incarnation: str
    role: Role
    host: str
    state: WorkerState
    pid: int = 0
    queue: int = 0
    requests: int = 0
    blocks: BlockCounts = field(default_factory=BlockCounts)
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class RouterStatus:
    version: str
    model: str
    grpc_address: str
    session_address: str
    running_requests: int
    pid: int
    workers: tuple[WorkerStatus, ...]


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """What is served."""

    model: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]


def worker_statuses(membership: Membership, dispatch: Dispatch) -> tuple[WorkerStatus, ...]:
    """Members, and those lost that have not come back; prefill workers first."""
    members = [
        WorkerStatus(
            worker_id=member.info.worker_id,
            incarnation=member.info.incarnation,
            role=member.info.role,
            host=member.info.host,
            state=WorkerState.DRAINING if member.load.draining else WorkerState.READY,
            pid=member.info.pid,
            queue=member.load.queued,
            requests=dispatch.assigned(member.info.incarnation),
            blocks=member.load.blocks,
            fingerprint=member.info.fingerprint,
        )
        for member in membership
    ]
    lost = [
        WorkerStatus(info.worker_id, info.incarnation, info.role, info.host, WorkerState.LOST)
        for info in membership.lost
    ]
    return tuple(sorted([*members, *lost], key=lambda worker: (worker.role is not Role.PREFILL, worker.worker_id)))
