"""Two processes and real sockets between them: each fault in each phase, and a peer killed or frozen in each; with the
payload in the messages, in shared memory and in a gloo group.

All faults and phases of a payload's path run side by side, on links of their own, so that waiting for a ttl costs once.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.receiver import MAX_FRUITLESS_ROUNDS
from support.kv_faults import FAULTS, FRUITLESS_S, LEASE_AFTER_S, PHASES, TOKEN_COUNT
from support.kv_links import CARRIED_LIMITS, CONFIG, LAYOUT
from support.kv_process import KvProcess, KvSource, Signal, digest_of, kv_source
from support.kv_store import FakeStore

RIGHT_BYTES = digest_of(FakeStore.random(LAYOUT, TOKEN_COUNT, seed=1))
JUDGED_SILENT = re.compile("TransferError: the (sender|receiver) was silent")
SLACK_S = 5.0  # of this machine
ON_A_PAYLOADS_WAY = ("in the stream", "at COMMIT", "at ACK")


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
def source(folder: Path, payload: str) -> Iterator[KvSource]:
    with kv_source(folder / payload, payload) as made:
        yield made


Fork = Callable[[int], list[KvProcess]]


@pytest.fixture
def fork(source: KvSource) -> Iterator[Fork]:
    """Makes processes for one test."""
    yield source.fork
    source.let_end()


def short_ttl_ms(payload: str) -> int:
    """For what ends by silence. A group takes its time to be made where processes outnumber cores."""
    return 3_000 if payload == "gloo" else 2_000


def ends_within_s(payload: str, ttl_ms: int) -> float:
    """For a group, with each round's wait for a payload, and its set-up's steps."""
    group_s = MAX_FRUITLESS_ROUNDS * CARRIED_LIMITS.arrival_timeout_s + CARRIED_LIMITS.answer_timeout_s + 3.0
    ladder_s = LEASE_AFTER_S + FRUITLESS_S + 3 * ttl_ms / 1000
    return ladder_s + (group_s if payload == "gloo" else 0.0) + SLACK_S


def phases_of(payload: str, phases: dict[str, Any]) -> dict[str, Any]:
    """A group's way differs from the messages' only once a payload goes it, and is dear to set up."""
    if payload != "gloo":
        return phases
    return {phase: phases[phase] for phase in ON_A_PAYLOADS_WAY}


def check_end(end: dict[str, Any], *, passes: bool) -> None:
    assert end["late"] == 0, "KV was touched after the end"
    if passes or (end["side"] == "decode" and end["error"] is None):
        assert (end["error"], end["digest"]) == (None, RIGHT_BYTES), end["name"]
    else:
        assert end["error"] is None or end["error"].startswith("TransferError"), end["name"]


def test_any_fault_in_any_phase_ends_in_time_with_right_bytes_or_a_typed_error(fork: Fork, payload: str) -> None:
    pair = dict(zip(("prefill", "decode"), fork(2), strict=True))
    run = secrets.token_hex(4)
    cases = {
        f"{run} {fault} {phase}": (case, where)
        for fault, case in FAULTS.items()
        for phase, where in phases_of(payload, PHASES).items()
    }
    ttls_ms = {True: CONFIG.ticket_ttl_ms, False: short_ttl_ms(payload)}
    for name, (case, where) in cases.items():
        for side, process in pair.items():
            rules = [case.rule(where)] if side == where.side else []
            process.link(f"{side} {name}", rules, ttl_ms=ttls_ms[case.passes])
    for name in cases:
        ticket = pair["decode"].expect(f"decode {name}", name)
        pair["prefill"].send(f"prefill {name}", name, ticket)
    begun = time.monotonic()
    for name, (case, _) in cases.items():
        until = begun + ends_within_s(payload, ttls_ms[case.passes])
        sent, received = (p.wait("end", until - time.monotonic(), name=name) for p in pair.values())
        for end in (sent, received):
            check_end(end, passes=case.passes)
        if sent["error"] is None:
            assert received["error"] is None, name


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


def strike_all(fork: Fork, payload: str, number: int) -> tuple[KvProcess, dict[tuple[str, str], Any]]:
    """A survivor, and a victim for each side and phase, which meets signal `number` there in a transfer of its own."""
    strikes = [(side, phase) for side, moments in MOMENTS.items() for phase in phases_of(payload, moments)]
    survivor, *victims = fork(1 + len(strikes))
    struck = {
        (side, phase): (victim, strike(victim, survivor, side, phase, number, short_ttl_ms(payload)))
        for (side, phase), victim in zip(strikes, victims, strict=True)
    }
    return survivor, struck


def strike(victim: KvProcess, survivor: KvProcess, side: str, phase: str, number: int, ttl_ms: int) -> str:
    """Start a transfer in which the victim meets a signal in a phase. Returns its name."""
    name = f"{side} {signal.Signals(number).name} {phase} {secrets.token_hex(4)}"
    processes = {side: victim, OTHER[side]: survivor}
    victim.link(f"{side} {name}", moment=Signal(number, *MOMENTS[side][phase]), ttl_ms=ttl_ms)
    survivor.link(f"{OTHER[side]} {name}", ttl_ms=ttl_ms)
    lease_after_s = None if phase == "waiting for blocks" else LEASE_AFTER_S
    ticket = processes["decode"].expect(f"decode {name}", name, lease_after_s)
    processes["prefill"].send(f"prefill {name}", name, ticket)
    return name


def test_peer_killed_in_any_phase_ends_the_other_side_in_time(fork: Fork, payload: str) -> None:
    survivor, struck = strike_all(fork, payload, signal.SIGKILL)
    for where, (victim, name) in struck.items():
        victim.wait_dead(str(where))
        end = survivor.wait("end", ends_within_s(payload, short_ttl_ms(payload)), name=name)
        check_end(end, passes=where == ("prefill", "at ACK"))
        if where != ("prefill", "at ACK"):
            assert end["error"] is not None


def test_frozen_peer_ends_the_other_side_in_time_and_itself_when_it_thaws(fork: Fork, payload: str) -> None:
    survivor, struck = strike_all(fork, payload, signal.SIGSTOP)
    for where, (victim, name) in struck.items():
        end = survivor.wait("end", ends_within_s(payload, short_ttl_ms(payload)), name=name)
        check_end(end, passes=where == ("prefill", "at ACK"))
        os.kill(victim.pid, signal.SIGCONT)
        late = victim.wait("end", ends_within_s(payload, short_ttl_ms(payload)), name=name)
        check_end(late, passes=where[1] == "at ACK")
        assert not JUDGED_SILENT.match(late["error"] or ""), f"{where}: {end['error']} / {late['error']}"
        if end["error"] is None:
            assert late["error"] is None


@pytest.mark.parametrize("payload", ["shared"], indirect=True)
def test_memory_of_a_killed_sender_is_let_go_and_leaves_no_file(fork: Fork) -> None:
    files = set(os.listdir("/dev/shm"))
    prefill, decode = fork(2)
    run = secrets.token_hex(4)
    for process, name in ((prefill, "prefill"), (decode, "decode")):
        process.link(f"{name} {run}")
    before = report(decode)
    prefill.send(f"prefill {run}", run, decode.expect(f"decode {run}", run))
    check_end(decode.wait("end", name=run), passes=True)
    assert report(decode)["arenas"] == 1
    assert report(prefill)["counts"][f"prefill {run}"]["shared"] > 0
    os.kill(prefill.pid, signal.SIGKILL)
    deadline = time.monotonic() + 5.0
    while (after := report(decode))["arenas"]:
        assert time.monotonic() < deadline, "the memory of a dead process is still mapped"
    assert after["descriptors"] <= before["descriptors"] + 1  # ZMQ notices the end of a connection in its own time
    assert set(os.listdir("/dev/shm")) <= files


def report(process: KvProcess) -> dict[str, Any]:
    process.command(do="report")
    return process.wait("report")
