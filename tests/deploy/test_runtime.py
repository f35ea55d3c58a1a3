"""The runtime directory: what a cluster removes and ends is its own, and whatever is wrong is one line."""

import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from deploy import processes, runtime
from deploy.processes import CLUSTER_ID, end_processes, processes_of, start_ticks, terminate
from deploy.runtime import MARKER, RuntimeDirectory
from pdserve.errors import ConfigError

OURS = ("logs", "ray", "kv", "cluster.json", "cluster.json.new")

# A supervisor that makes the directory, starts a process as Ray does, and is then as good as killed.
KILLED = """
import os, subprocess, sys
from deploy.runtime import RuntimeDirectory
cluster_id = RuntimeDirectory(sys.argv[1]).create()
child = subprocess.Popen(["sleep", "60"], env={**os.environ, "PDSERVE_CLUSTER_ID": cluster_id}, start_new_session=True,
    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def folder():
    """A short one: the system's temporary directories of tests have long names."""
    path = Path(tempfile.mkdtemp(prefix="pdr-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def impatient(monkeypatch):
    """Processes that nobody asks to end are not waited for."""
    monkeypatch.setattr(processes, "_END_TIMEOUT_S", 0.2)


@pytest.fixture
def started():
    """Starts processes; none is left afterwards."""
    running = []

    def start(*command, **environment):
        process = subprocess.Popen(command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL)
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.wait()


def listing(path):
    return {
        str(each.relative_to(path)): (each.lstat().st_mode, each.lstat().st_size, each.lstat().st_mtime_ns)
        for each in path.rglob("*")
    }


def killed_cluster(path):
    """The pid of a process that a cluster left behind whose supervisor was killed."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return psutil.Process(int(done.stdout))


def is_gone(process):
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_what_a_cluster_makes_it_removes_again(folder):
    directory = RuntimeDirectory(str(folder / "run"))
    cluster_id = directory.create()
    directory.write_state(["127.0.0.1:1"], "small")
    assert {each.name for each in directory.path.iterdir()} == {MARKER, "cluster.json", "logs", "kv", "ray"}
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    assert len(cluster_id) >= 16
    assert directory.read_state().routers == ["127.0.0.1:1"]
    (directory.logs / "decode-0.jsonl").write_text("{}")
    directory.remove(directory.cluster_id)
    assert list(folder.iterdir()) == []


def test_every_cluster_has_an_id_of_its_own(folder):
    directory = RuntimeDirectory(str(folder / "run"))
    ids = set()
    for _ in range(3):
        ids.add(directory.create())
        directory.remove(directory.cluster_id)
    assert len(ids) == 3


@pytest.mark.parametrize("name", [*OURS, "lock", "notes.txt", MARKER])
def test_a_directory_that_no_cluster_made_is_refused_and_stays_as_it_is(folder, name):
    place = folder / "mine"
    (place / name).mkdir(parents=True) if "." not in name and name != MARKER else place.mkdir()
    (place / name / "diary.txt" if (place / name).is_dir() else place / name).write_text("mine")
    before = listing(folder)
    directory = RuntimeDirectory(str(place))
    for attempt in (directory.create, directory.check_own):
        with pytest.raises(ConfigError, match=r"no cluster made it: nothing in it is touched") as caught:
            attempt()
        assert "\n" not in str(caught.value)
    directory.remove(directory.cluster_id)
    assert directory.processes() == []
    assert listing(folder) == before


def test_an_empty_directory_is_taken_and_stays_as_it_was(folder):
    place = folder / "empty"
    place.mkdir(mode=0o755)
    directory = RuntimeDirectory(str(place))
    directory.create()
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    directory.remove(directory.cluster_id)
    assert stat.S_IMODE(place.stat().st_mode) == 0o755
    assert list(place.iterdir()) == []


def test_what_others_put_beside_a_clusters_things_stays(folder):
    directory = RuntimeDirectory(str(folder / "run"))
    directory.create()
    (directory.path / "notes.txt").write_text("mine")
    directory.remove(directory.cluster_id)
    assert [each.name for each in directory.path.iterdir()] == ["notes.txt"]


def test_a_link_in_place_of_a_folder_is_not_followed(folder):
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "diary.txt").write_text("mine")
    directory = RuntimeDirectory(str(folder / "run"))
    directory.create()
    directory.logs.rmdir()
    directory.logs.symlink_to(elsewhere)
    directory.remove(directory.cluster_id)
    assert (elsewhere / "diary.txt").read_text() == "mine"


def test_a_copy_of_a_runtime_directory_is_no_clusters(folder):
    directory = RuntimeDirectory(str(folder / "run"))
    directory.create()
    shutil.copytree(directory.path, folder / "copy")
    before = listing(folder / "copy")
    copy = RuntimeDirectory(str(folder / "copy"))
    assert (copy.cluster_id, copy.supervisor()) == ("", None)
    with pytest.raises(ConfigError, match="no cluster made it"):
        copy.check_own()
    copy.remove(json.loads((copy.path / MARKER).read_text())["cluster_id"])
    assert listing(folder / "copy") == before
    directory.remove(directory.cluster_id)


@pytest.mark.parametrize("name", ["../elsewhere", "/etc", "a/b", "", ".."])
def test_a_marker_that_names_other_places_is_none(folder, name):
    directory = RuntimeDirectory(str(folder / "run"))
    directory.create()
    marker = directory._marker()
    (directory.path / MARKER).write_text(json.dumps({**asdict(marker), "made": [name]}))
    assert directory.cluster_id == ""
    directory.remove(directory.cluster_id)
    assert directory.logs.is_dir()


def test_who_stops_late_removes_nothing_of_the_next_cluster(folder):
    first, second = (RuntimeDirectory(str(folder / "run")) for _ in range(2))
    earlier = first.create()
    first.remove(earlier)
    later = second.create()
    before = listing(second.path)
    first.remove(earlier)
    first.remove("")
    RuntimeDirectory(str(folder / "run")).remove(later)  # it runs: whoever does not run it leaves it alone
    assert listing(second.path) == before
    second.remove(later)
    assert list(folder.iterdir()) == []


def test_two_clusters_in_one_directory(folder):
    first, second = (RuntimeDirectory(str(folder / "run")) for _ in range(2))
    first.create()
    before = listing(first.path)
    with pytest.raises(ConfigError, match=rf"runs or starts already in .* \(pid {os.getpid()}\)"):
        second.create()
    assert listing(first.path) == before
    first.remove(first.cluster_id)


def test_a_look_at_the_directory_keeps_no_cluster_from_starting(folder):
    """Commands that look hold the lock for a moment."""
    place = folder / "run"
    place.mkdir()
    with open(place / MARKER, "w") as looked_at:
        fcntl.flock(looked_at, fcntl.LOCK_SH)
        directory = RuntimeDirectory(str(place))
        original, pauses = time.sleep, []

        def end_the_look(seconds):
            pauses.append(seconds)
            fcntl.flock(looked_at, fcntl.LOCK_UN)
            original(seconds)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runtime.time, "sleep", end_the_look)
            directory.create()
    assert pauses
    directory.remove(directory.cluster_id)


def test_processes_are_known_by_the_id_they_carry(folder, started, impatient):
    directory = RuntimeDirectory(str(folder / "run"))
    cluster_id = directory.create()
    opened = directory.ray / "session.log"
    opened.touch()
    carrier = started("sleep", "60", **{CLUSTER_ID: cluster_id})
    child_of_carrier = started("sh", "-c", "sleep 60; true", **{CLUSTER_ID: cluster_id})
    others = [
        started("tail", "-f", str(opened)),
        started("sh", "-c", f"exec 3<{opened}; sleep 60; true"),
        started("sleep", "60", **{CLUSTER_ID: "0" * 32}),
        started("sleep", "60", **{f"NOT_{CLUSTER_ID}": cluster_id}),
        started("sleep", "60", TITLE=f"ray::WorkerActor {CLUSTER_ID}={cluster_id}"),
    ]
    wanted = {carrier.pid, child_of_carrier.pid}
    deadline = time.monotonic() + 10
    while len(directory.processes()) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    found = directory.processes()
    assert wanted < {each.pid for each in found}, "a process of the cluster, or its child, is not known"
    assert len(found) == 3
    end_processes(cluster_id, lambda: None)
    assert directory.processes() == []
    assert [each.poll() for each in others] == [None] * len(others)
    assert all(is_gone(each) for each in found)
    directory.remove(directory.cluster_id)


def test_this_process_is_not_among_them():
    environment = Path("/proc/self/environ").read_bytes().split(b"\0")
    assert not any(each.startswith(CLUSTER_ID.encode()) for each in environment)
    code = f"import os; from deploy.processes import processes_of; print(processes_of(os.environ['{CLUSTER_ID}']))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, CLUSTER_ID: "1" * 32}, capture_output=True, text=True
    )
    assert done.stdout == "[]\n", done.stderr


def test_processes_that_are_started_while_others_are_ended(started, impatient):
    """A node's process manager starts a worker anew, at the very moment."""
    first = started("sleep", "60", **{CLUSTER_ID: "2" * 32})
    later = []

    def start_another():
        terminate([psutil.Process(first.pid)])
        later.append(started("sleep", "60", **{CLUSTER_ID: "2" * 32}))

    end_processes("2" * 32, start_another)
    assert later[0].poll() is not None


def test_a_clock_that_is_set_makes_no_process_unknown(folder, monkeypatch):
    """Times of day that the system says a process began at move with its clock."""
    directory = RuntimeDirectory(str(folder / "run"))
    directory.create()
    directory.write_state(["127.0.0.1:1"], "small")
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: 5e9)
    monkeypatch.setattr(psutil._pslinux, "BOOT_TIME", 5e9, raising=False)
    monkeypatch.setattr(time, "time", lambda: 5e9)
    assert directory.supervisor().pid == os.getpid()
    assert directory.read_state().pid == os.getpid()
    directory.remove(directory.cluster_id)


def test_the_start_of_a_process_whose_name_holds_spaces_and_brackets(folder):
    program = folder / ") R 1 (x"
    shutil.copy("/bin/sleep", program)
    with subprocess.Popen([program, "60"]) as process:
        ticks = start_ticks(process.pid)
        ours = start_ticks(os.getpid())
        process.kill()
    assert ours <= ticks
    assert start_ticks(process.pid) is None


def test_a_lock_that_a_child_still_holds_is_of_no_supervisor(folder):
    """The supervisor is gone, its pid may be anyone's by now; a child that it forked has its descriptors."""
    code = f"""
import os, signal
from deploy.runtime import RuntimeDirectory
RuntimeDirectory({str(folder / "run")!r}).create()
if (child := os.fork()):
    print(child, flush=True)
    os.kill(os.getpid(), 9)
signal.pause()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    process.wait()
    try:
        directory = RuntimeDirectory(str(folder / "run"))
        assert directory.supervisor() is None
        assert directory.read_state() is None
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_new_cluster_ends_and_removes_what_a_killed_one_left(folder):
    place = folder / "run"
    left = killed_cluster(place)
    (place / "notes.txt").write_text("mine")
    (place / "logs" / "old.jsonl").touch()
    directory = RuntimeDirectory(str(place))
    assert [each.pid for each in directory.processes()] == [left.pid]
    assert directory.supervisor() is None
    directory.create()
    assert is_gone(left)
    assert not list(directory.logs.iterdir())
    directory.remove(directory.cluster_id)
    assert [each.name for each in place.iterdir()] == ["notes.txt"]


def test_a_directory_that_was_killed_in_the_making(folder):
    place = folder / "run"
    place.mkdir()
    (place / MARKER).touch()
    directory = RuntimeDirectory(str(place))
    assert directory.supervisor() is None
    directory.check_own()
    directory.create()
    directory.remove(directory.cluster_id)
    assert place.is_dir()


def one_line(caught, *words):
    text = str(caught.value)
    assert "\n" not in text
    assert all(word in text for word in ("cluster.runtime_dir", *words)), text


LOOKS = ("create", "check_own", "read_state", "supervisor", "processes")


@pytest.mark.parametrize("look", LOOKS)
def test_a_path_that_is_a_file(folder, look):
    (folder / "file").write_text("mine")
    with pytest.raises(ConfigError) as caught:
        getattr(RuntimeDirectory(str(folder / "file")), look)()
    one_line(caught, "is not a directory")
    assert (folder / "file").read_text() == "mine"


@pytest.mark.parametrize("look", LOOKS)
def test_a_path_below_a_file(folder, look):
    (folder / "file").write_text("mine")
    with pytest.raises(ConfigError) as caught:
        getattr(RuntimeDirectory(str(folder / "file" / "run")), look)()
    one_line(caught, "Not a directory")


@pytest.mark.parametrize("look", LOOKS)
def test_a_path_that_is_a_link(folder, look):
    (folder / "run").mkdir()
    (folder / "link").symlink_to(folder / "run")
    with pytest.raises(ConfigError) as caught:
        getattr(RuntimeDirectory(str(folder / "link")), look)()
    one_line(caught, "is a link")


@pytest.mark.parametrize("look", LOOKS)
def test_a_directory_of_another_user(folder, look, monkeypatch):
    (folder / "run").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    with pytest.raises(ConfigError) as caught:
        getattr(RuntimeDirectory(str(folder / "run")), look)()
    one_line(caught, "belongs to another user")


@pytest.mark.parametrize("failing", ["mkdir", "pwrite"])
def test_a_disk_that_takes_nothing(folder, failing, monkeypatch):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((Path, "mkdir") if failing == "mkdir" else (os, "pwrite")), full)
    with pytest.raises(ConfigError) as caught:
        RuntimeDirectory(str(folder / "run")).create()
    one_line(caught, "No space left on device")
    assert list(folder.iterdir()) == []


def test_a_disk_that_has_too_little_room(folder, monkeypatch):
    class Little:
        f_bavail, f_frsize = 3, 2**20

    monkeypatch.setattr(os, "statvfs", lambda path: Little)
    with pytest.raises(ConfigError) as caught:
        RuntimeDirectory(str(folder / "run")).create()
    one_line(caught, "its disk has 3 MiB free; at least 32")
    assert list(folder.iterdir()) == []


def test_what_cannot_be_removed_can_be_tried_again(folder, monkeypatch):
    directory = RuntimeDirectory(str(folder / "run"))
    directory.create()

    def busy(path):
        raise OSError(16, "Device or resource busy", str(path))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        with pytest.raises(ConfigError) as caught:
            directory.remove(directory.cluster_id)
    one_line(caught, "cannot be removed", "busy")
    assert directory.cluster_id
    directory.remove(directory.cluster_id)
    assert list(folder.iterdir()) == []


def test_a_temporary_directory_with_a_long_name_is_not_used(monkeypatch):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/tmp/" + 60 * "x")
    assert RuntimeDirectory("").path == Path(f"/tmp/pdserve-{os.geteuid()}")


def test_a_directory_with_a_long_name_is_refused():
    with pytest.raises(ConfigError, match="must be at most 39 bytes long"):
        RuntimeDirectory("/tmp/" + 60 * "x")


def test_nobody_s_cluster_has_no_processes():
    assert processes_of("no cluster's id") == []
    assert processes.CLUSTER_ID == "PDSERVE_CLUSTER_ID"
