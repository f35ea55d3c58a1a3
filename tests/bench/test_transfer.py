"""The wire's measurements run and mean something; what they measure is the real wire."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.transfer import bench_integrity, bench_transports
from kvtransfer.transports.memory import MemoryNetwork
from pdserve.errors import TransferError
from support.kv_links import CONFIG, LAYOUT, TOKENS, Expecting, Outcome, make_link, open_sender, running, send_all
from support.kv_store import FakeStore

SIZE = 256 << 10


def test_transport_rows_hold_each_way_against_the_machine() -> None:
    rows = {row.transport: row for row in bench_transports(("memory", "ipc"), (SIZE,), rounds=1)}
    assert list(rows) == ["memcpy", "zmq echo", "zmq one way", "memory", "ipc"]
    assert all(row.bytes_per_s > 0 and row.frame_bytes == SIZE for row in rows.values())
    assert rows["ipc"].of_memcpy == pytest.approx(rows["ipc"].bytes_per_s / rows["memcpy"].bytes_per_s)
    assert rows["ipc"].sender_cpu_s_per_gb
    assert rows["ipc"].receiver_cpu_s_per_gb


def test_integrity_row_compares_transfers_that_both_arrived() -> None:
    (row,) = bench_integrity(("ipc",), 1 << 20, pairs=1)
    assert (row.transport, row.frame_bytes, row.pairs) == ("ipc", 1 << 20, 1)
    assert row.added_share > -1


@pytest.mark.parametrize(("sender", "receiver"), [(False, False), (False, True), (True, False)])
def test_without_integrity_on_both_sides_bytes_pass_and_a_receiver_that_checks_takes_nothing_unchecked(
    sender: bool, receiver: bool
) -> None:
    network, ids = MemoryNetwork(), list(range(40))
    prefill, decode = (make_link(network.transport(), replace(CONFIG, integrity=on)) for on in (sender, receiver))
    with running(prefill, decode):
        expecting, sent = Expecting(decode, ids), Outcome()
        source = FakeStore.random(LAYOUT, len(ids), seed=1)
        open_sender(prefill, expecting.ticket, ids, source, sent)
        send_all(prefill, expecting.ticket, LAYOUT.layer_count, len(ids), chunk_tokens=40)
        received = expecting.ended.wait()
        if receiver:
            assert isinstance(received, TransferError)
        else:
            assert received == TOKENS
            assert expecting.store.equals(source, 0, len(ids))
