"""What this process may use of its machine: cores and memory, as the kernel and the control groups around it say.

A container sees its host's cores and memory; what it may use of them stands in its control groups, of version 1 or 2,
and in those above. Files that are missing or say nothing mean no limit.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_RECLAIMABLE = ("inactive_file", "active_file")  # the disk's cache


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that can still be used, and who says so: the machine or a limit of its control groups."""

    available: int
    source: str


def cores(root: Path = Path("/")) -> int:
    """How many cores' worth of time there is: those this process may run on, or less by a quota. At least one."""
    allowed = len(os.sched_getaffinity(0))
    quotas = [quota for group in _groups(root, "cpu") if (quota := _cpu_quota(group)) is not None]
    return max(1, min([allowed, *(math.ceil(quota) for quota in quotas)]))


def memory(root: Path = Path("/")) -> Memory | None:
    """What is left for new memory; None where nothing says so."""
    found = []
    if (available := _meminfo(root / "proc/meminfo").get("MemAvailable")) is not None:
        found.append(Memory(available, "this machine"))
    for group in _groups(root, "memory"):
        if (left := _memory_left(group)) is not None:
            found.append(Memory(left, "the control group's limit"))
    return min(found, key=lambda each: each.available, default=None)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control groups that may limit `controller`, with those above them."""
    mounts = list(_mounts(root))
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        for kind, mount_root, mount_point, options in mounts:
            unified = not names and kind == "cgroup2"
            if unified or (kind == "cgroup" and controller in names.split(",") and controller in options):
                yield from _upwards(root / mount_point.lstrip("/"), mount_root, path)


def _mounts(root: Path) -> Iterator[tuple[str, str, str, list[str]]]:
    """Of control groups: kind, what of its tree is mounted, where, and its options."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, separator, behind = line.partition(" - ")
        fields, kinds = before.split(), behind.split()
        if separator and len(fields) >= 5 and len(kinds) >= 3 and kinds[0] in ("cgroup", "cgroup2"):
            yield kinds[0], fields[3], fields[4], kinds[2].split(",")


def _upwards(mount_point: Path, mount_root: str, path: str) -> Iterator[Path]:
    """From the group up to what is mounted. A container's own group may be mounted as if it were the top."""
    relative = os.path.relpath(path, mount_root)
    group = mount_point if relative.startswith("..") else mount_point / relative
    while True:
        yield group
        if group == mount_point or mount_point not in group.parents:
            return
        group = group.parent


def _cpu_quota(group: Path) -> float | None:
    """Cores' worth of time."""
    fields = _text(group / "cpu.max").split()  # version 2: "max 100000"
    if not fields:
        fields = [_text(group / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
    try:
        quota, period = (int(field) for field in fields)
    except ValueError:
        return None
    return quota / period if quota > 0 and period > 0 else None


def _memory_left(group: Path) -> int | None:
    for limit_name, usage_name in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            limit, usage = int(_text(group / limit_name)), int(_text(group / usage_name))
        except ValueError:  # not there, or "max"
            continue
        statistics = dict(line.split()[:2] for line in _text(group / "memory.stat").splitlines() if " " in line)
        # Version 1 counts the groups below in names of their own; usage always counts them.
        cache = sum(int(statistics.get(f"total_{name}", statistics.get(name, 0))) for name in _RECLAIMABLE)
        return max(0, limit - max(0, usage - cache))
    return None


def _meminfo(path: Path) -> dict[str, int]:
    """Bytes by name."""
    lines = (line.split() for line in _text(path).splitlines())
    return {fields[0].rstrip(":"): int(fields[1]) * 1024 for fields in lines if len(fields) >= 2}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
