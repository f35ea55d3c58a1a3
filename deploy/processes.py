"""Knows the processes of a cluster, and itself, without a name, an open file or the wall clock.

Every process that a cluster starts carries the cluster's random id in its environment, and so do its children. That is
how they are found when the process that started them has been killed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

CLUSTER_ID = "PDSERVE_CLUSTER_ID"
_ROUNDS = 5  # of looking for processes that were started while others were ended
_END_TIMEOUT_S = 5.0
_STARTED = 19  # the place of the start time in /proc/PID/stat, counted behind the name


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since this machine did; None where there is none. A clock that is set
    does not move it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return int(stat[stat.rindex(b")") + 2 :].split()[_STARTED])  # the name before it may hold anything


def processes_of(cluster_id: str) -> list[psutil.Process]:
    """Every process that carries this id, but not this one."""
    carried = f"{CLUSTER_ID}={cluster_id}".encode()
    found = []
    for pid in psutil.pids():
        # The process is taken hold of before its environment is read: another one with its number is told apart.
        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            if pid != os.getpid() and carried in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(process)
    return found


def end_processes(cluster_id: str, shut_down: Callable[[], None]) -> None:
    """Let `shut_down` end what carries this id; kill what is left after some seconds."""
    processes = processes_of(cluster_id)
    shut_down()
    psutil.wait_procs(processes, timeout=_END_TIMEOUT_S)
    for _ in range(_ROUNDS):
        alive = processes_of(cluster_id)
        if not alive:
            return
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(alive, timeout=_END_TIMEOUT_S)


def terminate(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.terminate()
