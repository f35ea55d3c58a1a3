"""Tells a process that crashed from one that was killed from outside.

A crash (SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL) is the process's own doing: its handler writes a report before it
dies. SIGKILL leaves no time for that, so whoever finds the report empty knows that someone else ended the process.
Files are read on the host that wrote them; about other hosts nothing can be said.
"""

from __future__ import annotations

import faulthandler
import os
import socket
from pathlib import Path

from pdserve.types import WorkerInfo

_MAX_BYTES = 4096


def path_for(directory: Path, incarnation: str) -> Path:
    return directory / f"{incarnation}.crash"


def enable(path: Path, worker_id: str) -> None:
    """From now on a crash of this process leaves its stack there. Empty files of earlier starts are removed."""
    for earlier in path.parent.glob(f"{worker_id}-*{path.suffix}"):
        if not earlier.stat().st_size:
            earlier.unlink()
    faulthandler.enable(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))


def read(info: WorkerInfo) -> str | None:
    """What a worker's process left: its crash's first line, "" if it did not crash, None where nobody can tell."""
    if not info.crash_report or info.host != socket.gethostname():
        return None
    try:
        with open(info.crash_report, "rb") as file:
            first, *_ = file.read(_MAX_BYTES).decode(errors="replace").splitlines() or [""]
            return first
    except OSError:
        return None
