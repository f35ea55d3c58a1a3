"""Looks at and disturbs a running cluster, from outside, as an operator would."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deploy.cluster import LocalCluster
from pdserve.config import Config
from pdserve.rpc.inference_pb2 import WorkerStatus

_LOOK_S = 0.01


def cluster_config(
    runtime_dir: Path, model: Path, prefill: int = 1, decode: int = 1, routers: int = 1, **sections: dict[str, Any]
) -> Config:
    """A cluster on ephemeral ports with one thread a worker and small pools."""
    base = {
        "cluster": {"runtime_dir": str(runtime_dir), "prefill": prefill, "decode": decode, "routers": routers},
        "router": {"grpc_port": 0},
        "model": {"path": str(model), "name": "small"},
        "engine": {"threads": 1, "kv_cache_mb": 64},
    }
    for section, values in sections.items():
        base[section] = base.get(section, {}) | values
    return Config().override(base, "test")


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 30.0) -> Any:
    """The first true value of `condition`, looked at until the deadline."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(_LOOK_S)
    return value


def worker(cluster: LocalCluster, worker_id: str) -> WorkerStatus:
    return next(each for each in cluster.info().workers if each.worker_id == worker_id)


def serving(cluster: LocalCluster, role: str) -> WorkerStatus:
    """The one worker of a role that has a request."""
    (found,) = [each for each in cluster.info().workers if each.role == role and each.requests]
    return found


def kill(status: WorkerStatus) -> None:
    os.kill(status.pid, signal.SIGKILL)


def wait_quiet(cluster: LocalCluster, timeout_s: float = 60.0) -> None:
    """Every worker is a member, no request is anywhere, and every block is free."""
    cluster.wait_ready(timeout_s)

    def quiet() -> bool:
        info = cluster.info()
        return not info.running_requests and all(
            each.state == "ready" and not (each.requests or each.queue or each.blocks.leased) and each.blocks.free
            for each in info.workers
        )

    wait_for(quiet, "no request and no leased block left", timeout_s)


def log_events(cluster: LocalCluster, process: str, event: str) -> list[dict[str, Any]]:
    """The lines with this event in a process's log, or in all whose name matches a pattern such as router-*."""
    lines = [line for path in sorted(cluster.logs.glob(f"{process}.jsonl")) for line in path.read_text().splitlines()]
    return [line for line in map(json.loads, lines) if line["event"] == event]


def attempts_of(cluster: LocalCluster, request_id: str) -> list[dict[str, Any]]:
    """The routers' log lines "attempt started" of a request, in order."""
    return _of_request(cluster, "attempt started", request_id)


def failures_of(cluster: LocalCluster, request_id: str) -> list[dict[str, Any]]:
    """The routers' log lines "attempt failed" of a request, in order."""
    return _of_request(cluster, "attempt failed", request_id)


def rungs_of(cluster: LocalCluster, request_id: str) -> list[str]:
    """The rungs of the ladder that a request's transfers took, in order."""
    return [line["rung"] for line in _of_request(cluster, "fallback", request_id)]


def _of_request(cluster: LocalCluster, event: str, request_id: str) -> list[dict[str, Any]]:
    return [line for line in log_events(cluster, "router-*", event) if f"/{request_id}@" in line["owner"]]
