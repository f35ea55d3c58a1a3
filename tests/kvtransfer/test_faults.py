"""Each fault in each phase of a transfer: the right bytes or a typed error, in time, and nothing touched after it.

All phases of a fault run side by side, each on links of its own, so that waiting for a ttl costs once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

from kvtransfer.link import Link
from kvtransfer.transports.faulty import FaultyTransport
from kvtransfer.transports.memory import MemoryNetwork
from pdserve.clock import SystemClock
from pdserve.errors import TransferError
from support.clusters import wait_for
from support.kv_faults import CHUNK_TOKENS, FAULTS, FRUITLESS_S, LEASE_AFTER_S, PHASES, TOKEN_COUNT, FaultCase, Phase
from support.kv_links import LAYOUT, TOKENS, Expecting, Outcome, make_link, open_sender, running, send_all
from support.kv_store import FakeStore

SLACK_S = 5.0  # of this machine
WAITING_STRIKES = 3  # of a fault without a count, before the blocks come
IDS = list(range(TOKEN_COUNT))
WAITING = PHASES["waiting for blocks"]


@dataclass(frozen=True)
class Disturbed:
    """A transfer under way with a fault in it."""

    faulty: FaultyTransport
    links: tuple[Link, Link]
    source: FakeStore
    sent: Outcome
    expecting: Expecting

    def lease_once_struck(self, case: FaultCase) -> None:
        """For a fault that strikes while blocks are awaited: however slow this machine, it strikes first."""
        wait_for(lambda: self.faulty.injected[case.fault] >= (case.count or WAITING_STRIKES), "the fault strikes")
        self.expecting.lease_now()

    def check(self, case: FaultCase, until: float) -> None:
        received = self.expecting.ended.wait(until - time.monotonic())
        sent = self.sent.wait(until - time.monotonic())
        assert self.faulty.injected[case.fault] > 0, "the fault never struck"
        assert self.source.late_accesses == self.expecting.store.late_accesses == 0
        assert self.links[0].stats().outgoing == self.links[1].stats().incoming == 0
        if case.passes:
            assert (received, sent) == (TOKENS, None)
        assert received == TOKENS or isinstance(received, TransferError)
        assert sent is None or isinstance(sent, TransferError)
        if received == TOKENS:
            assert self.expecting.store.equals(self.source, 0, TOKEN_COUNT)
        if sent is None:
            assert received == TOKENS


@contextmanager
def disturbed(case: FaultCase, phase: Phase) -> Iterator[Disturbed]:
    network = MemoryNetwork()
    faulty = FaultyTransport(network.transport(), [case.rule(phase)], 1, SystemClock())
    sound = network.transport()
    at_prefill = phase.side == "prefill"
    transports = (faulty, sound) if at_prefill else (sound, faulty)
    prefill, decode = (make_link(transport, case.config) for transport in transports)
    with running(prefill, decode):
        expecting = Expecting(decode, IDS, lease=phase != WAITING, lease_after_s=LEASE_AFTER_S)
        source = FakeStore.random(LAYOUT, TOKEN_COUNT, seed=1)
        sent = Outcome(then=source.close)
        open_sender(prefill, expecting.ticket, IDS, source, sent)
        send_all(prefill, expecting.ticket, LAYOUT.layer_count, TOKEN_COUNT, CHUNK_TOKENS)
        yield Disturbed(faulty, (prefill, decode), source, sent, expecting)
    assert len(sent.calls) == len(expecting.ended.calls) == 1


@pytest.mark.parametrize("name", FAULTS)
def test_fault_in_any_phase_ends_in_time_with_right_bytes_or_a_typed_error(name: str) -> None:
    case = FAULTS[name]
    ttl_s = case.config.ticket_ttl_ms / 1000
    until = time.monotonic() + LEASE_AFTER_S + FRUITLESS_S + 2 * ttl_s + SLACK_S
    with ExitStack() as stack:
        runs = {phase: stack.enter_context(disturbed(case, PHASES[phase])) for phase in PHASES}
        runs["waiting for blocks"].lease_once_struck(case)
        for phase, run in runs.items():
            print(phase)  # shown where the check fails
            run.check(case, until)
