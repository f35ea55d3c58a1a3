"""The command's errors: one line and an exit code, in every command, and nothing is touched."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from deploy import cli, runtime, streams
from deploy.runtime import RuntimeDirectory
from pdserve import machine
from pdserve.config import Config

COMMANDS = (("status",), ("generate", "Hello"), ("drain", "decode-0"), ("down",), ("up",))
every_command = pytest.mark.parametrize("command", COMMANDS, ids=" ".join)


@pytest.fixture
def folder():
    path = Path(tempfile.mkdtemp(prefix="pdm-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def run(capsys, monkeypatch, small_checkpoint, folder):
    """Run a command here; its exit code and what it says on stderr."""
    config = folder / "pdserve.toml"
    config.write_text(f"[model]\npath = '{small_checkpoint}'\n[engine]\nkv_cache_mb = 32\n[router]\ngrpc_port = 0\n")
    monkeypatch.chdir(folder)

    def run(*arguments):
        line = [*map(str, arguments), "--config", str(config)]
        code = cli.run(line)
        monkeypatch.chdir(folder)
        return code, capsys.readouterr().err

    return run


def one_line(done, code, *words):
    returned, errors = done
    assert (returned, errors.count("\n")) == (code, 1), errors
    assert errors.startswith("pdserve: "), errors
    assert all(word in errors for word in words), errors


@every_command
def test_a_directory_that_no_cluster_made(run, folder, command):
    place = folder / "mine"
    for name in ("logs", "ray", "kv"):
        (place / name).mkdir(parents=True)
        (place / name / "diary.txt").write_text("mine")
    one_line(run(*command, "--runtime-dir", place), 2 if command[0] in ("up", "down") else 1, str(place))
    assert len(list(place.rglob("*"))) == 6


@every_command
def test_a_path_that_is_a_file(run, folder, command):
    (folder / "file").write_text("mine")
    one_line(run(*command, "--runtime-dir", folder / "file"), 2, "is not a directory")
    assert (folder / "file").read_text() == "mine"


@every_command
def test_another_users_directory(run, folder, command, monkeypatch):
    (folder / "others").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    one_line(run(*command, "--runtime-dir", folder / "others"), 2, "belongs to another user")


@every_command
def test_a_directory_that_cannot_be_read(run, folder, command, monkeypatch):
    """Not even what it is."""
    lstat = Path.lstat

    def denied(path):
        if path.name == "hidden":
            raise PermissionError(13, "Permission denied", str(path))
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", denied)
    one_line(run(*command, "--runtime-dir", folder / "hidden"), 2, "Permission denied")


@every_command
def test_a_directory_that_cannot_be_written_to(run, folder, command, monkeypatch):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", full)
    done = run(*command, "--runtime-dir", folder / "new")
    if command == ("down",):
        assert done == (0, "no cluster runs here\n")
    elif command[0] == "up":
        one_line(done, 2, "No space left on device")
    else:
        one_line(done, 1, "no cluster runs in")
    assert not (folder / "new").exists()


@every_command
def test_an_error_of_the_machines(run, folder, command, monkeypatch):
    """No trace, whatever it is: too many files, a device that fails."""

    def fails(*arguments):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(RuntimeDirectory, "__init__", fails)
    one_line(run(*command), 1, "Too many open files")


@every_command
def test_ctrl_c_has_an_exit_code(run, command, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(RuntimeDirectory, "__init__", interrupted)
    assert run(*command) == (130, "")


def test_down_where_there_is_nothing(run, folder):
    (folder / "empty").mkdir()
    for path in (folder / "none", folder / "empty"):
        assert run("down", "--runtime-dir", path) == (0, "no cluster runs here\n")
    assert (folder / "empty").is_dir()


def test_down_removes_what_a_killed_cluster_left(run, folder):
    directory = RuntimeDirectory(str(folder / "run"))
    directory.create()
    os.close(directory._lock)  # as the end of its process would
    assert run("down", "--runtime-dir", directory.path) == (0, "the cluster is down\n")
    assert not directory.path.exists()


def test_a_cluster_that_is_starting(run, folder):
    directory = RuntimeDirectory(str(folder / "run"))
    directory.create()
    try:
        one_line(run("status", "--runtime-dir", directory.path), 1, "is starting")
        one_line(run("up", "--runtime-dir", directory.path), 2, "runs or starts already")
    finally:
        directory.remove(directory.cluster_id)


def test_memory_that_is_not_there(run, folder, monkeypatch):
    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(2**20, "this machine"))
    one_line(run("up", "--runtime-dir", folder / "run"), 2, "engine.kv_cache_mb = 32", "this machine")
    assert not (folder / "run").exists()


def test_a_detached_clusters_error_is_the_commands(folder):
    """It starts in another process, whose line and code are handed on."""
    (folder / "file").touch()
    command = [sys.executable, "-m", "deploy", "up", "--detach", "--json", "--runtime-dir", str(folder / "file")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == ""
    one_line((done.returncode, done.stderr), 2, "is not a directory")


def test_json_is_json_in_any_encoding_and_for_any_number(capsys):
    value = {"text": "caf\xe9 \ud800 \N{SNOWMAN}", "nan": float("nan"), "all": [float("inf"), (1.5, float("-inf"))]}
    streams.print_json(value, indent=None)
    assert capsys.readouterr().out == (
        '{"text": "caf\\u00e9 \\ud800 \\u2603", "nan": null, "all": [null, [1.5, null]]}\n'
    )


def test_who_prints_meanwhile_prints_to_stderr(capsys):
    with streams.libraries_silent() as own:
        print("a library's")
        streams.print_json(1, file=own)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("1\n", "a library's\n")


def test_the_marker_has_a_name_of_its_own():
    assert runtime.MARKER not in ("lock", "logs", "ray", "kv")


def test_paths_stay_what_they_are_in_another_working_directory(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", "/home/someone")
    relative = Config().override({"model": {"path": "a/b"}, "cluster": {"runtime_dir": "run"}}, "test")
    absolute = cli._absolute(relative)
    assert (absolute.model.path, absolute.cluster.runtime_dir) == (f"{folder}/a/b", f"{folder}/run")
    assert cli._absolute(Config().override({"model": {"path": "~/m"}}, "test")).model.path == "/home/someone/m"
    assert cli._absolute(Config()) == Config()
