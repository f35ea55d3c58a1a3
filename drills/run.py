"""Holds drills one after the other, each on a cluster that suits it, and gives their outcomes.

Drills that want the same cluster share one; after a drill that left it damaged, the next gets a new one.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from deploy.cluster import LocalCluster
from deploy.termination import exit_on_signals
from drills.arena import Arena, DetachedCluster, arena_of
from drills.catalogue import Drill
from drills.load import Recording
from drills.nodes import SECOND_WORKERS, SecondNode
from drills.partition import FarNetwork
from drills.sabotage import Sabotage
from drills.second_node import PLACES
from drills.stage import Progress, References, Round, Settings, Stage
from drills.timeline import Panel, Row
from drills.verdict import Verdict, judge, skipped
from pdserve.config import Config
from pdserve.errors import PdserveError

BASE: Mapping[str, Mapping[str, Any]] = {
    "cluster": {"prefill": 2, "decode": 2, "routers": 2},
    "router": {"grpc_port": 0},
    "engine": {"kv_cache_mb": 128},
}
_READY_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Outcome:
    verdict: Verdict
    picture: tuple[Panel, ...]


class Clusters(Protocol):
    """Where drills are held. `own`: a cluster is made for the drill, as it wants it."""

    own: bool

    def arena(self, drill: Drill) -> Arena: ...


class OwnClusters:
    """Starts the clusters that drills ask for, one at a time. A context manager."""

    def __init__(self, config: Config, progress: Progress, defect: str = "") -> None:
        """`config`: what they have in common; `defect`: one to put into all their processes, of drills.defects."""
        self.own = True
        self._config = config
        self._progress = progress
        self._sabotage = Sabotage(defect)
        self._open = contextlib.ExitStack()
        self._arena: Arena | None = None
        self._serves = ""

    def __enter__(self) -> OwnClusters:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def arena(self, drill: Drill) -> Arena:
        """Where to hold this drill. Raises PdserveError where a cluster does not start."""
        key = drill.key
        if self._arena is not None and self._serves == key and self._arena.wait_ready(_READY_TIMEOUT_S):
            return self._arena
        self._open.close()
        self._arena, self._serves = None, ""
        self._arena = self._start(drill)
        self._serves = "" if drill.detached else key
        return self._arena

    def _start(self, drill: Drill) -> Arena:
        self._progress.say("starting a cluster")
        directory = self._open.enter_context(tempfile.TemporaryDirectory(prefix="pdd-", dir="/tmp"))
        runtime = {"cluster": {"runtime_dir": f"{directory}/run"}}
        config = self._config.override(drill.changes, drill.name).override(runtime, drill.name)
        faults_file = Path(directory) / "faults.json"
        sabotage = replace(self._sabotage, faults_file=str(faults_file)) if drill.faulty_wire else self._sabotage
        if drill.detached:
            config_file = Path(directory) / "config.toml"
            arena = self._open.enter_context(DetachedCluster(config, config_file, sabotage)).arena()
        else:
            network = self._open.enter_context(FarNetwork()) if drill.far_worker else None
            cluster = self._open.enter_context(LocalCluster(config, lambda stage: exit_on_signals(), sabotage))
            node = self._second_node(cluster) if drill.second_node else None
            if network is not None:
                network.start_worker(cluster, sabotage, Path(directory))
            arena = arena_of(cluster)
            arena.node, arena.network = node, network
        arena.faults_file = faults_file if drill.faulty_wire else None
        self._open.callback(arena.close)
        return arena

    def _second_node(self, cluster: LocalCluster) -> SecondNode:
        node = self._open.enter_context(SecondNode(cluster.gcs_address, cluster.node_environment))
        cluster.add_workers(SECOND_WORKERS, PLACES)
        return node


class UsersCluster:
    """The arena of somebody's own cluster: the same for every drill, and never started or stopped."""

    def __init__(self, addresses: Sequence[str]) -> None:
        """Raises Unavailable where nobody answers."""
        self.own = False
        self._arena = Arena(addresses)

    def __enter__(self) -> UsersCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._arena.close()

    def arena(self, drill: Drill) -> Arena:
        return self._arena


def hold_all(drills: Sequence[Drill], clusters: Clusters, settings: Settings, progress: Progress) -> Iterator[Outcome]:
    """Each drill's outcome as it comes."""
    references = References()
    for drill in drills:
        yield hold(drill, clusters, settings, references, progress)


def hold(
    drill: Drill,
    clusters: Clusters,
    settings: Settings,
    references: References,
    progress: Progress,
) -> Outcome:
    """One drill. What goes wrong with it is its verdict, not an exception."""
    if drill.needs_own and not clusters.own:
        return Outcome(skipped(drill.name, "it needs a cluster of its own"), ())
    missing = drill.rights()
    if missing is not None:
        return Outcome(skipped(drill.name, missing), ())
    arena = clusters.arena(drill)
    obstacle = drill.obstacle(arena)
    if obstacle is not None:
        return Outcome(skipped(drill.name, obstacle), ())
    stage = Stage(drill.name, arena, settings, references, progress)
    begin_s = time.monotonic()
    try:
        drill.hold(stage)
    except PdserveError as error:
        stage.problems.append(f"the drill could not go on: {error}")
    evidence = stage.evidence()
    verdict = judge(drill.name, evidence, drill.rules_on(arena), settings.seed, time.monotonic() - begin_s)
    return Outcome(verdict, tuple(_panel(stage, round_) for round_ in stage.rounds))


def drill_config(config: Config) -> Config:
    """What every drill's cluster starts from: the user's settings, with workers enough to lose some."""
    return config.override(BASE, "drill")


def _panel(stage: Stage, round_: Round) -> Panel:
    sent = [recording for recording in round_.run.recordings if recording.started_s]
    moved = stage.arena.moved_requests()
    rows = tuple(_row(recording, stage.failed_over(recording, moved)) for recording in sent)
    return Panel(round_.title, rows, tuple(injected.mark() for injected in round_.injector.injected))


def _row(recording: Recording, failed_over: bool) -> Row:
    arrivals = tuple(sorted(arrival for output in recording.outputs.values() for arrival in output.arrivals))
    return Row(
        name=recording.ask.name,
        started_s=recording.started_s,
        ended_s=recording.ended_s or recording.started_s,
        arrivals=arrivals,
        failed=recording.result is None,
        failed_over=failed_over,
    )
