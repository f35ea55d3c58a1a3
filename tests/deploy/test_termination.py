"""What ends a process that runs a cluster lets it stop what it has started."""

import signal
import subprocess
import sys

import pytest

RUNS = """
import signal, sys
from deploy.termination import exit_on_signals
exit_on_signals()
try:
    print("runs", flush=True)
    signal.pause()
    print("still runs", flush=True)
finally:
    print("stopped", flush=True)
"""


def start(before=None):
    process = subprocess.Popen([sys.executable, "-c", RUNS], stdout=subprocess.PIPE, text=True, preexec_fn=before)
    assert process.stdout.readline() == "runs\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_it_lets_it_stop_what_it_started(number):
    process = start()
    process.send_signal(number)
    output, _ = process.communicate(timeout=20)
    assert (process.returncode, output) == (128 + number, "stopped\n")


def test_with_nohup_it_outlives_its_terminal():
    process = start(lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=20)
    assert (process.returncode, output) == (128 + signal.SIGTERM, "stopped\n")
