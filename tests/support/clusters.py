"""Looks at and disturbs a running cluster, from outside, as an operator would.

A fault is aimed at a moment that this process has to see and to use. On a busy machine it is away for a while now and
then, and the moment has passed. Then the fault has missed: the test is `aimed` again.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray.exceptions

from deploy.cluster import LocalCluster
from pdserve.config import Config
from pdserve.rpc.inference_pb2 import WorkerStatus
from pdserve.tracing import TraceEvent

_LOOK_S = 0.01
_TRIES = 5


class Missed(Exception):
    """A fault found the phase over that it was aimed at."""


def aimed(test: Callable[..., None]) -> Callable[..., None]:
    """A test whose fault has to hit a phase: it raises Missed where it did not, having checked all that holds even
    so, and is held again."""

    @functools.wraps(test)
    def held(cluster: LocalCluster, **fixtures: Any) -> None:
        misses = []
        while len(misses) < _TRIES:
            try:
                return test(cluster=cluster, **fixtures)
            except Missed as missed:
                misses.append(str(missed))
            wait_quiet(cluster)
        raise AssertionError(f"the fault missed its phase each time: {misses}")

    return held


def cluster_config(
    runtime_dir: Path, model: Path, prefill: int = 1, decode: int = 1, routers: int = 1, **sections: dict[str, Any]
) -> Config:
    """A cluster on ephemeral ports with one thread a worker and small pools. Who is away for some seconds on a busy
    machine is not lost: only then is it known who moves a request."""
    base = {
        "cluster": {"runtime_dir": str(runtime_dir), "prefill": prefill, "decode": decode, "routers": routers},
        "router": {"grpc_port": 0, "worker_timeout_ms": 3_000},
        "model": {"path": str(model), "name": "small"},
        "engine": {"threads": 1, "kv_cache_mb": 64},
    }
    for section, values in sections.items():
        base[section] = base.get(section, {}) | values
    return Config().override(base, "test")


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 30.0) -> Any:
    """The first true value of `condition`; a look that begins after `timeout_s` is the last one."""
    deadline = time.monotonic() + timeout_s
    last = False
    while not (value := condition()):
        assert not last, f"not within {timeout_s:g} s: {what}"
        time.sleep(_LOOK_S)
        last = time.monotonic() >= deadline
    return value


def worker(cluster: LocalCluster, worker_id: str) -> WorkerStatus:
    return next(each for each in cluster.info().workers if each.worker_id == worker_id)


def serving(cluster: LocalCluster, role: str) -> WorkerStatus:
    """The one worker of a role that has a request. Raises Missed where none has."""
    found = [each for each in cluster.info().workers if each.role == role and each.requests]
    if not found:
        raise Missed(f"no {role} worker has a request any more")
    (only,) = found
    return only


def kill(status: WorkerStatus) -> None:
    send_signal(status, signal.SIGKILL)


def send_signal(status: WorkerStatus, number: signal.Signals) -> None:
    assert status.pid > 0, f"{status.worker_id} is {status.state}: it has no process"  # 0: our own process group
    os.kill(status.pid, number)


def trace_of(cluster: LocalCluster, worker_id: str, since_ns: int = 0) -> list[TraceEvent]:
    """A worker's trace; nothing while Ray does not reach it."""
    with contextlib.suppress(ray.exceptions.RayError):
        return cluster.trace_events(worker_id, since_ns)
    return []


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
    found = []
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):  # it is being written
            found.append(json.loads(line))
    return [line for line in found if line["event"] == event]


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
