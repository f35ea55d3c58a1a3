"""What a router's actor is started with: plain values, so that whoever starts one need not import what it runs.
A worker's is in `worker.spec`."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.config import Config
from worker.spec import UnderTest


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """All a router needs to come up."""

    router_id: str
    model_directory: str
    model_name: str
    log_path: str
    config: Config
    under_test: UnderTest | None = None
