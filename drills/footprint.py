"""What a cluster's processes take over time, and whether it grows. The comparison is pure."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

SETTLE_S = 120.0  # caches and pools fill; only what comes later counts
_RSS_SHARE = 0.10
_RSS_BYTES = 32 * 1024 * 1024
_MORE_THREADS = 4
_MORE_FILES = 8


@dataclass(frozen=True, slots=True)
class Footprint:
    """One process at one moment."""

    at_s: float
    name: str
    pid: int
    rss_bytes: int
    threads: int
    files: int  # open descriptors


def footprint(at_s: float, name: str, pid: int) -> Footprint | None:
    """None where the process is gone or somebody else's."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        process = psutil.Process(pid)
        with process.oneshot():
            return Footprint(at_s, name, pid, process.memory_info().rss, process.num_threads(), process.num_fds())
    return None


@dataclass(frozen=True, slots=True)
class Trend:
    """One process that lived: the first sample after it had settled, and the last one."""

    first: Footprint
    last: Footprint

    def __str__(self) -> str:
        pairs = [
            (f"{self.first.rss_bytes // 2**20} to {self.last.rss_bytes // 2**20} MiB"),
            (f"{self.first.threads} to {self.last.threads} threads"),
            (f"{self.first.files} to {self.last.files} files"),
        ]
        return f"{', '.join(pairs)} in {self.last.at_s - self.first.at_s:.0f} s"

    def growth(self) -> list[str]:
        """What grew, in words."""
        first, last, problems = self.first, self.last, []
        if last.rss_bytes - first.rss_bytes > max(_RSS_BYTES, _RSS_SHARE * first.rss_bytes):
            mib = [sample.rss_bytes // 2**20 for sample in (first, last)]
            problems.append(f"{first.name}: memory grew from {mib[0]} to {mib[1]} MiB")
        if last.threads - first.threads > _MORE_THREADS:
            problems.append(f"{first.name}: threads grew from {first.threads} to {last.threads}")
        if last.files - first.files > _MORE_FILES:
            problems.append(f"{first.name}: open files grew from {first.files} to {last.files}")
        return problems


def trends(samples: Sequence[Footprint]) -> list[Trend]:
    """Of each process that lived on after it had settled."""
    by_process: dict[int, list[Footprint]] = {}
    for sample in samples:
        by_process.setdefault(sample.pid, []).append(sample)
    found = []
    for own in by_process.values():
        settled = [sample for sample in own if sample.at_s - own[0].at_s >= SETTLE_S]
        if len(settled) > 1:
            found.append(Trend(settled[0], settled[-1]))
    return found
