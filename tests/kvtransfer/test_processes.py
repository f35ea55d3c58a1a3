"""Two processes and real sockets between them: each fault in each phase, and a peer killed or frozen in each; with the
payload in the messages, in shared memory and in a gloo group.

Phases run side by side, on links of their own, so that waiting for a ttl costs once.
"""

from __future__ import annotations

import os
import secrets
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.kv_faults import FAULTS, LEASE_AFTER_S, PHASES, TOKEN_COUNT
from support.kv_links import CONFIG, LAYOUT
from support.kv_process import KvProcess, Signal, digest_of, kv_processes
from support.kv_store import FakeStore

TTL_S = CONFIG.ticket_ttl_ms / 1000
ENDS_WITHIN_S = LEASE_AFTER_S + 3 * TTL_S + 2.0
RIGHT_BYTES = digest_of(FakeStore.random(LAYOUT, TOKEN_COUNT, seed=1))


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kv", dir="/tmp") as made:  # short: a socket's path is limited
        yield Path(made) / "s"


@pytest.fixture(scope="module", params=["inline", "shared", "gloo"])
def payload(request: pytest.FixtureRequest) -> str:
    """What payloads go by."""
    way: str = request.param
    return way


@pytest.fixture(scope="module")
def pair(folder: Path, payload: str) -> Iterator[dict[str, KvProcess]]:
    """Processes for all tests that leave them alive."""
    with kv_processes(folder / payload, 2, payload) as (prefill, decode):
        yield {"prefill": prefill, "decode": decode}


def check_end(end: dict[str, Any], *, passes: bool) -> None:
    assert end["late"] == 0, "KV was touched after the end"
    if passes or (end["side"] == "decode" and end["error"] is None):
        assert (end["error"], end["digest"]) == (None, RIGHT_BYTES)
    else:
        assert end["error"] is None or end["error"].startswith("TransferError")


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_in_any_phase_ends_in_time_with_right_bytes_or_a_typed_error(
    pair: dict[str, KvProcess], fault: str
) -> None:
    case, run = FAULTS[fault], secrets.token_hex(4)
    for phase, where in PHASES.items():
        for side, process in pair.items():
            rules = [case.rule(where)] if side == where.side else []
            process.link(f"{side} {run} {phase}", rules)
    for phase in PHASES:
        name = f"{run} {phase}"
        ticket = pair["decode"].expect(f"decode {name}", name)
        pair["prefill"].send(f"prefill {name}", name, ticket)
    until = time.monotonic() + ENDS_WITHIN_S
    for phase in PHASES:
        ends = [p.wait("end", until - time.monotonic(), name=f"{run} {phase}") for p in pair.values()]
        for end in ends:
            check_end(end, passes=case.passes)
        sent, received = ends
        if sent["error"] is None:
            assert received["error"] is None


# When a side stops or dies: just before this message leaves, or just after it came.
MOMENTS = {
    "prefill": {
        "before OPEN": ("out", "Open", 0),
        "waiting for blocks": ("out", "Open", 1),
        "in the stream": ("out", "Layer", 3),
        "at COMMIT": ("out", "Commit", 0),
        "at ACK": ("in", "Ack", 0),
    },
    "decode": {
        "before OPEN": ("in", "Open", 0),
        "waiting for blocks": ("out", "Ping", 0),
        "in the stream": ("in", "Layer", 3),
        "at COMMIT": ("in", "Commit", 0),
        "at ACK": ("out", "Ack", 0),
    },
}
OTHER = {"prefill": "decode", "decode": "prefill"}


def strike(victim: KvProcess, survivor: KvProcess, side: str, phase: str, number: int) -> str:
    """Start a transfer in which the victim meets signal `number` in a phase. Returns its name."""
    name = f"{side} {signal.Signals(number).name} {phase}"
    processes = {side: victim, OTHER[side]: survivor}
    victim.link(f"{side} {name}", moment=Signal(number, *MOMENTS[side][phase]))
    survivor.link(f"{OTHER[side]} {name}")
    ticket = processes["decode"].expect(f"decode {name}", name)
    processes["prefill"].send(f"prefill {name}", name, ticket)
    return name


@pytest.mark.parametrize("side", MOMENTS)
def test_peer_killed_in_any_phase_ends_the_other_side_in_time(folder: Path, payload: str, side: str) -> None:
    with kv_processes(folder / payload, 6, payload) as (survivor, *victims):
        struck = {
            phase: (victim, strike(victim, survivor, side, phase, signal.SIGKILL))
            for phase, victim in zip(MOMENTS[side], victims, strict=True)
        }
        for phase, (victim, name) in struck.items():
            victim.wait_dead()
            end = survivor.wait("end", ENDS_WITHIN_S, name=name)
            check_end(end, passes=(side, phase) == ("prefill", "at ACK"))
            if (side, phase) != ("prefill", "at ACK"):
                assert end["error"] is not None


@pytest.mark.parametrize("side", MOMENTS)
def test_frozen_peer_ends_the_other_side_in_time_and_itself_when_it_thaws(
    folder: Path, payload: str, side: str
) -> None:
    with kv_processes(folder / payload, 6, payload) as (survivor, *victims):
        struck = {
            phase: (victim, strike(victim, survivor, side, phase, signal.SIGSTOP))
            for phase, victim in zip(MOMENTS[side], victims, strict=True)
        }
        for phase, (victim, name) in struck.items():
            end = survivor.wait("end", ENDS_WITHIN_S, name=name)
            check_end(end, passes=(side, phase) == ("prefill", "at ACK"))
            os.kill(victim.pid, signal.SIGCONT)
            late = victim.wait("end", ENDS_WITHIN_S, name=name)
            check_end(late, passes=phase == "at ACK")
            if end["error"] is None:
                assert late["error"] is None


def test_memory_of_a_killed_sender_is_let_go_and_leaves_no_file(folder: Path) -> None:
    files = set(os.listdir("/dev/shm"))
    with kv_processes(folder / "killed", 2, "shared") as (prefill, decode):
        for process, name in ((prefill, "prefill"), (decode, "decode")):
            process.link(name)
        before = report(decode)
        prefill.send("prefill", "first", decode.expect("decode", "first"))
        check_end(decode.wait("end", name="first"), passes=True)
        assert report(decode)["arenas"] == 1
        assert report(prefill)["counts"]["prefill"]["shared"] > 0
        os.kill(prefill.pid, signal.SIGKILL)
        deadline = time.monotonic() + 5.0
        while (after := report(decode))["arenas"]:
            assert time.monotonic() < deadline, "the memory of a dead process is still mapped"
        assert after["descriptors"] <= before["descriptors"] + 1  # ZMQ notices the end of a connection in its own time
        assert set(os.listdir("/dev/shm")) <= files


def report(process: KvProcess) -> dict[str, Any]:
    process.command(do="report")
    return process.wait("report")
