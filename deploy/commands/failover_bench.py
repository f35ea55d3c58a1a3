"""What a lost worker costs, on a whole local cluster with the embedded model: stalls, recovery, throughput.

A kill's *bound* is what nobody could do without: the time until the router has noticed, and twice the TTFT of an
undisturbed request whose prompt is as long as what has to be computed again (prompt and emitted tokens).
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from deploy.cluster import LocalCluster
from drills.arena import wait_for
from pdserve.client import Client, Result
from pdserve.config import Config
from pdserve.errors import Unavailable
from pdserve.rpc.inference_pb2 import WorkerStatus

_PROMPT, _EMITTED, _OUTPUT = 96, 16, 48  # tokens of a request whose decode worker is killed
_LONG_PROMPT = 384  # of one whose prefill worker is killed while it sends
_STREAMS = 32  # half of them on each decode worker
_LASTING = 320  # tokens of each: the first must still run when the last begins
_CLIENTS = 8
_DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True)
class StallRow:
    """`stall`: what the kill added to the wait for the next token. `bound_ms` is of the same run, at the median."""

    name: str
    kills: int
    stall_p50_ms: float
    stall_p99_ms: float
    detection_p50_ms: float
    detection_p99_ms: float
    bound_ms: float
    changed_streams: int


@dataclass(frozen=True, slots=True)
class RecoveryRow:
    """`streams` were on the killed worker; `all_running_ms` until each had its next token."""

    name: str
    streams: int
    all_running_ms: float
    changed_streams: int


@dataclass(frozen=True, slots=True)
class ThroughputRow:
    """Closed loop of `clients`. `kills`: of one of the three workers in turn, at even intervals."""

    name: str
    clients: int
    seconds: float
    kills: int
    tokens_per_s: float
    failed_requests: int


def bench_stalls(kills: int) -> list[StallRow]:
    """Kill the serving decode worker and the serving prefill worker in turns, one request at a time."""
    with _cluster(prefill=2, decode=2) as cluster, Client(cluster.grpc_address) as client:
        decode = _Kills("decode", _ids(_PROMPT), client)
        prefill = _Kills("prefill", _ids(_LONG_PROMPT), client)
        for _ in range(kills):
            decode.measure(cluster, client)
            prefill.measure(cluster, client)
        return [decode.row(), prefill.row()]


def bench_recovery() -> RecoveryRow:
    """Kill a decode worker that serves half of many streams."""
    with _cluster(prefill=1, decode=2) as cluster, Client(cluster.grpc_address) as client:
        prompts = [_ids(_PROMPT, seed) for seed in range(_STREAMS)]
        undisturbed = [_Reader(client, prompt, _LASTING) for prompt in prompts]
        for reader in undisturbed:
            reader.join()
        readers = [_Reader(client, prompt, _LASTING) for prompt in prompts]
        _wait(lambda: all(reader.tokens for reader in readers))
        victim = next(worker for worker in cluster.info().workers if worker.worker_id == "decode-0")
        killed_at = _kill(victim)
        for reader in readers:
            reader.join()
        lost = [reader for reader in readers if reader.result.attempts > 1]
        changed = sum(
            reader.result.token_ids != expected.result.token_ids
            for reader, expected in zip(readers, undisturbed, strict=True)
        )
        recovered = max(_next_after(reader.arrivals, killed_at) for reader in lost)
        return RecoveryRow("decode kill", len(lost), recovered * 1e3, changed)


def bench_throughput(seconds: float, interval_s: float) -> list[ThroughputRow]:
    """The same load undisturbed, then with a worker killed every `interval_s`."""
    with _cluster(prefill=1, decode=2) as cluster:
        rows = []
        for name, interval in (("undisturbed", None), ("with kills", interval_s)):
            cluster.wait_ready(_DEADLINE_S)
            rows.append(_load(cluster, name, seconds, interval))
        return rows


_OPTIONS = {"temperature": 0.0, "max_tokens": _OUTPUT, "ignore_eos": True}


class _Kills:
    """One kind of kill, measured again and again."""

    def __init__(self, role: str, prompt: list[int], client: Client) -> None:
        self._role = role
        self._prompt = prompt
        self._stalls: list[float] = []
        self._detections: list[float] = []
        self._changed = 0
        self._undisturbed = client.complete(prompt, **_OPTIONS)
        again = prompt + list(self._undisturbed.token_ids[:_EMITTED]) if role == "decode" else prompt
        self._ttft_ms = statistics.median(_ttft_ms(client, again) for _ in range(5))

    def measure(self, cluster: LocalCluster, client: Client) -> None:
        cluster.wait_ready(_DEADLINE_S)
        since_ns = time.monotonic_ns()
        reader = _Reader(client, self._prompt)
        if self._role == "decode":
            _wait(lambda: reader.tokens >= _EMITTED)
        else:
            _wait(lambda: _transfer_began(cluster, since_ns))
        victim = _serving(cluster, self._role)
        if victim is None:
            raise Unavailable(f"no {self._role} worker had the request: it was over too soon to be killed")
        killed_at, wall = _kill(victim), time.time()
        reader.join()
        wait_ms = _next_after(reader.arrivals, killed_at) * 1e3
        self._stalls.append(wait_ms if self._role == "decode" else reader.result.ttft_ms - self._ttft_ms)
        self._detections.append((_lost_at(cluster, victim) - wall) * 1e3)
        self._changed += reader.result.token_ids != self._undisturbed.token_ids

    def row(self) -> StallRow:
        detection = statistics.median(self._detections)
        return StallRow(
            name=f"{self._role} kill",
            kills=len(self._stalls),
            stall_p50_ms=statistics.median(self._stalls),
            stall_p99_ms=_p99(self._stalls),
            detection_p50_ms=detection,
            detection_p99_ms=_p99(self._detections),
            bound_ms=detection + 2 * self._ttft_ms,
            changed_streams=self._changed,
        )


class _Reader:
    """Reads one stream on a thread of its own and notes when tokens came."""

    def __init__(self, client: Client, prompt: list[int], output: int = _OUTPUT) -> None:
        self.arrivals: list[float] = []
        self.tokens = 0
        self._stream = client.generate(prompt, **_OPTIONS | {"max_tokens": output})
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def result(self) -> Result:
        return self._stream.result

    def join(self) -> None:
        self._thread.join(_DEADLINE_S)

    def _read(self) -> None:
        for delta in self._stream:
            if delta.token_ids:
                self.arrivals.append(time.monotonic())
                self.tokens += len(delta.token_ids)


def _load(cluster: LocalCluster, name: str, seconds: float, interval_s: float | None) -> ThroughputRow:
    end = time.monotonic() + seconds
    tokens, failed, lock = [0], [0], threading.Lock()

    def work(number: int) -> None:
        with Client(cluster.grpc_address) as client:
            count = 0
            while time.monotonic() < end:
                count += 1
                stream = client.generate(_ids(_PROMPT, number * 10_000 + count), **_OPTIONS)
                try:
                    for delta in stream:
                        with lock:
                            tokens[0] += len(delta.token_ids) if time.monotonic() < end else 0
                except Unavailable:
                    failed[0] += 1

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(_CLIENTS)]
    for thread in threads:
        thread.start()
    kills = 0
    while interval_s is not None and time.monotonic() + interval_s < end:
        time.sleep(interval_s)
        workers = [worker for worker in cluster.info().workers if worker.state == "ready"]
        _kill(workers[kills % len(workers)])
        kills += 1
    for thread in threads:
        thread.join(_DEADLINE_S + seconds)
    return ThroughputRow(name, _CLIENTS, seconds, kills, tokens[0] / seconds, failed[0])


def _cluster(prefill: int, decode: int) -> LocalCluster:
    runtime_dir = tempfile.mkdtemp(prefix="pdsb-", dir=tempfile.gettempdir())
    Path(runtime_dir).rmdir()
    sections = {
        "cluster": {"prefill": prefill, "decode": decode, "runtime_dir": runtime_dir},
        "router": {"grpc_port": 0},
    }
    return LocalCluster(Config().override(sections, "bench"))


def _ids(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(100, 40_000), k=count)


def _ttft_ms(client: Client, prompt: list[int]) -> float:
    ttft_ms = client.complete(prompt, temperature=0.0, max_tokens=1).ttft_ms
    assert ttft_ms is not None
    return ttft_ms


def _serving(cluster: LocalCluster, role: str) -> WorkerStatus | None:
    return next((each for each in cluster.info().workers if each.role == role and each.requests), None)


def _transfer_began(cluster: LocalCluster, since_ns: int) -> bool:
    """Whether a decode worker has received the first frame of a prompt's KV."""
    decoders = [worker_id for worker_id in cluster.worker_ids if worker_id.startswith("decode")]
    events = [event for worker_id in decoders for event in cluster.trace_events(worker_id, since_ns)]
    return any(event.name == "frame_received" for event in events)


def _kill(worker: WorkerStatus) -> float:
    """SIGKILL; when that was, on the monotonic clock."""
    os.kill(worker.pid, signal.SIGKILL)
    return time.monotonic()


def _lost_at(cluster: LocalCluster, worker: WorkerStatus) -> float:
    """When the router noticed, on the wall clock, by its log."""
    for line in reversed((cluster.logs / "router-0.jsonl").read_text().splitlines()):
        entry = json.loads(line)
        if entry["event"] == "worker lost" and entry["worker"] == worker.incarnation:
            return datetime.fromisoformat(entry["time"]).timestamp()
    raise Unavailable(f"the router did not notice the loss of {worker.incarnation}")


def _next_after(arrivals: list[float], killed_at: float) -> float:
    """How long after the kill the stream went on: what was on its way already does not count, the longest gap does."""
    times = [killed_at, *(at for at in arrivals if at > killed_at)]
    gaps = [(later - earlier, later) for earlier, later in itertools.pairwise(times)]
    return max(gaps)[1] - killed_at


def _wait(condition: Callable[[], object]) -> None:
    if not wait_for(condition, _DEADLINE_S):
        raise Unavailable(f"the cluster did not get there within {_DEADLINE_S:g} s")


def _p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.99))]
