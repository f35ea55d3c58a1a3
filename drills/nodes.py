"""Drills on a whole node: a second Ray node on this host, with workers of its own, is lost at once."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping

import psutil

from drills.arena import wait_for
from drills.faults import process_of
from drills.load import background
from drills.phases import PHASE_TIMEOUT_S
from drills.stage import Round, Stage
from drills.workers import MID_DECODE, MID_TOKENS
from pdserve.errors import Unavailable
from pdserve.types import Role

SECOND_WORKERS = ((Role.PREFILL, "prefill-9"), (Role.DECODE, "decode-9"))


class SecondNode:
    """Ray's processes of another node, and the workers that run there. A context manager."""

    def __init__(self, gcs_address: str, environment: Mapping[str, str]) -> None:
        """Starts it. `environment`: what the cluster's nodes are started with. Raises Unavailable where it does not
        join."""
        self._gcs_address = gcs_address
        self._environment = os.environ | environment
        self._process = self._start()

    def __enter__(self) -> SecondNode:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def kill(self) -> None:
        """SIGKILL all of it at once, as if its machine were gone."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self._process.kill()
        self._process.wait(timeout=10.0)

    def start_again(self) -> None:
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "drills.second_node", self._gcs_address, str(len(SECOND_WORKERS))]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=self._environment
        )
        assert process.stdout is not None
        if not process.stdout.readline().startswith("ready"):
            process.kill()
            raise Unavailable("the second node did not start")
        return process


def kill_node(stage: Stage) -> None:
    """SIGKILL everything on a node in mid-decode; later another node takes its place."""
    settings, node = stage.settings, stage.arena.node
    assert node is not None

    def disturb(round_: Round) -> None:
        round_.run.wait_tokens(round_.run.recordings, MID_TOKENS, PHASE_TIMEOUT_S)
        flowing = [each for each in round_.run.recordings if each.live and each.token_count]
        there = {worker_id for _, worker_id in SECOND_WORKERS}
        lost = [worker for worker in stage.arena.workers() if worker.worker_id in there]
        injected = [round_.injector.note("kill node", process_of(worker), MID_DECODE) for worker in lost]
        node.kill()
        round_.run.wait()
        wait_for(lambda: all(each.detected_s for each in injected), PHASE_TIMEOUT_S)
        node.start_again()
        for each in injected:
            each.hit = any(stage.failed_over(recording) for recording in flowing)

    stage.play(MID_DECODE, background(settings.seed, settings.streams, settings.scale), disturb)
