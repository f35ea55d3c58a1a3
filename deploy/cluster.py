"""A cluster on this machine: Ray, routers, prefill and decode workers.

    start:  the routers' ports -> Ray -> routers and workers, all at once -> every worker has joined every router
    stop:   routers and workers -> Ray -> whatever of theirs is left, by process id -> the runtime directory

Custom resources place the actors, not CPUs: four actors on two cores must not wait for ever.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
import ray.exceptions

import deploy.own_modules  # noqa: F401  before anything of the product is imported
from deploy.actors import RouterActor, WorkerActor
from deploy.ports import PortReservation
from deploy.processes import end_processes
from deploy.ray_environment import node_environment, starting_ray
from deploy.runtime import RuntimeDirectory
from deploy.spec import RouterSpec
from kvtransfer.transports.zmq import CurveKey
from model.config import ModelConfig
from model.embedded import embedded_model_directory
from model.files import tensor_files
from pdserve import machine
from pdserve.client import Client
from pdserve.config import Config
from pdserve.errors import ConfigError, PdserveError, Unavailable
from pdserve.rpc.inference_pb2 import ServerInfo
from pdserve.tracing import TraceEvent
from pdserve.types import Role
from worker.spec import UnderTest, WorkerSpec

_RAY_STORE_BYTES = 80 * 1024 * 1024  # nothing of ours goes through it; Ray wants at least 75 MiB
_PLACES = "pdserve"
_STOP_TIMEOUT_S = 10.0
_EMBEDDED_NAME = "SmolLM2-135M-Instruct"


class LocalCluster:
    """A running cluster. Use it as a context manager, or call `stop`."""

    def __init__(
        self,
        config: Config,
        progress: Callable[[str], None] = lambda stage: None,
        under_test: UnderTest | None = None,
    ) -> None:
        """Start everything and wait until it serves. `under_test` is given to each of its processes. Raises ConfigError
        or Unavailable; nothing is left then."""
        self._progress = progress
        self._under_test = under_test
        self._directory, name = _model(config)
        self.config = _resolve_threads(config)
        check_memory(config, self._directory, machine.memory())
        self._ports = _reserve_ports(config)
        self.model = name
        self.stage_seconds: dict[str, float] = {}
        self._runtime = RuntimeDirectory(config.cluster.runtime_dir)
        self._cluster_id = self._runtime.create()
        self._workers: dict[str, ray.actor.ActorHandle] = {}
        self._routers: dict[str, ray.actor.ActorHandle] = {}
        self._kv_key = CurveKey.generate() if config.transfer.network == "tcp" else None
        try:
            self._stage("ray", self._start_ray)
            self._stage("routers and workers", self._start_actors)
            self._runtime.write_state(self.grpc_addresses, name)
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def grpc_address(self) -> str:
        """The first router's."""
        return self.grpc_addresses[0]

    def info(self) -> ServerInfo:
        """What the first router knows of itself and the workers."""
        with Client(self.grpc_address) as client:
            return client.server_info()

    @property
    def logs(self) -> Path:
        """Where each process appends its log, one file of JSON lines each."""
        return self._runtime.logs

    @property
    def worker_ids(self) -> list[str]:
        return list(self._workers)

    def trace_events(self, worker_id: str, since_ns: int = 0, timeout_s: float = 30.0) -> list[TraceEvent]:
        """A worker's trace from `since_ns` on, on this host's monotonic clock."""
        return ray.get(self._workers[worker_id].trace_events.remote(since_ns), timeout=timeout_s)

    @property
    def gcs_address(self) -> str:
        """Where Ray's control store listens: what another node needs to join."""
        return str(ray.get_runtime_context().gcs_address)

    @property
    def node_environment(self) -> Mapping[str, str]:
        """And what that node's processes are to be started with."""
        return node_environment(self._cluster_id)

    def add_workers(self, workers: Iterable[tuple[Role, str]], place: str) -> None:
        """Start more workers, by role and id, on nodes with Ray's custom resource `place`; returns when they have
        joined. Raises as the constructor does."""
        self._start_workers(workers, place)
        _get([actor.ready.remote() for actor in self._workers.values()], self._timeout_s)
        self.wait_ready(self._timeout_s)

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until every worker is a member of every router again. Raises Unavailable."""
        wanted = frozenset(self._workers)
        waits = [router.wait_members.remote(wanted, timeout_s) for router in self._routers.values()]
        if not all(_get(waits, timeout_s + 10.0)):
            ready = {worker.worker_id for worker in self.info().workers if worker.state == "ready"}
            missing = ", ".join(sorted(wanted - ready))
            raise Unavailable(f"workers not ready after {timeout_s:g} s: {missing}; see {self._runtime.logs}")

    def stop(self) -> None:
        """Stop every process of the cluster and remove its directory. Safe to call twice."""
        if ray.is_initialized():
            actors = [*self._workers.values(), *self._routers.values()]
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get([actor.stop.remote() for actor in actors], timeout=_STOP_TIMEOUT_S)
        end_processes(self._cluster_id, ray.shutdown)
        for pair in self._ports:
            for reservation in pair:
                reservation.release()
        self._runtime.remove(self._cluster_id)

    def _stage(self, name: str, action: Callable[[], None]) -> None:
        self._progress(name)
        begin = time.monotonic()
        action()
        self.stage_seconds[name] = time.monotonic() - begin

    def _start_ray(self) -> None:
        cluster = self.config.cluster
        places = cluster.routers + cluster.prefill + cluster.decode
        try:
            with starting_ray(self._cluster_id, self._runtime.ray):
                ray.init(
                    address="local",
                    num_cpus=0,
                    num_gpus=0,
                    resources={_PLACES: places},
                    include_dashboard=False,
                    object_store_memory=_RAY_STORE_BYTES,
                    log_to_driver=False,
                    logging_level=logging.CRITICAL,
                    namespace="pdserve",
                    _temp_dir=str(self._runtime.ray),
                )
        except Exception as error:  # Ray raises plain ones when its processes do not come up in time
            raise Unavailable(f"Ray did not start: {error}\n{self._runtime.ray_complaints()}") from error

    def _start_actors(self) -> None:
        cluster, options = self.config.cluster, self._options(_PLACES)
        for index, ports in enumerate(self._ports):
            router_id = f"router-{index}"
            spec = self._router_spec(router_id, *(reservation.port for reservation in ports))
            self._routers[router_id] = RouterActor.options(**options).remote(spec)
        counts = ((Role.PREFILL, cluster.prefill), (Role.DECODE, cluster.decode))
        self._start_workers(
            [(role, f"{role.value}-{index}") for role, count in counts for index in range(count)], _PLACES
        )
        routers = [router.ready.remote() for router in self._routers.values()]
        self.grpc_addresses: list[str] = list(_get(routers, self._timeout_s))
        _get([actor.ready.remote() for actor in self._workers.values()], self._timeout_s)
        self.wait_ready(self._timeout_s)

    def _start_workers(self, workers: Iterable[tuple[Role, str]], place: str) -> None:
        options = self._options(place)
        for role, worker_id in workers:
            self._workers[worker_id] = WorkerActor.options(**options).remote(self.worker_spec(role, worker_id))

    def _options(self, place: str) -> dict[str, Any]:
        """Of an actor that lives where Ray has the custom resource `place`."""
        return {
            "num_cpus": 0,
            "resources": {place: 1},
            "max_restarts": -1,
        }

    def _router_spec(self, router_id: str, grpc_port: int, session_port: int) -> RouterSpec:
        router = replace(self.config.router, grpc_port=grpc_port, session_port=session_port)
        return RouterSpec(
            router_id=router_id,
            model_directory=str(self._directory),
            model_name=self.model,
            log_path=str(self._runtime.logs / f"{router_id}.jsonl"),
            config=replace(self.config, router=router),
            under_test=self._under_test,
        )

    def worker_spec(self, role: Role, worker_id: str) -> WorkerSpec:
        """What a worker of this cluster is started with."""
        return WorkerSpec(
            worker_id=worker_id,
            role=role,
            model_directory=str(self._directory),
            model_name=self.model,
            router_addresses=tuple(f"{self.config.router.host}:{session.port}" for _, session in self._ports),
            kv_socket_directory=str(self._runtime.kv_sockets),
            log_path=str(self._runtime.logs / f"{worker_id}.jsonl"),
            config=self.config,
            kv_key=self._kv_key,
            under_test=self._under_test,
        )

    @property
    def _timeout_s(self) -> float:
        return self.config.cluster.start_timeout_s


def _get(references: object, timeout_s: float) -> object:
    """ray.get with our own errors: a ConfigError raised in an actor comes out as itself."""
    try:
        return ray.get(references, timeout=timeout_s)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        raise cause if isinstance(cause, PdserveError) else Unavailable(f"an actor failed to start: {cause}") from None
    except ray.exceptions.GetTimeoutError:
        raise Unavailable(f"the cluster did not start within {timeout_s:g} s (cluster.start_timeout_s)") from None
    except ray.exceptions.RayActorError as error:
        raise Unavailable(f"an actor died while starting: {error}") from None


def _model(config: Config) -> tuple[Path, str]:
    """The checkpoint's directory and its public name. Refuses what no worker could load, before anything starts."""
    embedded = not config.model.path
    directory = embedded_model_directory() if embedded else Path(os.path.abspath(os.path.expanduser(config.model.path)))
    if not directory.is_dir():
        raise ConfigError(f"model.path = {config.model.path!r}: no such directory")
    ModelConfig.from_hf(directory)
    tensor_files(directory)
    return directory, config.model.name or (_EMBEDDED_NAME if embedded else directory.name)


def _reserve_ports(config: Config) -> list[tuple[PortReservation, PortReservation]]:
    """Each router's port for clients and for sessions: those configured and the ones after them, or any free ones."""
    router, pairs = config.router, []
    for index in range(config.cluster.routers):
        grpc_port = router.grpc_port + index if router.grpc_port else 0
        session_port = router.session_port + index if router.session_port else 0
        pairs.append(
            (
                PortReservation(router.host, grpc_port, "router.grpc_port"),
                PortReservation(router.host, session_port, "router.session_port"),
            )
        )
    return pairs


def _resolve_threads(config: Config) -> Config:
    """threads = 0 becomes the cores that this process may use, shared out among the workers."""
    here = len(os.sched_getaffinity(0))
    if config.engine.threads > here:
        raise ConfigError(f"engine.threads = {config.engine.threads}: this machine has {here} cores")
    if config.engine.threads:
        return config
    threads = max(1, machine.cores() // _worker_count(config))
    return replace(config, engine=replace(config.engine, threads=threads))


def check_memory(config: Config, directory: Path, left: machine.Memory | None) -> None:
    """Raise ConfigError where the workers' KV and weights are more than what is `left`, and say what would fit."""
    if left is None:
        return
    workers, kv_mb = _worker_count(config), config.engine.kv_cache_mb
    stored = ModelConfig.from_hf(directory).dtype
    widened = 2 if config.model.dtype == "float32" and stored != "float32" else 1
    weights_mb = widened * sum(file.stat().st_size for file in tensor_files(directory)) // 2**20
    left_mb = left.available // 2**20
    if workers * (kv_mb + weights_mb) <= left_mb:
        return
    fits_mb = left_mb // workers - weights_mb
    advice = f"at most {fits_mb} would fit" if fits_mb > 0 else "not even the weights fit: start fewer workers"
    raise ConfigError(
        f"engine.kv_cache_mb = {kv_mb}: that, and {weights_mb} MiB of weights, for each of {workers} workers is "
        f"{workers * (kv_mb + weights_mb)} MiB, and {left.source} leaves {left_mb} MiB; {advice}"
    )


def _worker_count(config: Config) -> int:
    return config.cluster.prefill + config.cluster.decode
