"""What a cluster's processes take over time, and whether it grows. The comparison is pure."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

_SETTLE_S = 120.0  # caches and pools fill; only what comes later counts
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


def growth(samples: Sequence[Footprint]) -> list[str]:
    """What grew, in words: of each process, the last sample against the first one after it has settled."""
    by_process: dict[int, list[Footprint]] = {}
    for sample in samples:
        by_process.setdefault(sample.pid, []).append(sample)
    return [problem for own in by_process.values() for problem in _growth_of(own)]


def _growth_of(samples: Sequence[Footprint]) -> list[str]:
    settled = [sample for sample in samples if sample.at_s - samples[0].at_s >= _SETTLE_S]
    if len(settled) < 2:
        return []
    first, last = settled[0], settled[-1]
    problems = []
    if last.rss_bytes - first.rss_bytes > max(_RSS_BYTES, _RSS_SHARE * first.rss_bytes):
        mib = [sample.rss_bytes // 2**20 for sample in (first, last)]
        problems.append(f"{first.name}: memory grew from {mib[0]} to {mib[1]} MiB")
    if last.threads - first.threads > _MORE_THREADS:
        problems.append(f"{first.name}: threads grew from {first.threads} to {last.threads}")
    if last.files - first.files > _MORE_FILES:
        problems.append(f"{first.name}: open files grew from {first.files} to {last.files}")
    return problems
