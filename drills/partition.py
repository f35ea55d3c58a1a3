"""A drill on the network: a decode worker behind a link of its own, which is cut in both directions and mended later.

The worker lives in a network namespace that a pair of virtual interfaces joins to this one; the routers listen on that
link. Cut, nothing arrives any more and nobody is told, as with a dead switch. Needs the rights to make namespaces.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from deploy.cluster import LocalCluster
from drills.arena import Arena, wait_for
from drills.far_worker import write_spec
from drills.faults import process_of
from drills.load import background
from drills.phases import PHASE_TIMEOUT_S
from drills.sabotage import Sabotage
from drills.stage import Round, Stage
from drills.workers import DETECT_TIMEOUT_S, MID_DECODE, MID_TOKENS
from pdserve.errors import Unavailable
from pdserve.types import Role

NEAR_ADDRESS, FAR_ADDRESS = "10.213.87.1", "10.213.87.2"
FAR_WORKER = "decode-far"

_PREFIX_BITS = 30
_START_TIMEOUT_S = 120.0


def obstacle() -> str | None:
    """Why there can be no partition here; None if there can."""
    missing = [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"a partition needs {', '.join(missing)}"
    made = subprocess.run(
        ["unshare", "-n", "ip", "link", "add", "pdtest0", "type", "veth", "peer", "name", "pdtest1"],
        capture_output=True,
        text=True,
    )
    if made.returncode or os.geteuid() != 0:
        return f"no rights to make network namespaces and links: {made.stderr.strip() or 'not root'}"
    return None


class FarNetwork:
    """A namespace and the link to it. A context manager: nothing of it is left afterwards."""

    def __init__(self) -> None:
        """Raises Unavailable where it cannot be made."""
        self._near, self._far = f"pdn{os.getpid() % 10_000_000}", f"pdf{os.getpid() % 10_000_000}"
        self._holder = subprocess.Popen(["unshare", "-n", "sleep", "infinity"], start_new_session=True)
        self._worker: subprocess.Popen[bytes] | None = None
        try:
            self._join()
        except subprocess.CalledProcessError as error:
            self.close()
            raise Unavailable(f"the link to the other namespace was not made: {error.stderr}") from None

    def __enter__(self) -> FarNetwork:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start_worker(self, cluster: LocalCluster, sabotage: Sabotage, directory: Path) -> None:
        """One more decode worker of the cluster, behind the link. Raises Unavailable where it does not join."""
        file = directory / "far.json"
        write_spec(cluster.worker_spec(Role.DECODE, FAR_WORKER), sabotage, file)
        command = [sys.executable, "-m", "drills.far_worker", str(file)]
        self._worker = subprocess.Popen(
            [*self._enter(), *command], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        looking = Arena(cluster.grpc_addresses)
        with contextlib.closing(looking):
            if not wait_for(lambda: FAR_WORKER in _members(looking), _START_TIMEOUT_S):
                raise Unavailable("the worker behind the link did not join")

    def cut(self) -> None:
        _run([*self._enter(), "ip", "link", "set", self._far, "down"])

    def mend(self) -> None:
        _run([*self._enter(), "ip", "link", "set", self._far, "up"])

    def close(self) -> None:
        for process in (self._worker, self._holder):
            if process is not None:
                process.kill()
                process.wait(timeout=10.0)
        subprocess.run(["ip", "link", "del", self._near], capture_output=True)

    def _join(self) -> None:
        wait_for(lambda: _namespace(self._holder.pid) != _namespace(os.getpid()), PHASE_TIMEOUT_S)
        add = ["ip", "link", "add", self._near, "type", "veth", "peer", "name", self._far]
        _run([*add, "netns", str(self._holder.pid)])
        _run(["ip", "addr", "add", f"{NEAR_ADDRESS}/{_PREFIX_BITS}", "dev", self._near])
        _run(["ip", "link", "set", self._near, "up"])
        _run([*self._enter(), "ip", "addr", "add", f"{FAR_ADDRESS}/{_PREFIX_BITS}", "dev", self._far])
        for interface in ("lo", self._far):
            _run([*self._enter(), "ip", "link", "set", interface, "up"])

    def _enter(self) -> list[str]:
        return ["nsenter", "-t", str(self._holder.pid), "-n"]


def partition(stage: Stage) -> None:
    """Cut the link of a decode worker in mid-decode, and mend it when its requests have gone elsewhere."""
    settings, network = stage.settings, stage.arena.network
    assert network is not None

    def disturb(round_: Round) -> None:
        round_.run.wait_tokens(round_.run.recordings, MID_TOKENS, PHASE_TIMEOUT_S)
        flowing = [each for each in round_.run.recordings if each.live and each.token_count]
        (victim,) = [worker for worker in stage.arena.workers() if worker.worker_id == FAR_WORKER]
        injected = round_.injector.note("partition", process_of(victim), MID_DECODE)
        network.cut()
        try:
            if not wait_for(lambda: injected.detected_s is not None, DETECT_TIMEOUT_S):
                stage.problems.append(f"no router noticed within {DETECT_TIMEOUT_S:g} s that {FAR_WORKER} was cut off")
            round_.run.wait()
        finally:
            network.mend()
        injected.hit = any(stage.failed_over(recording) for recording in flowing)

    stage.play(MID_DECODE, background(settings.seed, settings.streams, settings.scale), disturb)


def _members(arena: Arena) -> set[str]:
    return {worker.worker_id for info in arena.infos() if info for worker in info.workers if worker.state == "ready"}


def _namespace(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
