"""Settings: one frozen dataclass a section, read from TOML, overridden by flags.

An unknown section or key is an error that names the nearest known one. Every default is here, nowhere else.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from pdserve.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16")
KERNELS = ("auto", "cpu", "reference")
NETWORKS = ("ipc", "tcp")
PAYLOADS = ("auto", "inline", "shared", "gloo", "nccl")
TRANSFER_MODES = ("layerwise", "chunkwise", "whole")
MAX_FRAME_BYTES = 64 * 1024 * 1024  # that the KV wire takes, whatever is set
_MAX_PORT = 65535
CPU_PATHS = ("auto", "amx", "avx512", "avx2", "portable")


@dataclass(frozen=True, slots=True)
class ServedModelConfig:
    """Which checkpoint is served. An empty `path` is the embedded SmolLM2-135M-Instruct."""

    path: str = ""
    name: str = ""  # what clients call it; default: the directory's name
    dtype: str = "auto"  # of weights and KV
    kernels: str = "auto"
    cpu_path: str = "auto"  # the instruction set of the CPU kernels; auto: the best that the machine has


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One worker's engine."""

    threads: int = 0  # 0: the machine's cores divided by the workers, at least 1
    block_tokens: int = 32
    kv_cache_mb: int = 512
    max_model_len: int = 0  # 0: what the model was trained for
    max_step_tokens: int = 256
    max_running: int = 64
    max_queued: int = 256


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """The KV wire."""

    network: str = "ipc"  # between workers: ipc within a host, tcp (encrypted) across hosts
    host: str = "127.0.0.1"  # with tcp, gloo and nccl: the address of this host that the other workers reach
    payload: str = "auto"  # how large payloads go; auto: shared memory with ipc, inline with tcp
    mode: str = "layerwise"  # when computed KV is sent: while the next layer is computed, or later (to compare)
    integrity: bool = True  # off only to measure what it costs, and then in all workers
    window_bytes: int = 32 * 1024 * 1024
    max_frame_bytes: int = 1024 * 1024
    ticket_ttl_ms: int = 5_000
    ping_interval_ms: int = 500
    deadline_ms: int = 600_000  # with the wait in the sender's queue
    max_renewals: int = 2  # senders tried after the first one before decode computes the rest itself
    renewal_failures: int = 3  # failures in a row, over all transfers, after which renewing cools down
    renewal_cooldown_ms: int = 10_000
    # How long a connection without a transfer stays: a carrier's memory costs as much to touch anew as some copies.
    connection_idle_ms: int = 15_000


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The front. Port 0: an ephemeral one."""

    host: str = "127.0.0.1"
    grpc_port: int = 50051
    session_port: int = 0
    max_attempts: int = 5
    placement_timeout_ms: int = 10_000
    ticket_timeout_ms: int = 5_000
    renew_interval_ms: int = 250
    worker_timeout_ms: int = 1_500
    max_requests: int = 512
    max_recoveries: int = 4  # attempts at once that recompute what a lost worker had; the oldest streams first
    breaker_failures: int = 3  # of a worker in a row, after which it is the last choice for a while
    breaker_cooldown_ms: int = 2_000
    poison_refusal_ms: int = 60_000  # how long a prompt is refused that crashed three workers
    drain_timeout_ms: int = 30_000  # how long a process that is told to end lets streams finish


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The local Ray cluster."""

    prefill: int = 1
    decode: int = 2
    routers: int = 1  # at router.grpc_port, and the ports after it
    runtime_dir: str = ""  # default: a short folder below the system's temporary one
    start_timeout_s: float = 120.0


@dataclass(frozen=True, slots=True)
class LoggingConfig:
    level: str = "info"


@dataclass(frozen=True, slots=True)
class Config:
    model: ServedModelConfig = field(default_factory=ServedModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def override(self, changes: Mapping[str, Mapping[str, Any]], source: str) -> Config:
        """A copy with `changes` (section -> key -> value) applied. Raises ConfigError naming `source`."""
        sections: dict[str, Any] = {}
        known_sections = {f.name for f in fields(self)}
        for section, values in changes.items():
            if section not in known_sections:
                raise ConfigError(f"{source}: unknown section [{section}]{_nearest(section, known_sections)}")
            if not isinstance(values, Mapping):
                raise ConfigError(f"{source}: {section} must be a section: write [{section}] above its keys")
            sections[section] = _override_section(getattr(self, section), section, values, source)
        config = replace(self, **sections)
        config.validate(source)
        return config

    def validate(self, source: str = "config") -> None:
        """Raise ConfigError for the first value out of its range."""
        for name, value, allowed in (
            ("model.dtype", self.model.dtype, DTYPES),
            ("model.kernels", self.model.kernels, KERNELS),
            ("model.cpu_path", self.model.cpu_path, CPU_PATHS),
            ("transfer.network", self.transfer.network, NETWORKS),
            ("transfer.payload", self.transfer.payload, PAYLOADS),
            ("transfer.mode", self.transfer.mode, TRANSFER_MODES),
            ("logging.level", self.logging.level, ("debug", "info", "warning", "error")),
        ):
            if value not in allowed:
                raise ConfigError(f"{source}: {name} = {value!r}: must be one of {', '.join(allowed)}")
        for name, port in (
            ("router.grpc_port", self.router.grpc_port),
            ("router.session_port", self.router.session_port),
        ):
            if port + self.cluster.routers - 1 > _MAX_PORT:
                raise ConfigError(f"{source}: {name} = {port}: must be at most {_MAX_PORT}, the last router's too")
        for name, number, low in (
            ("engine.threads", self.engine.threads, 0),
            ("engine.block_tokens", self.engine.block_tokens, 1),
            ("engine.kv_cache_mb", self.engine.kv_cache_mb, 1),
            ("engine.max_model_len", self.engine.max_model_len, 0),
            ("engine.max_step_tokens", self.engine.max_step_tokens, 1),
            ("engine.max_running", self.engine.max_running, 1),
            ("engine.max_queued", self.engine.max_queued, 1),
            ("transfer.max_frame_bytes", self.transfer.max_frame_bytes, 4096),
            ("transfer.window_bytes", self.transfer.window_bytes, self.transfer.max_frame_bytes),
            ("transfer.ticket_ttl_ms", self.transfer.ticket_ttl_ms, 2 * self.transfer.ping_interval_ms),
            ("transfer.ping_interval_ms", self.transfer.ping_interval_ms, 10),
            ("transfer.deadline_ms", self.transfer.deadline_ms, 1),
            ("transfer.max_renewals", self.transfer.max_renewals, 0),
            ("transfer.renewal_failures", self.transfer.renewal_failures, 1),
            ("transfer.renewal_cooldown_ms", self.transfer.renewal_cooldown_ms, 0),
            ("transfer.connection_idle_ms", self.transfer.connection_idle_ms, 0),
            ("router.grpc_port", self.router.grpc_port, 0),
            ("router.session_port", self.router.session_port, 0),
            ("router.max_attempts", self.router.max_attempts, 1),
            ("router.placement_timeout_ms", self.router.placement_timeout_ms, 0),
            ("router.ticket_timeout_ms", self.router.ticket_timeout_ms, 1),
            ("router.renew_interval_ms", self.router.renew_interval_ms, 10),
            ("router.worker_timeout_ms", self.router.worker_timeout_ms, 2 * self.router.renew_interval_ms),
            ("router.max_requests", self.router.max_requests, 1),
            ("router.max_recoveries", self.router.max_recoveries, 1),
            ("router.breaker_failures", self.router.breaker_failures, 1),
            ("router.breaker_cooldown_ms", self.router.breaker_cooldown_ms, 0),
            ("router.poison_refusal_ms", self.router.poison_refusal_ms, 0),
            ("router.drain_timeout_ms", self.router.drain_timeout_ms, 0),
            ("cluster.prefill", self.cluster.prefill, 0),
            ("cluster.routers", self.cluster.routers, 1),
            ("cluster.decode", self.cluster.decode, 1),
            ("cluster.start_timeout_s", self.cluster.start_timeout_s, 1),
        ):
            if number < low:
                raise ConfigError(f"{source}: {name} = {number}: must be at least {low}")
        _check_transfer(self.transfer, source)


def _check_transfer(transfer: TransferConfig, source: str) -> None:
    """What would only show once a link is made, or in the first transfer that waits."""
    if transfer.max_frame_bytes > MAX_FRAME_BYTES:
        raise ConfigError(
            f"{source}: transfer.max_frame_bytes = {transfer.max_frame_bytes}: must be at most {MAX_FRAME_BYTES}, the "
            "largest payload of a message; lower it (1 MiB is the fastest)"
        )
    if transfer.deadline_ms < transfer.ticket_ttl_ms:
        raise ConfigError(
            f"{source}: transfer.deadline_ms = {transfer.deadline_ms}: must be at least transfer.ticket_ttl_ms "
            f"({transfer.ticket_ttl_ms}), as no ticket outlives it; raise it, or lower transfer.ticket_ttl_ms"
        )


def load_config(path: str | Path) -> Config:
    """Read a TOML file over the defaults. Raises ConfigError with one line that names file and key."""
    try:
        with open(path, "rb") as file:
            document = tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a directory, not a TOML file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    return Config().override(document, str(path))


def _override_section(section: Any, name: str, values: Mapping[str, Any], source: str) -> Any:
    known = {f.name for f in fields(section)}
    checked = {}
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"{source}: unknown key {name}.{key}{_nearest(key, known)}")
        checked[key] = _coerce(f"{name}.{key}", value, type(getattr(section, key)), source)
    return replace(section, **checked)


def _coerce(name: str, value: Any, expected: type, source: str) -> Any:
    if expected is float and type(value) is int:
        return float(value)
    if type(value) is not expected:
        raise ConfigError(f"{source}: {name} = {value!r}: must be of type {expected.__name__}")
    return value


def _nearest(name: str, known: set[str]) -> str:
    match = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else f"; known: {', '.join(sorted(known))}"
