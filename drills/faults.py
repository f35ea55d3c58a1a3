"""Faults, each with the phase it is meant to hit, and the watch that sees how long the cluster takes over it.

An Injector signals processes of this host, notes what it did, and polls the routers meanwhile: a fault is detected when
every router that answers has the victim no longer, and recovered when all is as it was at the beginning. Whether the
fault hit its phase is found out afterwards, by whoever knows what the phase looks like.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from dataclasses import dataclass
from types import TracebackType

import psutil

from drills.arena import Arena, Process, wait_for
from drills.verdict import Mark
from pdserve.rpc.inference_pb2 import ServerInfo, WorkerStatus

NOBODY = Process("-", -1)  # the victim of a fault that strikes no process

_POLL_S = 0.05


@dataclass(slots=True)
class Injected:
    """A fault as it happened. Times on the monotonic clock."""

    at_s: float
    fault: str
    process: Process
    phase: str
    hit: bool = False
    detected_s: float | None = None
    recovered_s: float | None = None

    def mark(self) -> Mark:
        return Mark(
            at_s=self.at_s,
            fault=self.fault,
            victim=self.process.name,
            phase=self.phase,
            hit=self.hit,
            detected_s=None if self.detected_s is None else self.detected_s - self.at_s,
            recovered_s=None if self.recovered_s is None else self.recovered_s - self.at_s,
        )


def process_of(worker: WorkerStatus) -> Process:
    return Process(worker.worker_id, worker.pid, worker.incarnation)


class Injector:
    """Injects faults into one arena. As a context manager it leaves nothing frozen behind."""

    def __init__(self, arena: Arena) -> None:
        self.injected: list[Injected] = []
        self._arena = arena
        self._frozen: list[Process] = []
        self._done = threading.Event()
        self._watch = threading.Thread(target=self._watch_forever, name="drill-watch", daemon=True)

    def __enter__(self) -> Injector:
        self._watch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.thaw()
        self._done.set()
        self._watch.join()

    def kill(self, process: Process, phase: str) -> Injected:
        """SIGKILL."""
        return self._signal(process, signal.SIGKILL, "kill", phase)

    def crash(self, process: Process, phase: str) -> Injected:
        """SIGSEGV: as if the process had done it itself."""
        return self._signal(process, signal.SIGSEGV, "crash", phase)

    def freeze(self, process: Process, phase: str) -> Injected:
        """SIGSTOP, until `thaw`."""
        self._frozen.append(process)
        return self._signal(process, signal.SIGSTOP, "freeze", phase)

    def terminate(self, process: Process, phase: str) -> Injected:
        """SIGTERM: it shall finish what it has."""
        return self._signal(process, signal.SIGTERM, "terminate", phase)

    def note(self, fault: str, process: Process, phase: str) -> Injected:
        """A fault that somebody else injects, now."""
        injected = Injected(time.monotonic(), fault, process, phase)
        self.injected.append(injected)
        return injected

    def thaw(self) -> None:
        """Let everything frozen go on."""
        for process in self._frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
        self._frozen.clear()

    def settle(self) -> None:
        """Everything is ready again: let the watch see it."""
        wait_for(
            lambda: not any(each.detected_s is not None and each.recovered_s is None for each in self.injected),
            10 * _POLL_S,
        )

    def _signal(self, process: Process, number: signal.Signals, fault: str, phase: str) -> Injected:
        injected = self.note(fault, process, phase)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
        return injected

    def _watch_forever(self) -> None:
        while not self._done.wait(_POLL_S):
            waiting = [each for each in self.injected if each.recovered_s is None]
            if not waiting:
                continue
            infos, now = self._arena.infos(), time.monotonic()
            for injected in waiting:
                if injected.detected_s is None and _noticed(injected, infos):
                    injected.detected_s = now
                elif injected.detected_s is not None and _all_ready(infos, self._arena.worker_ids):
                    injected.recovered_s = now


def _noticed(injected: Injected, infos: list[ServerInfo | None]) -> bool:
    """The victim is not in any router's list of those that serve; a router is one that answers, as the same process."""
    process = injected.process
    if process.pid == NOBODY.pid:
        return False
    if not process.incarnation:
        return process.pid not in {info.pid for info in infos if info is not None} and not _runs(process.pid)
    listed = {(worker.incarnation, worker.state) for info in infos if info for worker in info.workers}
    return any(infos) and (process.incarnation, "ready") not in listed


def _all_ready(infos: list[ServerInfo | None], worker_ids: frozenset[str]) -> bool:
    return all(
        info is not None and worker_ids <= {worker.worker_id for worker in info.workers if worker.state == "ready"}
        for info in infos
    )


def _runs(pid: int) -> bool:
    """Whether it is a process that does anything: a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
