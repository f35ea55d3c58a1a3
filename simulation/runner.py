"""Runs seeds, and says what came of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from simulation.cluster import Cluster
from simulation.eventlog import EventLog
from simulation.oracle import Violation
from simulation.scenario import draw
from simulation.wire import KINDS


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run. `problem` is None where all was right. `counts`: faults, fallbacks and ends of requests, by name."""

    seed: int
    events: int
    problem: str | None
    counts: Counter[str]
    log: list[str]
    kind: str = ""

    def __str__(self) -> str:
        if self.problem is None:
            return f"seed {self.seed}: right, after {self.events} events"
        kind = f" --kind {self.kind}" if self.kind else ""
        return (
            f"seed {self.seed}: {self.problem}\n  replay it with: python -m simulation --seed {self.seed} --log{kind}"
        )


@dataclass(slots=True)
class Report:
    """Many runs."""

    runs: int = 0
    events: int = 0
    wall_s: float = 0.0
    failures: list[Outcome] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        self.runs += 1
        self.events += outcome.events
        self.counts += outcome.counts
        if outcome.problem is not None:
            self.failures.append(outcome)

    def __str__(self) -> str:
        rate = self.runs / self.wall_s if self.wall_s else 0.0
        lines = [f"failed: {', '.join(str(failure.seed) for failure in self.failures)}"] if self.failures else []
        lines.append(", ".join(f"{count} {name}" for name, count in sorted(self.counts.items())))
        lines.append(
            f"{self.runs} seeds, {self.events} events, {len(self.failures)} failures "
            f"in {self.wall_s:.1f} s ({rate:.1f} seeds/s)"
        )
        return "\n".join(lines)


def simulate(seed: int, *, log: bool = False, kind: str = "") -> Outcome:
    """Run one seed's scenario, one of `simulation.wire` where `kind` names it. Prints how to replay it if it fails."""
    events = EventLog(log)
    cluster: Cluster | None = None
    problem: str | None = None
    with events.product():
        try:
            cluster = Cluster(KINDS[kind](seed) if kind else draw(seed), events)
            cluster.run()
        except Violation as violation:
            problem = str(violation)
        except Exception as error:  # whatever the product raises into an event is a find
            problem = f"{type(error).__name__}: {error}"
            if log:
                raise
    counts = cluster.counts if cluster is not None else Counter()
    outcome = Outcome(seed, cluster.events if cluster is not None else 0, problem, counts, events.lines, kind)
    if problem is not None:
        print(outcome, flush=True)
    return outcome


def run(seeds: Iterable[int], kind: str = "") -> Report:
    """Run many seeds, one after the other."""
    report = Report()
    started_at = time.perf_counter()
    for seed in seeds:
        report.add(simulate(seed, kind=kind))
    report.wall_s = time.perf_counter() - started_at
    return report
