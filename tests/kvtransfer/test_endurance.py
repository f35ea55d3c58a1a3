"""Many transfers through little: what is used comes back, and nobody waits unjustly."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from kvtransfer.frames import Layer
from kvtransfer.transports.faulty import Fault, FaultRule, FaultyTransport
from kvtransfer.transports.memory import MemoryNetwork
from pdserve.clock import SystemClock
from pdserve.errors import Cancelled, TransferError
from support.clusters import wait_for
from support.kv_faults import TOKEN_COUNT
from support.kv_links import (
    CONFIG,
    LAYOUT,
    OWNER,
    TOKENS,
    Expecting,
    Outcome,
    make_link,
    open_sender,
    running,
    send_all,
)
from support.kv_process import KvProcess, digest_of, kv_source
from support.kv_store import FakeStore

LINKS = ("a", "b")  # in turns, so that neither process waits for the other's answers
SEQUENTIAL = 1000 // len(LINKS)  # on each
WARM_UP = 250  # of these; the allocator's pools, caches and lingering transfers have grown after them, by some 5 MB
AT_ONCE = 128
IDS = list(range(TOKEN_COUNT))
RIGHT_BYTES = digest_of(FakeStore.random(LAYOUT, TOKEN_COUNT, seed=1))
SLACK_KB = 4096  # what an allocator may keep


def pass_over(prefill: KvProcess, decode: KvProcess, number: int) -> None:
    """One transfer on each of the links between two processes, to its end on both sides."""
    names = {link: f"{link} {number}" for link in LINKS}
    for link, name in names.items():
        prefill.send(f"prefill {link}", name, decode.expect(f"decode {link}", name, lease_after_s=0.0))
    for name in names.values():
        for process in (decode, prefill):
            end = process.wait("end", name=name)
            assert (end["error"], end["late"]) == (None, 0)
            assert end["digest"] == RIGHT_BYTES


def test_a_thousand_transfers_through_a_window_of_two_frames_leave_memory_and_descriptors_as_they_were() -> None:
    assert CONFIG.window_bytes == 2 * CONFIG.max_frame_bytes
    assert LAYOUT.layer_count * LAYOUT.payload_bytes(TOKEN_COUNT) > 4 * CONFIG.window_bytes
    with tempfile.TemporaryDirectory(prefix="kv", dir="/tmp") as folder, kv_source(Path(folder) / "s") as source:
        pair = source.fork(2)
        for side, process in zip(("prefill", "decode"), pair, strict=True):
            for link in LINKS:
                process.link(f"{side} {link}", ttl_ms=2_000)
        for number in range(WARM_UP):
            pass_over(*pair, number)
        before = reports(pair)
        for number in range(WARM_UP, SEQUENTIAL):
            pass_over(*pair, number)
        for was, now in zip(before, reports(pair), strict=True):
            assert now["rss_kb"] <= was["rss_kb"] + SLACK_KB
            assert now["descriptors"] <= was["descriptors"]
            assert now["threads"] <= was["threads"]


def reports(processes: list[KvProcess]) -> list[dict[str, int]]:
    for process in processes:
        process.command(do="report")
    return [process.wait("report") for process in processes]


def test_a_hundred_hand_offs_queued_for_longer_than_the_ttl_all_arrive() -> None:
    config, network = replace(CONFIG, ticket_ttl_ms=2_000), MemoryNetwork()
    prefill, decode = (make_link(network.transport(), config, max_transfers=AT_ONCE) for _ in range(2))
    with running(prefill, decode):
        source = FakeStore.random(LAYOUT, TOKEN_COUNT, seed=1)
        expecting = [Expecting(decode, IDS) for _ in range(AT_ONCE)]
        sent = [Outcome() for _ in expecting]
        for each, outcome in zip(expecting, sent, strict=True):
            prefill.open_sender(each.ticket, OWNER, IDS, TOKEN_COUNT, outcome)
        assert not sent[0].comes_within(1.2 * config.ticket_ttl_ms / 1000), "a ticket in the queue expired"
        assert not any(outcome.calls for outcome in sent)
        assert decode.stats().incoming == prefill.stats().outgoing == AT_ONCE
        for each in expecting:
            prefill.start_sender(each.ticket.transfer_id, source)
            send_all(prefill, each.ticket, LAYOUT.layer_count, TOKEN_COUNT, chunk_tokens=24)
        for each, outcome in zip(expecting, sent, strict=True):
            assert (each.ended.wait(), outcome.wait()) == (TOKENS, None)
            assert each.store.equals(source, 0, TOKEN_COUNT)
        assert decode.stats().incoming == prefill.stats().outgoing == 0


def test_late_writer_of_an_aborted_transfer_reaches_no_block_that_was_given_to_another() -> None:
    network = MemoryNetwork()
    late = FaultyTransport(network.transport(), [FaultRule(Fault.DELAY, Layer, seconds=2.0)], 1, SystemClock())
    prefill, decode = make_link(late), make_link(network.transport())
    with running(prefill, decode):
        first = Expecting(decode, IDS)
        sent = Outcome()
        open_sender(prefill, first.ticket, IDS, FakeStore.random(LAYOUT, TOKEN_COUNT, seed=1), sent)
        send_all(prefill, first.ticket, LAYOUT.layer_count, TOKEN_COUNT, chunk_tokens=24)
        wait_for(lambda: late.injected[Fault.DELAY], "a frame is on its way")
        decode.abort_receiver(first.ticket.transfer_id, Cancelled("the client went away"))
        assert isinstance(first.ended.wait(), Cancelled)
        written = first.store.writes
        first.store.keys[:], first.store.values[:] = 7, 7  # the blocks are another's now
        first.store.close()
        arrived = decode.stats().frames_received
        wait_for(lambda: decode.stats().frames_received > arrived, "the late frame has come")
        assert (first.store.writes, first.store.late_accesses) == (written, 0)
        assert (first.store.keys == 7).all()
        assert isinstance(sent.wait(), TransferError)


def test_window_of_one_frame_passes_a_prompt_of_many() -> None:
    config = replace(CONFIG, window_bytes=4096, max_frame_bytes=4096)
    network = MemoryNetwork()
    prefill, decode = (make_link(network.transport(), config) for _ in range(2))
    with running(prefill, decode):
        each, sent = Expecting(decode, IDS), Outcome()
        source = FakeStore.random(LAYOUT, TOKEN_COUNT, seed=1)
        open_sender(prefill, each.ticket, IDS, source, sent)
        send_all(prefill, each.ticket, LAYOUT.layer_count, TOKEN_COUNT, chunk_tokens=TOKEN_COUNT)
        assert (each.ended.wait(), sent.wait()) == (TOKENS, None)
        assert each.store.equals(source, 0, TOKEN_COUNT)
