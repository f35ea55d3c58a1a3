"""What a process leaves when it crashes, and what it does not leave when it is killed."""

import signal
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from pdserve import crash_report
from pdserve.types import ModelLimits, Role, WorkerInfo

DIE = """
import os, sys
from pathlib import Path
from pdserve import crash_report
crash_report.enable(Path(sys.argv[1]), "decode-0")
os.kill(os.getpid(), int(sys.argv[2]))
"""


@pytest.fixture
def info(tmp_path):
    path = crash_report.path_for(tmp_path, "decode-0-a1")
    limits = ModelLimits(100, 99, 99)
    host = socket.gethostname()
    return WorkerInfo("decode-0", "decode-0-a1", Role.DECODE, 1, host, "", "", "", limits, crash_report=str(path))


def die(info, number):
    ended = subprocess.run([sys.executable, "-c", DIE, info.crash_report, str(int(number))], capture_output=True)
    assert ended.returncode == -number


@pytest.mark.parametrize(
    ("number", "says"),
    [(signal.SIGSEGV, "Segmentation fault"), (signal.SIGABRT, "Aborted"), (signal.SIGBUS, "Bus error")],
)
def test_a_crash_leaves_its_name(info, number, says):
    die(info, number)
    assert says in crash_report.read(info)


def test_a_kill_from_outside_leaves_nothing(info):
    die(info, signal.SIGKILL)
    assert crash_report.read(info) == ""


def test_of_another_host_or_of_a_process_without_reports_nothing_is_known(info):
    assert crash_report.read(info) is None
    die(info, signal.SIGKILL)
    assert crash_report.read(replace(info, host="elsewhere")) is None
    assert crash_report.read(replace(info, crash_report="")) is None


def test_a_new_start_removes_empty_reports_of_former_ones_and_keeps_crashes(info, tmp_path):
    (tmp_path / "decode-0-00.crash").touch()
    (tmp_path / "decode-0-01.crash").write_text("Fatal Python error: Aborted")
    (tmp_path / "decode-1-00.crash").touch()
    die(info, signal.SIGKILL)
    assert {path.name for path in tmp_path.iterdir()} == {"decode-0-01.crash", "decode-0-a1.crash", "decode-1-00.crash"}
