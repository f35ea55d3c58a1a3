"""Cores and memory: what the control groups of either version leave, not what the host has."""

import os

import pytest

from pdserve import machine

MIB = 2**20
V2_MOUNT = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{name}\n"
NO_LIMIT = 9223372036854771712  # what version 1 says


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A machine of 16 cores and 64 GiB, with 40 GiB left, as files below a folder."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    write(tmp_path, "proc/meminfo", "MemTotal:       67108864 kB\nMemAvailable:   41943040 kB\nHugePages_Total:  0\n")
    return tmp_path


def write(root, path, text):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(str(text))


def v2(root, groups, path, mount_root="/"):
    """Control groups of version 2: by path below the mount, the files of each."""
    write(root, "proc/self/cgroup", f"0::{path}\n")
    write(root, "proc/self/mountinfo", "22 1 8:1 / / rw - ext4 /dev/root rw\n" + V2_MOUNT.format(root=mount_root))
    for group, files in groups.items():
        for name, text in files.items():
            write(root, f"sys/fs/cgroup/{group}/{name}", text)


def v1(root, groups, path, mount_root="/"):
    write(root, "proc/self/cgroup", f"5:cpu,cpuacct:{path}\n4:memory:{path}\n0::/\n")
    mounts = [V1_MOUNT.format(root=mount_root, name=name) for name in ("cpu", "memory")]
    write(
        root, "proc/self/mountinfo", "".join(mounts) + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    )
    for group, files in groups.items():
        for name, text in files.items():
            write(root, f"sys/fs/cgroup/{name.partition('.')[0]}/{group}/{name}", text)


def test_a_machine_without_control_groups(host):
    assert machine.cores(host) == 16
    assert machine.memory(host) == machine.Memory(40 * 1024 * MIB, "this machine")


def test_nothing_known(tmp_path):
    assert machine.memory(tmp_path) is None
    assert machine.cores(tmp_path) == len(os.sched_getaffinity(0))


def test_this_machine():
    assert 1 <= machine.cores() <= len(os.sched_getaffinity(0))
    assert machine.memory().available > 0


def test_a_quota_of_version_2_rounds_up(host):
    v2(host, {"pod": {"cpu.max": "250000 100000\n"}}, "/pod")
    assert machine.cores(host) == 3


def test_less_than_a_core_is_one(host):
    v2(host, {"pod": {"cpu.max": "10000 100000\n"}}, "/pod")
    assert machine.cores(host) == 1


def test_fewer_cores_than_the_quota_has_time_for(host, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    v2(host, {"pod": {"cpu.max": "800000 100000\n"}}, "/pod")
    assert machine.cores(host) == 2


def test_no_limits(host):
    v2(host, {"pod": {"cpu.max": "max 100000\n", "memory.max": "max\n", "memory.current": "1\n"}}, "/pod")
    assert machine.cores(host) == 16
    assert machine.memory(host).source == "this machine"


def test_a_group_above_limits_too(host):
    v2(
        host,
        {
            "slice": {"cpu.max": "200000 100000", "memory.max": 2048 * MIB, "memory.current": 1536 * MIB},
            "slice/pod": {"cpu.max": "400000 100000", "memory.max": 1024 * MIB, "memory.current": 100 * MIB},
        },
        "/slice/pod",
    )
    assert machine.cores(host) == 2
    assert machine.memory(host) == machine.Memory(512 * MIB, "the control group's limit")


def test_the_cache_of_the_disk_counts_as_left(host):
    statistics = f"anon 1\ninactive_file {300 * MIB}\nactive_file {100 * MIB}\nshmem {50 * MIB}\n"
    files = {"memory.max": 1024 * MIB, "memory.current": 924 * MIB, "memory.stat": statistics}
    v2(host, {"pod": files}, "/pod")
    assert machine.memory(host).available == 500 * MIB


def test_a_group_beyond_its_limit_has_nothing_left(host):
    v2(host, {"pod": {"memory.max": 100 * MIB, "memory.current": 101 * MIB}}, "/pod")
    assert machine.memory(host).available == 0


def test_a_container_that_sees_its_own_group_as_the_top(host):
    v2(host, {".": {"cpu.max": "100000 100000", "memory.max": 512 * MIB, "memory.current": 12 * MIB}}, "/")
    assert machine.cores(host) == 1
    assert machine.memory(host).available == 500 * MIB


@pytest.mark.parametrize("path", ["/docker/abc", "/../elsewhere"])
def test_a_group_that_is_mounted_as_the_top_under_its_hosts_name(host, path):
    """The mount says of which group it is; the process's group may even be outside of what it sees."""
    files = {"cpu.max": "100000 100000", "memory.max": 512 * MIB, "memory.current": 12 * MIB}
    v2(host, {".": files}, path, mount_root="/docker/abc")
    assert machine.cores(host) == 1
    assert machine.memory(host).available == 500 * MIB


def test_version_1(host):
    statistics = f"inactive_file 0\nactive_file 0\ntotal_inactive_file {200 * MIB}\ntotal_active_file {100 * MIB}\n"
    files = {
        "cpu.cfs_quota_us": "150000\n",
        "cpu.cfs_period_us": "100000\n",
        "memory.limit_in_bytes": 1024 * MIB,
        "memory.usage_in_bytes": 800 * MIB,
        "memory.stat": statistics,
    }
    v1(host, {"docker/abc": files}, "/docker/abc")
    assert machine.cores(host) == 2
    assert machine.memory(host) == machine.Memory(524 * MIB, "the control group's limit")


def test_version_1_inside_a_container(host):
    files = {"cpu.cfs_quota_us": 100000, "cpu.cfs_period_us": 100000}
    v1(host, {".": files}, "/docker/abc", mount_root="/docker/abc")
    assert machine.cores(host) == 1


def test_version_1_without_limits(host):
    files = {
        "cpu.cfs_quota_us": "-1\n",
        "cpu.cfs_period_us": "100000\n",
        "memory.limit_in_bytes": NO_LIMIT,
        "memory.usage_in_bytes": 5,
    }
    v1(host, {".": files}, "/")
    assert machine.cores(host) == 16
    assert machine.memory(host).source == "this machine"


@pytest.mark.parametrize("text", ["", "\n", "x y\n", "100000\n", "100000 0\n"])
def test_files_that_make_no_sense(host, text):
    v2(host, {"pod": {"cpu.max": text, "memory.max": text, "memory.current": "", "memory.stat": text}}, "/pod")
    write(host, "proc/self/mountinfo", "nonsense\n\n - \n" + V2_MOUNT.format(root="/"))
    assert machine.cores(host) == 16
    assert machine.memory(host).source == "this machine"
