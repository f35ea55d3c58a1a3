"""Environments that a newcomer may start the command from, as a value: variables, and what a shell does before.

What needs rights (mounts, another user id) is done in namespaces of the process's own, where the kernel lets it.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# Of this process's, what says how a program is found and run at all.
_KEPT = ("PATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "PDSERVE_CACHE", "XDG_CACHE_HOME")
_STRANGER = 12_345  # a user id that no machine has a name for


@dataclass(frozen=True)
class Surroundings:
    """Where and how a command is run. Two of them can be joined with `|`."""

    variables: Mapping[str, str | None] = field(default_factory=dict)  # None: not there
    folder: Path | None = None
    mounts: Sequence[str] = ()  # shell commands, in a mount namespace of its own
    limits: Sequence[str] = ()  # shell commands
    stranger: bool = False  # a user id without a name and without a home

    def __or__(self, other: Surroundings) -> Surroundings:
        return Surroundings(
            {**self.variables, **other.variables},
            other.folder or self.folder,
            [*self.mounts, *other.mounts],
            [*self.limits, *other.limits],
            self.stranger or other.stranger,
        )

    def command(self, arguments: Sequence[str]) -> list[str]:
        line = shlex.join(arguments)
        if self.stranger:
            line = f"unshare --user --map-user={_STRANGER} --map-group={_STRANGER} {line}"
        line = " && ".join([*self.mounts, *self.limits, f"exec {line}"])
        return ["unshare", "--map-root-user", "--mount", "sh", "-c", line] if self.mounts else ["sh", "-c", line]

    def environment(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        changed = {"HOME": os.environ.get("HOME"), "LC_ALL": "C.UTF-8", **self.variables}
        return kept | {name: value for name, value in changed.items() if value is not None}

    def popen(self, *arguments: object, **streams: object) -> subprocess.Popen[bytes]:
        command = self.command([sys.executable, "-P", "-m", "deploy", *map(str, arguments)])
        return subprocess.Popen(command, cwd=self.folder, env=self.environment(), **streams)

    def pdserve(self, *arguments: object, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        command = self.command([sys.executable, "-P", "-m", "deploy", *map(str, arguments)])
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=timeout_s,
        )


def can_unshare() -> bool:
    """Whether the kernel gives namespaces to this user."""
    tried = Surroundings(mounts=["true"], stranger=True).command(["true"])
    return subprocess.run(tried, capture_output=True).returncode == 0


def plain() -> Surroundings:
    return Surroundings()


def behind_a_proxy() -> Surroundings:
    """One that answers nothing."""
    names = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
    address = "http://127.0.0.1:9"
    return Surroundings({each: address for name in names for each in (name, name.upper())})


def beside_another_ray() -> Surroundings:
    """Settings of a cluster that is not ours."""
    return Surroundings({"RAY_ADDRESS": "127.0.0.1:9", "RAY_TMPDIR": "/nowhere", "RAY_AUTH_MODE": "disabled"})


def among_foreign_modules(folder: Path) -> Surroundings:
    """In a folder whose modules have our packages' names, and end whatever imports them."""
    for name in ("deploy", "kernels", "router"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("raise SystemExit('a foreign module')")
    for name in ("model", "engine", "worker", "pdserve", "ray", "grpc"):
        (folder / f"{name}.py").write_text("raise SystemExit('a foreign module')")
    return Surroundings(folder=folder)


def without_a_home() -> Surroundings:
    """And without a name: any user id in a container."""
    return Surroundings({"HOME": None, "USER": None, "LOGNAME": None}, stranger=True)


def with_a_home_to_read(folder: Path) -> Surroundings:
    folder.mkdir(exist_ok=True)
    return Surroundings({"HOME": str(folder)}, mounts=[f"mount -t tmpfs -o ro,size=1m none {folder}"])


def with_little_shared_memory() -> Surroundings:
    return Surroundings(mounts=["mount -t tmpfs -o size=1m none /dev/shm"])


def with_few_descriptors() -> Surroundings:
    return Surroundings(limits=["ulimit -n 256"])


def with_a_long_temporary_directory(folder: Path) -> Surroundings:
    path = folder / ("a-temporary-directory-with-a-long-name-" * 3)
    path.mkdir(parents=True)
    return Surroundings({"TMPDIR": str(path)})


def in_ascii() -> Surroundings:
    return Surroundings({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"})


def in_latin_1() -> Surroundings:
    return Surroundings({"PYTHONIOENCODING": "latin-1"})
