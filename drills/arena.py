"""The cluster a drill happens on: one of its own, one in a process of its own, or the user's.

It is looked at from outside. What only a cluster of our own shows (logs, traces) is empty for somebody else's, and the
drills that cannot do without say so.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import psutil
import ray.exceptions

from deploy.cluster import LocalCluster
from deploy.installation import child_environment
from deploy.runtime import RuntimeDirectory
from drills.footprint import Footprint, footprint
from drills.sabotage import Sabotage
from pdserve.client import Client
from pdserve.config import Config
from pdserve.errors import PdserveError, Unavailable
from pdserve.rpc.inference_pb2 import ServerInfo, WorkerStatus
from pdserve.tracing import TraceEvent

LOOK_S = 0.01
_LOOK_TIMEOUT_S = 1.0
_LOOKS = 5  # at a process that has to be there: on a busy machine it may be away for a second


class Node(Protocol):
    """A node of the cluster that can be lost as a whole."""

    def kill(self) -> None: ...

    def start_again(self) -> None: ...


class Network(Protocol):
    """A link that can be cut: then nothing arrives any more, either way, and nobody is told."""

    def cut(self) -> None: ...

    def mend(self) -> None: ...


class Traces(Protocol):
    def __call__(self, worker_id: str, since_ns: int) -> list[TraceEvent]: ...


@dataclass(frozen=True, slots=True)
class Process:
    """Something that can be killed: a worker's or a router's process on this host."""

    name: str
    pid: int
    incarnation: str = ""


class Arena:
    """Looks at a running cluster. Every look is bounded in time and finds nothing where nobody answers."""

    def __init__(
        self,
        addresses: Sequence[str],
        logs: Path | None = None,
        traces: Traces | None = None,
        processes: Callable[[], list[psutil.Process]] = list,
    ) -> None:
        """`processes`: all of a cluster's on this host, Ray's among them."""
        self.addresses = tuple(addresses)
        self.logs = logs
        self.faults_file: Path | None = None  # what is written into it strikes the workers' KV wire
        self.node: Node | None = None  # another one, with workers of its own
        self.network: Network | None = None  # behind which a worker lives
        self._traces = traces
        self._processes = processes
        self._clients = [Client(address) for address in self.addresses]
        self.worker_ids = frozenset(worker.worker_id for worker in self.workers())

    def close(self) -> None:
        for client in self._clients:
            client.close()

    @property
    def has_traces(self) -> bool:
        return self._traces is not None

    def client(self, router: int = 0) -> Client:
        return self._clients[router]

    def infos(self) -> list[ServerInfo | None]:
        """What each router knows; None for one that does not answer."""
        return [_info(client) for client in self._clients]

    def workers(self) -> list[WorkerStatus]:
        """The workers as the first router that answers sees them. Raises Unavailable if none does."""
        for client in self._clients:
            info = _info(client)
            if info is not None:
                return list(info.workers)
        raise Unavailable(f"no router answers at {', '.join(self.addresses)}")

    def alive(self, role: str) -> list[WorkerStatus]:
        return [worker for worker in self.workers() if worker.role == role and worker.state == "ready"]

    def busy(self, role: str) -> WorkerStatus | None:
        """The worker of a role that has most requests, over all routers; None if none has any."""
        requests: dict[str, int] = {}
        workers: dict[str, WorkerStatus] = {}
        for info in self.infos():
            for worker in info.workers if info else ():
                if worker.role == role and worker.requests and worker.pid:
                    workers[worker.incarnation] = worker
                    requests[worker.incarnation] = requests.get(worker.incarnation, 0) + worker.requests
        return workers[max(requests, key=lambda each: requests[each])] if requests else None

    def router_process(self, number: int) -> Process:
        """Raises Unavailable where it does not answer."""
        for _ in range(_LOOKS):
            info = _info(self._clients[number])
            if info is not None:
                return Process(f"router-{number}", info.pid)
        raise Unavailable(f"router {number} at {self.addresses[number]} does not answer")

    def process_named(self, name: str) -> int | None:
        """The pid of the cluster's process of this name."""
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name() == name:
                    return process.pid
        return None

    def is_here(self) -> bool:
        """Whether its workers are processes of this host: only those can be killed from here."""
        return {worker.host for worker in self.workers() if worker.host} <= {socket.gethostname()}

    def ready(self) -> bool:
        """Every router answers and has every worker of the beginning ready."""
        return all(
            info is not None
            and self.worker_ids <= {worker.worker_id for worker in info.workers if worker.state == "ready"}
            for info in self.infos()
        )

    def leased_blocks(self) -> int | None:
        """Blocks leased anywhere while no request is in flight; None while one is, or while nobody answers."""
        infos = self.infos()
        workers = {worker.incarnation: worker for info in infos if info for worker in info.workers}
        if None in infos or any(info.running_requests for info in infos if info):
            return None
        if any(worker.requests or worker.queue for worker in workers.values() if worker.state != "lost"):
            return None
        return sum(worker.blocks.leased for worker in workers.values())

    def footprints(self) -> list[Footprint]:
        """What the routers and workers of this host take now."""
        infos, now = self.infos(), time.monotonic()
        processes = {worker.pid: worker.worker_id for info in infos if info for worker in info.workers if worker.pid}
        processes |= {info.pid: f"router-{number}" for number, info in enumerate(infos) if info}
        found = [footprint(now, name, pid) for pid, name in processes.items()]
        return [each for each in found if each is not None]

    def wait_ready(self, timeout_s: float) -> bool:
        return wait_for(self.ready, timeout_s)

    def wait_quiet(self, timeout_s: float) -> int:
        """Wait until nothing is in flight and no block is leased; how many still are when the time is over."""
        if wait_for(lambda: self.leased_blocks() == 0, timeout_s):
            return 0
        return sum(worker.blocks.leased for worker in self.workers())

    def trace(self, worker_id: str, since_ns: int) -> list[TraceEvent]:
        """A worker's trace; nothing while it is down."""
        if self._traces is None:
            return []
        try:
            return self._traces(worker_id, since_ns)
        except (ray.exceptions.RayError, TimeoutError):
            return []

    def log_lines(self, pattern: str, event: str) -> list[dict[str, Any]]:
        """The log lines with this event of the processes whose name matches."""
        if self.logs is None:
            return []
        found = []
        for path in sorted(self.logs.glob(f"{pattern}.jsonl")):
            for line in path.read_text().splitlines():
                if f'"{event}"' in line:
                    with contextlib.suppress(json.JSONDecodeError):  # it is being written
                        found.append(json.loads(line))
        return [line for line in found if line["event"] == event]

    def moved_requests(self) -> frozenset[str]:
        """The ids of the requests whose attempt or sender was replaced, as the routers' logs tell."""
        lines = [line for event in ("fallback", "attempt failed") for line in self.log_lines("router-*", event)]
        return frozenset(line["owner"].partition("/")[2].rpartition("@")[0] for line in lines)

    def lines_of(self, request_id: str, event: str) -> list[dict[str, Any]]:
        """The routers' lines with this event about one request, in order."""
        return [line for line in self.log_lines("router-*", event) if f"/{request_id}@" in line["owner"]]


def arena_of(cluster: LocalCluster) -> Arena:
    """A cluster that this process runs: with logs and traces."""

    def traces(worker_id: str, since_ns: int) -> list[TraceEvent]:
        return cluster.trace_events(worker_id, since_ns, timeout_s=_LOOK_TIMEOUT_S)

    return Arena(cluster.grpc_addresses, cluster.logs, traces)


class DetachedCluster:
    """A cluster in a process of its own, for faults that its supervisor may not survive."""

    def __init__(self, config: Config, config_file: Path, sabotage: Sabotage) -> None:
        """Writes `config` to `config_file` and starts it. Raises Unavailable."""
        self._runtime = RuntimeDirectory(config.cluster.runtime_dir)
        config_file.write_text(_toml(config))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "drills.detached", str(config_file), json.dumps(asdict(sabotage))],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ | child_environment(),
        )
        if not wait_for(
            lambda: self._serves() or self._process.poll() is not None, config.cluster.start_timeout_s + 30.0
        ):
            self.stop()
            raise Unavailable("the cluster did not start in time")
        if self._process.returncode is not None:
            raise Unavailable(f"the cluster ended with {self._process.returncode}; see {self._runtime.logs}")

    def __enter__(self) -> DetachedCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def arena(self) -> Arena:
        state = self._runtime.read_state()
        assert state is not None
        return Arena(state.routers, self._runtime.logs, processes=self._runtime.processes)

    def stop(self) -> None:
        """End it, whatever state it is in, and whatever it started."""
        cluster_id, leftover = self._runtime.cluster_id, self._runtime.processes()
        self._process.terminate()
        try:
            self._process.wait(timeout=20.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=5.0)
        for process in leftover:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(leftover, timeout=5.0)
        self._runtime.remove(cluster_id)

    def _serves(self) -> bool:
        state = self._runtime.read_state()
        return state is not None and state.pid == self._process.pid


def _info(client: Client) -> ServerInfo | None:
    try:
        return client.server_info(timeout_s=_LOOK_TIMEOUT_S)
    except PdserveError:
        return None


def wait_for(condition: Callable[[], object], timeout_s: float) -> bool:
    """Look until it is true; False when a look that began after that time was not."""
    deadline = time.monotonic() + timeout_s
    last = False
    while not condition():
        if last:
            return False
        time.sleep(LOOK_S)
        last = time.monotonic() >= deadline
    return True


def _toml(config: Config) -> str:
    lines = []
    for section, values in config.as_dict().items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"
