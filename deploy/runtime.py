"""The runtime directory of a local cluster: its sockets, its logs, Ray's session, and the state file that other
commands find it by.

    <runtime_dir>/lock           held by the process that runs the cluster, from its start to its end; its pid
                  cluster.json   who runs here and where it listens; there only while the cluster serves
                  logs/          one file of JSON lines a process
                  kv/            the KV wire's sockets
                  ray/           Ray's session

The directory is the user's alone (0700) and short: a socket's path may have 107 bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from pdserve.errors import ConfigError

_MAX_DIRECTORY_BYTES = 40  # leaves room for Ray's own long socket names
_COMPLAINT = re.compile(r"\[[^]]* [WECF] ")  # how Ray marks a line's severity, behind the date
_COMPLAINTS = 3  # of each file


@dataclass(frozen=True, slots=True)
class ClusterState:
    """What `cluster.json` holds. The start time tells this process from a later one with its pid."""

    pid: int
    started_at: float
    routers: list[str]
    model: str

    @property
    def grpc(self) -> str:
        """The first router's address."""
        return self.routers[0]

    def supervisor(self) -> psutil.Process | None:
        """The process that runs the cluster, if it is still that process."""
        try:
            process = psutil.Process(self.pid)
            alive = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
            return process if alive and abs(process.create_time() - self.started_at) < 1.0 else None
        except psutil.NoSuchProcess:
            return None


class RuntimeDirectory:
    """One cluster's directory. Made on `create`, gone on `remove`."""

    def __init__(self, configured: str) -> None:
        default = Path(tempfile.gettempdir()) / f"pdserve-{os.getuid()}"
        self.path = Path(configured or default).absolute()
        self._lock: int | None = None
        if len(os.fsencode(self.path)) > _MAX_DIRECTORY_BYTES:
            raise ConfigError(
                f"cluster.runtime_dir = {str(self.path)!r}: must be at most {_MAX_DIRECTORY_BYTES} bytes long, "
                "because sockets lie below it"
            )

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def kv_sockets(self) -> Path:
        return self.path / "kv"

    @property
    def ray(self) -> Path:
        return self.path / "ray"

    @property
    def _lock_file(self) -> Path:
        return self.path / "lock"

    @property
    def _state_file(self) -> Path:
        return self.path / "cluster.json"

    def create(self) -> None:
        """Make the directory, empty, and lock it. Raises ConfigError where a cluster runs in it or it is not ours."""
        if self.path.exists() and (self.path.is_symlink() or self.path.stat().st_uid != os.getuid()):
            raise ConfigError(f"{self.path} belongs to someone else; choose another cluster.runtime_dir")
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._take_lock()
        self._clear()
        for directory in (self.logs, self.kv_sockets, self.ray):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def supervisor(self) -> psutil.Process | None:
        """The process that runs or starts a cluster here. It holds the lock, which ends with it however it ends."""
        try:
            lock = os.open(self._lock_file, os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            with contextlib.suppress(psutil.NoSuchProcess, ValueError):
                return psutil.Process(int(os.read(lock, 20)))
        finally:
            os.close(lock)
        return None

    def _take_lock(self) -> None:
        self._lock = os.open(self._lock_file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._lock, 20).decode(errors="replace")
            os.close(self._lock)
            raise ConfigError(
                f"a cluster runs or starts already in {self.path} (pid {holder}); stop it with `pdserve down`"
            ) from None
        os.truncate(self._lock, 0)
        os.write(self._lock, str(os.getpid()).encode())

    def write_state(self, routers: list[str], model: str) -> None:
        process = psutil.Process()
        state = ClusterState(process.pid, process.create_time(), routers, model)
        draft = self._state_file.with_suffix(".new")
        draft.write_text(json.dumps(asdict(state)))
        draft.rename(self._state_file)

    def read_state(self) -> ClusterState | None:
        """Who runs here; None where nobody says so."""
        try:
            return ClusterState(**json.loads(self._state_file.read_text()))
        except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, TypeError):
            return None

    def processes(self) -> list[psutil.Process]:
        """Every process of a cluster in this directory: all of Ray's have a log open in it, whatever they call
        themselves and whoever has become their parent."""
        found: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if any(Path(file.path).is_relative_to(self.ray) for file in process.open_files()):
                    found[process.pid] = process
                    found.update((child.pid, child) for child in process.children(recursive=True))
        found.pop(os.getpid(), None)
        return list(found.values())

    def ray_complaints(self) -> str:
        """The last warnings and errors of Ray's own processes, a line each; they go with the directory."""
        logs = self.ray / "session_latest" / "logs"
        found = []
        for name in ("gcs_server.out", "gcs_server.err", "raylet.out", "raylet.err"):
            with contextlib.suppress(FileNotFoundError):
                text = (logs / name).read_text(errors="replace")
                lines = [line for line in text.splitlines() if name.endswith(".err") or _COMPLAINT.match(line)]
                found += [f"{name}: {line.strip()}" for line in lines[-_COMPLAINTS:]]
        if not (logs / "gcs_server.out").exists():
            found.append("gcs_server, the first of Ray's processes, ended before it could log a line")
        return "\n".join(found) or "Ray's processes logged no warning"

    def remove(self) -> None:
        """Delete the directory and all in it, and let go of it."""
        self._clear()
        self._lock_file.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def _clear(self) -> None:
        """Only what a cluster makes: a configured directory may hold other things of its owner's."""
        self._state_file.unlink(missing_ok=True)
        for directory in (self.logs, self.kv_sockets, self.ray):
            shutil.rmtree(directory, ignore_errors=True)
