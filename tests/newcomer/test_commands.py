"""What anybody's first environment may be like: the command serves in it, or says one line.

Each call is a process of its own, started as a shell would.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from deploy.processes import processes_of
from deploy.runtime import RuntimeDirectory
from pdserve.client import Client
from support import newcomers
from support.clusters import wait_for
from support.newcomers import Surroundings

pytestmark = pytest.mark.cluster

LONG = os.environ.get("PDSERVE_TESTS") == "long"
unshares = pytest.mark.skipif(not newcomers.can_unshare(), reason="the kernel gives this user no namespaces")


@pytest.fixture(scope="module")
def folder():
    """A short one, of this user's."""
    path = Path(tempfile.mkdtemp(prefix="pdn-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def config_file(folder, small_checkpoint):
    path = folder / "pdserve.toml"
    path.write_text(
        f"[model]\npath = '{small_checkpoint}'\n[engine]\nkv_cache_mb = 32\nthreads = 1\n"
        "[router]\ngrpc_port = 0\n[cluster]\nprefill = 1\ndecode = 1\n"
    )
    return path


@pytest.fixture(scope="module")
def surroundings(folder):
    """By name: each that a cluster must serve in."""
    return {
        "behind a proxy": newcomers.behind_a_proxy(),
        "beside another ray": newcomers.beside_another_ray(),
        "among foreign modules": newcomers.among_foreign_modules(folder / "foreign"),
        "with few descriptors": newcomers.with_few_descriptors(),
        "with a long temporary directory": newcomers.with_a_long_temporary_directory(folder / "long"),
        "in ascii": newcomers.in_ascii(),
        "without a home": newcomers.without_a_home(),
        "with a home to read": newcomers.with_a_home_to_read(folder / "home"),
        "with little shared memory": newcomers.with_little_shared_memory(),
    }


def one_line(done, code, *words):
    """On stderr, and nothing of a trace."""
    assert done.returncode == code, (done.stdout, done.stderr)
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("pdserve: "), done.stderr
    assert all(word in done.stderr for word in words), done.stderr


def served(place, config_file, *flags):
    """Start a cluster in these surroundings, and what it says of itself."""
    up = place.pdserve("up", "--detach", "--json", "--config", config_file, *flags)
    assert up.returncode == 0, up.stderr
    return json.loads(up.stdout)


@pytest.fixture(scope="module")
def hostile(surroundings):
    """All of them at once."""
    together = newcomers.plain()
    for name, each in surroundings.items():
        if newcomers.can_unshare() or not (each.stranger or each.mounts):
            together |= each if name != "with a home to read" else newcomers.plain()
    return together


@pytest.fixture(scope="module")
def cluster(folder, config_file, hostile):
    """One that was started in all of the surroundings at once: its runtime directory."""
    runtime_dir = folder / "run"
    status = served(hostile, config_file, "--runtime-dir", runtime_dir)
    assert [worker["state"] for worker in status["workers"]] == ["ready", "ready"]
    cluster_id = RuntimeDirectory(str(runtime_dir)).cluster_id
    processes = processes_of(cluster_id)
    assert len(processes) >= 5, "Ray's processes do not carry the cluster's id"
    yield runtime_dir
    down = hostile.pdserve("down", "--runtime-dir", runtime_dir)
    assert (down.returncode, down.stdout) == (0, ""), down.stderr
    assert processes_of(cluster_id) == []
    assert not [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    assert not runtime_dir.exists()


@pytest.fixture
def here(cluster):
    return ("--runtime-dir", cluster)


def test_a_cluster_that_was_started_anywhere_serves_everywhere(cluster, here, surroundings):
    expected = newcomers.plain().pdserve("generate", "Hello", "--max-tokens", 4, "--json", *here)
    tokens = json.loads(expected.stdout)["token_ids"]
    assert len(tokens) == 4
    for name, place in surroundings.items():
        if (place.stranger or place.mounts) and not newcomers.can_unshare():
            continue
        answer = place.pdserve("generate", "Hello", "--max-tokens", 4, "--json", *here)
        assert answer.returncode == 0, (name, answer.stderr)
        assert json.loads(answer.stdout)["token_ids"] == tokens, name
        assert answer.stderr == "", name


def test_its_processes_work_in_a_directory_of_their_own(cluster):
    """Nobody's working directory is theirs, or is kept busy by them."""
    directory = RuntimeDirectory(str(cluster))
    for process in directory.processes():
        assert Path(process.cwd()).is_relative_to(cluster), process
    assert directory.supervisor().cwd() == "/"


def test_nothing_is_written_into_the_home(cluster, here, folder):
    home = folder / "clean-home"
    home.mkdir()
    done = Surroundings({"HOME": str(home)}).pdserve("status", *here)
    assert done.returncode == 0, done.stderr
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("encoding", ["ascii", "latin_1"])
def test_output_that_is_not_utf_8(cluster, here, encoding):
    place = getattr(newcomers, f"in_{encoding}")()
    status = place.pdserve("status", *here)
    assert (status.returncode, status.stderr) == (0, "")
    assert "decode-0" in status.stdout
    objects = place.pdserve("status", "--json", *here)
    assert json.loads(objects.stdout)["workers"]


def test_json_is_all_that_json_prints(cluster, here):
    for arguments in (("status",), ("generate", "Hello", "--max-tokens", 2)):
        done = newcomers.plain().pdserve(*arguments, *here, "--json")
        assert (done.returncode, done.stderr) == (0, ""), arguments
        json.loads(done.stdout)


@pytest.fixture
def router(cluster):
    with Client(RuntimeDirectory(str(cluster)).read_state().routers) as client:
        yield client


def long_generation(router, here, **streams):
    """One that goes on for a while, and has begun."""
    options = ("--max-tokens", 1900, "--temperature", 1, "--seed", 1)
    process = newcomers.plain().popen("generate", "Hello", *options, *here, **streams)
    wait_for(lambda: router.server_info().running_requests, "the request runs")
    return process


def test_ctrl_c_ends_the_request_without_a_trace(router, here):
    process = long_generation(router, here, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (130, b"")
    wait_for(lambda: not router.server_info().running_requests, "its request ends")


def catches_interrupts(process):
    """Whether Python turns Ctrl-C into an exception, as the kernel knows it."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGINT - 1) & 1)


def test_ctrl_c_while_libraries_are_read_leaves_no_trace():
    process = newcomers.plain().popen("status", "--runtime-dir", "/tmp/no-such", stderr=subprocess.PIPE)
    wait_for(lambda: catches_interrupts(process), "Python has started")
    wait_for(lambda: not catches_interrupts(process), "the command has begun")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (-signal.SIGINT, b"")


def test_a_reader_that_has_gone_ends_the_request_without_a_trace(router, here):
    process = long_generation(router, here, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    process.stdout = None
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (1, b"")
    wait_for(lambda: not router.server_info().running_requests, "its request ends")


def test_a_pipe_without_a_reader(cluster, here):
    reader, writer = os.pipe()
    os.close(reader)
    process = newcomers.plain().popen("status", *here, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert process.communicate(timeout=20)[1] == b""
    assert process.returncode == 1


@pytest.mark.parametrize("arguments", [("status", "--json"), ("generate", "Hello", "--max-tokens", 2)])
def test_a_disk_that_is_full_behind_stdout(cluster, here, arguments):
    with open("/dev/full", "wb") as full:
        process = newcomers.plain().popen(*arguments, *here, stdout=full, stderr=subprocess.PIPE)
    errors = process.communicate(timeout=20)[1].decode()
    assert (process.returncode, errors) == (1, "pdserve: [Errno 28] No space left on device\n")


def test_streams_that_are_closed(cluster, here):
    shell = f"exec {sys.executable} -P -m deploy status --runtime-dir {cluster} <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", shell], timeout=20).returncode == 0


def test_a_working_directory_that_has_been_deleted(cluster, here, folder):
    gone = folder / "gone"
    gone.mkdir()
    shell = f"cd {gone} && rmdir {gone} && exec {sys.executable} -P -m deploy status --runtime-dir {cluster}"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (0, "")


@unshares
@pytest.mark.parametrize(("options", "words"), [("ro,size=64m", "Read-only file system"), ("size=1m", "MiB free")])
def test_a_disk_that_cannot_be_written(folder, options, words):
    disk = folder / "disk"
    disk.mkdir(exist_ok=True)
    done = Surroundings(mounts=[f"mount -t tmpfs -o {options} none {disk}"]).pdserve(
        "up", "--runtime-dir", disk / "run"
    )
    one_line(done, 2, "cluster.runtime_dir", words)


def test_a_module_in_the_way_is_named(tmp_path):
    (tmp_path / "model.py").touch()
    done = Surroundings({"PYTHONPATH": str(tmp_path)}).pdserve("status")
    if done.returncode != 2:  # a source tree comes first in the path of this test's processes
        done = subprocess.run(
            [sys.executable, "-m", "deploy", "status"], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
    one_line(done, 2, str(tmp_path / "model.py"))


@unshares
@pytest.mark.skipif(not LONG, reason="a start of a cluster for each: PDSERVE_TESTS=long")
@pytest.mark.parametrize(
    "name",
    [
        "behind a proxy",
        "beside another ray",
        "among foreign modules",
        "with few descriptors",
        "with a long temporary directory",
        "in ascii",
        "without a home",
        "with a home to read",
        "with little shared memory",
    ],
)
def test_each_of_the_surroundings_alone(folder, config_file, surroundings, name):
    """When the cluster that was started in all at once does not serve: which of them it was."""
    runtime_dir = folder / "alone"
    place = surroundings[name]
    try:
        served(place, config_file, "--runtime-dir", runtime_dir)
        answer = place.pdserve("generate", "Hello", "--max-tokens", 4, "--runtime-dir", runtime_dir)
        assert (answer.returncode, answer.stderr) == (0, "")
    finally:
        down = place.pdserve("down", "--runtime-dir", runtime_dir)
    assert down.returncode == 0, down.stderr
    assert not runtime_dir.exists()
