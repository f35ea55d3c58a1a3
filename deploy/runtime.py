"""The runtime directory of a local cluster: its sockets, its logs, Ray's session, and the state file that other
commands find it by.

    <runtime_dir>/pdserve-cluster   the marker: the cluster's random id, what it made here, and the pid of the process
                                    that runs it, which holds this file locked from its start to its end
                  cluster.json      where the cluster listens; there only while it serves
                  logs/             one file of JSON lines a process
                  kv/               the KV wire's sockets
                  ray/              Ray's session

The directory is the user's alone (0700) and short: a socket's path may have 107 bytes.

Only what the marker lists is ever removed. A directory is taken where it does not exist, is empty, or has the marker
of a cluster that is gone; of that one, what is left is ended and removed first. Any other directory is refused and
stays as it is. A directory that was there before stays there, as it was, when the cluster is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from deploy.processes import end_processes, processes_of, start_ticks, terminate
from pdserve.errors import ConfigError

MARKER = "pdserve-cluster"
_STATE, _DIRECTORIES = "cluster.json", ("logs", "kv", "ray")
_MAX_DIRECTORY_BYTES = 39  # leaves room for Ray's own long socket names
_SHORT_TEMPORARY = "/tmp"
_MIN_FREE_MB = 32  # for the logs, ours and Ray's
_LOCK_TRIES, _LOCK_PAUSE_S = 10, 0.05  # a command that only looks holds the lock for a moment
_REMOVE_TRIES = 3
_COMPLAINT = re.compile(r"\[[^]]* [WECF] ")  # how Ray marks a line's severity, behind the date
_COMPLAINTS = 3  # of each file


@dataclass(frozen=True, slots=True)
class ClusterState:
    """What `cluster.json` holds."""

    pid: int
    routers: list[str]
    model: str

    @property
    def grpc(self) -> str:
        """The first router's address."""
        return self.routers[0]


@dataclass(frozen=True, slots=True)
class Marker:
    """What the marker holds. `started` tells the process from a later one with its pid, whatever the clock does."""

    cluster_id: str
    path: str  # of the directory: a copy elsewhere is no cluster's
    made: tuple[str, ...]  # names in it
    found_mode: int | None  # the directory's permissions before; None where it was made
    pid: int
    started: int

    @classmethod
    def parse(cls, text: bytes) -> Marker | None:
        try:
            values = json.loads(text)
            marker = cls(**{**values, "made": tuple(values["made"])})
        except (ValueError, TypeError, KeyError):
            return None
        plain = all(
            isinstance(name, str) and name not in ("", "..") and Path(name).name == name for name in marker.made
        )
        return marker if plain and marker.cluster_id else None


class RuntimeDirectory:
    """One cluster's directory. Made on `create`, gone on `remove`. Whatever is wrong with it is a ConfigError."""

    def __init__(self, configured: str) -> None:
        self.path = Path(os.path.abspath(configured)) if configured else _default_directory()
        self._lock: int | None = None
        if len(os.fsencode(self.path)) > _MAX_DIRECTORY_BYTES:
            raise self._refusal(f"must be at most {_MAX_DIRECTORY_BYTES} bytes long, because sockets lie below it")

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
    def cluster_id(self) -> str:
        """Of the cluster that this directory is of; empty where it is of none."""
        marker = self._marker()
        return marker.cluster_id if marker is not None else ""

    def create(self) -> str:
        """Take the directory, empty of another cluster's things, and lock it. The id of the new cluster."""
        with self._plain_errors("cannot be made"):
            exists = self._is_ours()
            self.check_own()
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found_mode = stat.S_IMODE(self.path.stat().st_mode) if exists else None
            self._take_lock()
            try:
                earlier = self._remove_earlier()
                self._write_marker(found_mode if earlier is None else earlier.found_mode)
                self.path.chmod(0o700)
                self._check_space()
                for directory in (self.logs, self.kv_sockets, self.ray):
                    directory.mkdir(mode=0o700)
                return self.cluster_id
            except BaseException:
                self._give_up(exists)
                raise

    def supervisor(self) -> psutil.Process | None:
        """The process that runs or starts a cluster here. It holds the lock, which ends with it however it ends."""
        if not self._is_ours():
            return None
        try:
            lock = os.open(self.path / MARKER, os.O_RDONLY)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._refusal(f"cannot be read: {error.strerror}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            marker = self._marker()
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(marker.pid) if marker is not None else None
                # A child that was forked before it was killed may hold the lock beyond its end.
                if process is not None and start_ticks(process.pid) == marker.started:
                    return process
        finally:
            os.close(lock)
        return None

    def write_state(self, routers: list[str], model: str) -> None:
        state = ClusterState(os.getpid(), routers, model)
        draft = self.path / f"{_STATE}.new"
        with self._plain_errors("cannot be written"):
            draft.write_text(json.dumps(asdict(state)))
            draft.rename(self.path / _STATE)

    def read_state(self) -> ClusterState | None:
        """Where the cluster listens that runs here; None while none serves."""
        if self.supervisor() is None:
            return None
        try:
            return ClusterState(**json.loads((self.path / _STATE).read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None
        except OSError as error:
            raise self._refusal(f"cannot be read: {error.strerror}") from None

    def processes(self) -> list[psutil.Process]:
        """Every process of the cluster that this directory is of, whatever has become of the one that started them."""
        return processes_of(self.cluster_id) if self.cluster_id else []

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

    def remove(self, cluster_id: str) -> None:
        """Remove what this cluster's marker lists, then the marker, and let go of the directory. Nothing where it is by
        now of another cluster, or of none. Where something cannot be removed, the marker stays, so that it can be tried
        again; raises ConfigError then."""
        try:
            marker = self._marker()
            if marker is None or marker.cluster_id != cluster_id or not self._hold():
                return
            self._remove_listed(marker)
            (self.path / MARKER).unlink(missing_ok=True)
            if marker.found_mode is not None:
                self.path.chmod(marker.found_mode)
            else:
                with contextlib.suppress(OSError):  # it holds other things by now
                    self.path.rmdir()
        except OSError as error:
            raise self._refusal(f"{error.filename} cannot be removed: {error.strerror}") from None
        finally:
            self._let_go()

    def check_own(self) -> None:
        """Raise ConfigError where there is something that no cluster made."""
        with self._plain_errors("cannot be read"):
            if not self._is_ours() or self._marker() is not None:
                return
            # An empty marker is of a cluster that was killed before it could write it, and had made nothing else.
            if any(each.name != MARKER or each.lstat().st_size for each in self.path.iterdir()):
                raise self._refusal(
                    "is not empty, and no cluster made it: nothing in it is touched; choose a new directory or an "
                    "empty one"
                )

    def _is_ours(self) -> bool:
        """False where nothing is at the path. Raises ConfigError where it is not a directory of this user's."""
        try:
            found = self.path.lstat()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._refusal(f"cannot be read: {error.strerror}") from None
        if stat.S_ISLNK(found.st_mode):
            raise self._refusal("is a link; name the directory itself")
        if not stat.S_ISDIR(found.st_mode):
            raise self._refusal("is not a directory; choose another path")
        if found.st_uid != os.geteuid():
            raise self._refusal(f"belongs to another user (id {found.st_uid}); choose a directory of your own")
        return True

    def _marker(self) -> Marker | None:
        """None where there is none, or one that is not of this directory."""
        if not self._is_ours():
            return None
        try:
            marker = Marker.parse((self.path / MARKER).read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._refusal(f"cannot be read: {error.strerror}") from None
        return marker if marker is not None and marker.path == os.path.realpath(self.path) else None

    def _take_lock(self) -> None:
        for left in reversed(range(_LOCK_TRIES)):
            if self._hold():
                return
            if left:
                time.sleep(_LOCK_PAUSE_S)
        marker = self._marker()
        holder = f" (pid {marker.pid})" if marker is not None else ""
        raise ConfigError(f"a cluster runs or starts already in {self.path}{holder}; stop it with `pdserve down`")

    def _hold(self) -> bool:
        """Whoever holds the marker's lock may write it and remove what it lists. A new marker is empty."""
        if self._lock is not None:
            return True
        lock = os.open(self.path / MARKER, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), os.stat(self.path / MARKER)):
                self._lock = lock
                return True
        except (BlockingIOError, FileNotFoundError):  # held, or removed meanwhile by the one that held it
            pass
        os.close(lock)
        return False

    def _let_go(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _remove_earlier(self) -> Marker | None:
        """What is left of a cluster whose supervisor was killed: its processes and its files. With the lock held."""
        marker = self._marker()
        if marker is not None:
            end_processes(marker.cluster_id, lambda: terminate(processes_of(marker.cluster_id)))
            self._remove_listed(marker)
        return marker

    def _write_marker(self, found_mode: int | None) -> None:
        assert self._lock is not None
        pid = os.getpid()
        marker = Marker(
            cluster_id=secrets.token_hex(16),
            path=os.path.realpath(self.path),
            made=(_STATE, f"{_STATE}.new", *_DIRECTORIES),
            found_mode=found_mode,
            pid=pid,
            started=start_ticks(pid) or 0,
        )
        text = json.dumps(asdict(marker)).encode()
        os.pwrite(self._lock, text, 0)
        os.truncate(self._lock, len(text))

    def _give_up(self, existed: bool) -> None:
        """After a failure in `create`: the marker may not have been written."""
        if cluster_id := self.cluster_id:
            self.remove(cluster_id)
            return
        self._let_go()
        with contextlib.suppress(OSError):
            (self.path / MARKER).unlink()
            if not existed:
                self.path.rmdir()

    def _remove_listed(self, marker: Marker) -> None:
        for name in marker.made:
            path = self.path / name
            if path.is_dir() and not path.is_symlink():
                for _ in range(_REMOVE_TRIES):  # a process that ends may remove things of its own meanwhile
                    with contextlib.suppress(FileNotFoundError):
                        shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def _check_space(self) -> None:
        space = os.statvfs(self.path)
        free_mb = space.f_bavail * space.f_frsize // 2**20
        if free_mb < _MIN_FREE_MB:
            raise self._refusal(f"its disk has {free_mb} MiB free; at least {_MIN_FREE_MB} are needed")

    def _refusal(self, why: str) -> ConfigError:
        return ConfigError(f"cluster.runtime_dir = {str(self.path)!r}: {why}")

    @contextlib.contextmanager
    def _plain_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._refusal(f"{what}: {error.strerror}") from None


def _default_directory() -> Path:
    """Below the temporary directory, or the usual one where that has a long name."""
    name = f"pdserve-{os.geteuid()}"
    path = Path(os.path.abspath(tempfile.gettempdir())) / name
    return path if len(os.fsencode(path)) <= _MAX_DIRECTORY_BYTES else Path(_SHORT_TEMPORARY) / name
