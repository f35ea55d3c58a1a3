"""Links of two workers over real transports: whole transfers, repairs, ends, and what must not stay behind."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvtransfer.frames import Commit, type_of
from kvtransfer.link import Link
from kvtransfer.transports.base import Event, Part, Peer, Transport, fresh_buffer
from kvtransfer.transports.memory import MemoryNetwork
from kvtransfer.transports.zmq import ZmqTransport, ipc_endpoint
from pdserve.config import TransferConfig
from pdserve.errors import (
    AlreadyExists,
    Cancelled,
    ConfigError,
    DataLoss,
    FailedPrecondition,
    InternalError,
    ResourceExhausted,
    TransferError,
    Unavailable,
)
from pdserve.kv_format import KVFormat
from pdserve.tracing import Trace
from pdserve.types import Ticket
from support.kv_links import (
    CALM,
    CONFIG,
    IMPATIENT,
    LAYOUT,
    OWNER,
    TOKENS,
    WAIT_S,
    Expecting,
    Outcome,
    TransportFactory,
    make_link,
    open_sender,
    running,
    send_all,
    transport_factory,
)
from support.kv_store import FakeStore


@pytest.fixture(params=["memory", "ipc", "tcp"])
def transports(request: pytest.FixtureRequest, tmp_path: Path) -> TransportFactory:
    return transport_factory(request.param, tmp_path)


@pytest.fixture
def memory() -> TransportFactory:
    return MemoryNetwork().transport


def ids(count: int) -> list[int]:
    return list(range(1000, 1000 + count))


class Sending:
    """The sending engine of one transfer whose whole prompt is computed already."""

    def __init__(
        self, link: Link, ticket: Ticket, count: int, *, chunk_tokens: int = 24, seed: int = 1, send: bool = True
    ) -> None:
        self.store = FakeStore.random(LAYOUT, max(count, 1), seed)
        self.ended = Outcome(then=self.store.close)
        open_sender(link, ticket, ids(count), self.store, self.ended)
        if send:
            send_all(link, ticket, LAYOUT.layer_count, count, chunk_tokens)


def test_whole_transfer_arrives_bit_equal(transports: TransportFactory) -> None:
    prefill, decode = make_link(transports(), CALM), make_link(transports(), CALM)
    with running(prefill, decode):
        expecting = Expecting(decode, ids(100))
        sending = Sending(prefill, expecting.ticket, 100)
        assert expecting.ended.wait() == TOKENS
        assert sending.ended.wait() is None
    assert expecting.store.equals(sending.store, 0, 100)
    assert prefill.stats().bytes_sent >= LAYOUT.payload_bytes(100) * 2
    assert prefill.stats().frames_resent == prefill.stats().frames_refused == decode.stats().frames_refused == 0
    assert sending.store.late_accesses == 0


# 16 tokens are a frame, 32 a block of the list and the window, 24 a chunk.
@pytest.mark.parametrize("cached", [0, 5, 31, 32, 33])
@pytest.mark.parametrize("chunk", [1, 24, 1000])
def test_lengths_across_the_borders_of_block_chunk_frame_and_window(
    memory: TransportFactory, chunk: int, cached: int
) -> None:
    prefill, decode = make_link(memory()), make_link(memory())
    with running(prefill, decode):
        for count in sorted({border + shift for border in (1, 16, 24, 32, 64, 72, 96) for shift in (-1, 0, 1)}):
            if count < cached:
                continue
            expecting = Expecting(decode, ids(count), cached_tokens=cached)
            sending = Sending(prefill, expecting.ticket, count, chunk_tokens=chunk, seed=count)
            assert expecting.ended.wait() == TOKENS, f"{count} tokens"
            assert sending.ended.wait() is None
            assert expecting.store.equals(sending.store, cached, count), f"{count} tokens"
            assert not expecting.store.keys[:, :cached].any()
    assert prefill.stats().frames_resent == 0


def test_many_transfers_both_ways_at_once(transports: TransportFactory) -> None:
    links = make_link(transports()), make_link(transports())
    with running(*links):
        pairs = []
        for number in range(30):
            prefill, decode = links[number % 2], links[1 - number % 2]
            expecting = Expecting(decode, ids(40 + number))
            pairs.append((expecting, Sending(prefill, expecting.ticket, 40 + number, seed=number)))
        for number, (expecting, sending) in enumerate(pairs):
            assert expecting.ended.wait() == TOKENS
            assert sending.ended.wait() is None
            assert expecting.store.equals(sending.store, 0, 40 + number)
    assert links[0].stats().outgoing == links[0].stats().incoming == 0


def test_worker_may_send_to_itself(transports: TransportFactory) -> None:
    link = make_link(transports())
    with running(link):
        expecting = Expecting(link, ids(70))
        sending = Sending(link, expecting.ticket, 70)
        assert expecting.ended.wait() == TOKENS
        assert sending.ended.wait() is None
    assert expecting.store.equals(sending.store, 0, 70)


class Meddling:
    """A transport whose sent messages a test may change: `change(parts)` gives what goes out, None drops it."""

    def __init__(self, inner: Transport, change: Callable[[list[bytes]], list[bytes] | None]) -> None:
        self._inner = inner
        self._change = change
        self.endpoint = inner.endpoint
        self.connect, self.disconnect = inner.connect, inner.disconnect
        self.receive, self.wake, self.close = inner.receive, inner.wake, inner.close

    def buffer(self, peer: Peer, byte_count: int) -> memoryview:
        return fresh_buffer(byte_count)

    def send(self, peer: Peer, parts: Sequence[Part]) -> None:
        changed = self._change([bytes(part) for part in parts])
        if changed is not None:
            self._inner.send(peer, changed)


Change = Callable[[list[bytes]], list[bytes] | None]


def nth_payload(numbers: set[int], change: Change) -> Change:
    """Apply `change` to these messages with a payload, counted from 0."""
    seen = iter(range(10**6))

    def meddle(parts: list[bytes]) -> list[bytes] | None:
        return change(parts) if len(parts) == 2 and next(seen) in numbers else parts

    return meddle


def flip(parts: list[bytes]) -> list[bytes]:
    return [parts[0], bytes([parts[1][0] ^ 1]) + parts[1][1:]]


def test_damaged_payloads_are_repaired(memory: TransportFactory) -> None:
    damaged = {0, 2, 5, 9, 13}  # the last of them is a COMMIT
    prefill, decode = make_link(Meddling(memory(), nth_payload(damaged, flip))), make_link(memory())
    with running(prefill, decode):
        expecting = Expecting(decode, ids(70))
        sending = Sending(prefill, expecting.ticket, 70)
        assert expecting.ended.wait() == TOKENS
        assert sending.ended.wait() is None
    assert expecting.store.equals(sending.store, 0, 70)
    assert decode.stats().checksum_failures == len(damaged)
    assert prefill.stats().frames_resent >= 4


def test_lost_payloads_are_repaired(memory: TransportFactory) -> None:
    prefill = make_link(Meddling(memory(), nth_payload({1, 4, 8, 10, 12}, lambda parts: None)))
    decode = make_link(memory())
    with running(prefill, decode):
        expecting = Expecting(decode, ids(70))
        sending = Sending(prefill, expecting.ticket, 70)
        assert expecting.ended.wait() == TOKENS
    assert expecting.store.equals(sending.store, 0, 70)


class FlakyWriter:
    """Stores wrong bytes for the first `times` writes."""

    def __init__(self, store: FakeStore, times: int) -> None:
        self._store = store
        self._times = times
        self.read_into = store.read_into

    def write(self, layer: int, start: int, stop: int, payload: memoryview) -> None:
        self._store.write(layer, start, stop, payload)
        if self._times > 0:
            self._times -= 1
            self._store.values[layer, stop - 1, -1] ^= 1


def test_block_stored_wrong_is_repaired_before_it_is_used(memory: TransportFactory) -> None:
    prefill, decode = make_link(memory()), make_link(memory())
    target = FakeStore(LAYOUT, 70)
    with running(prefill, decode):
        expecting = Expecting(decode, ids(70), writer=FlakyWriter(target, 3))
        sending = Sending(prefill, expecting.ticket, 70)
        assert expecting.ended.wait() == TOKENS
    assert target.equals(sending.store, 0, 70)
    assert decode.stats().integrity_failures > 0


def test_store_that_never_keeps_what_is_written_is_data_loss(memory: TransportFactory) -> None:
    prefill, decode = make_link(memory()), make_link(memory())
    with running(prefill, decode):
        expecting = Expecting(decode, ids(70), writer=FlakyWriter(FakeStore(LAYOUT, 70), 10**6))
        sending = Sending(prefill, expecting.ticket, 70)
        assert isinstance(expecting.ended.wait(), DataLoss)
        assert isinstance(sending.ended.wait(), DataLoss)


@pytest.mark.parametrize("difference", ["model", "layout", "prompt", "range", "frame size"])
def test_disagreement_fails_both_sides_with_both_values(memory: TransportFactory, difference: str) -> None:
    layout = replace(LAYOUT, head_dim=16) if difference == "layout" else LAYOUT
    config = replace(CONFIG, max_frame_bytes=8192) if difference == "frame size" else CONFIG
    prefill = make_link(memory(), config, layout, model=b"other" if difference == "model" else b"model")
    decode = make_link(memory())
    with running(prefill, decode):
        stop = 39 if difference == "range" else None
        expecting = Expecting(decode, [*ids(39), 7] if difference == "prompt" else ids(40), token_stop=stop)
        sending = Sending(prefill, expecting.ticket, 40, send=False)
        error = expecting.ended.wait()
        assert isinstance(error, FailedPrecondition)
        assert "the sender has" in error.message
        refused = sending.ended.wait()
        assert isinstance(refused, FailedPrecondition)
        assert refused.message == error.message[: len(refused.message)]


def test_abort_of_the_receiver_ends_both_sides_in_every_state(transports: TransportFactory) -> None:
    prefill, decode = make_link(transports()), make_link(transports())
    error = Cancelled("the client went away")
    with running(prefill, decode):
        untouched = Expecting(decode, ids(70))
        decode.abort_receiver(untouched.ticket.transfer_id, error)
        assert untouched.ended.wait() is error
        late = Sending(prefill, untouched.ticket, 70)
        assert isinstance(late.ended.wait(), TransferError)

        waiting = Expecting(decode, ids(70), lease=False)
        sending = Sending(prefill, waiting.ticket, 70)
        assert waiting.needed.wait(WAIT_S)
        decode.abort_receiver(waiting.ticket.transfer_id, error)
        assert waiting.ended.wait() is error
        assert isinstance(sending.ended.wait(), TransferError)
        waiting.lease_now()  # lost the race; must not matter

        receiving = Expecting(decode, ids(70))
        computing = Sending(prefill, receiving.ticket, 70, send=False)
        assert receiving.needed.wait(WAIT_S)
        decode.abort_receiver(receiving.ticket.transfer_id, error)
        decode.abort_receiver(receiving.ticket.transfer_id, error)
        assert receiving.ended.wait() is error
        assert isinstance(computing.ended.wait(), TransferError)
    for outcome in (untouched, waiting, receiving):
        assert len(outcome.ended.calls) == 1


def test_abort_of_the_sender_ends_both_sides(transports: TransportFactory) -> None:
    prefill, decode = make_link(transports()), make_link(transports())
    error = Cancelled("the client went away")
    with running(prefill, decode):
        expecting = Expecting(decode, ids(70))
        sending = Sending(prefill, expecting.ticket, 70, send=False)
        prefill.layer_ready(expecting.ticket.transfer_id, 0, 0, 70)
        assert expecting.needed.wait(WAIT_S)
        prefill.abort_sender(expecting.ticket.transfer_id, error)
        prefill.abort_sender(expecting.ticket.transfer_id, error)
        assert sending.ended.wait() is error
        assert isinstance(expecting.ended.wait(), TransferError)
    assert len(sending.ended.calls) == len(expecting.ended.calls) == 1
    assert sending.store.late_accesses == 0


def test_aborts_racing_with_the_transfer_end_each_side_once(memory: TransportFactory) -> None:
    prefill, decode = make_link(memory()), make_link(memory())
    with running(prefill, decode):
        for number in range(40):
            expecting = Expecting(decode, ids(70))
            sending = Sending(prefill, expecting.ticket, 70)
            abort = prefill.abort_sender if number % 2 else decode.abort_receiver
            if number % 3:
                expecting.needed.wait(WAIT_S)
            abort(expecting.ticket.transfer_id, Cancelled("stop"))
            received, sent = expecting.ended.wait(), sending.ended.wait()
            assert received == TOKENS or isinstance(received, Cancelled | TransferError)
            assert sent is None or isinstance(sent, Cancelled | TransferError)
            if sent is None:
                assert received == TOKENS
            assert sending.store.late_accesses == 0


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_peer_closed_mid_transfer_ends_the_other_side(transports: TransportFactory, victim: str) -> None:
    prefill, decode = make_link(transports(), IMPATIENT), make_link(transports(), IMPATIENT)
    with running(prefill, decode):
        expecting = Expecting(decode, ids(70))
        sending = Sending(prefill, expecting.ticket, 70, send=False)
        prefill.layer_ready(expecting.ticket.transfer_id, 0, 0, 70)
        assert expecting.needed.wait(WAIT_S)
        (prefill if victim == "prefill" else decode).close()
        assert isinstance(expecting.ended.wait(), TransferError)
        assert isinstance(sending.ended.wait(), TransferError)


def test_sender_that_never_comes_ends_the_expectation(memory: TransportFactory) -> None:
    decode = make_link(memory(), IMPATIENT)
    with running(decode):
        expecting = Expecting(decode, ids(10))
        assert isinstance(expecting.ended.wait(), TransferError)
        assert decode.stats().incoming == 0


def test_receiver_that_never_answers_ends_the_sender(transports: TransportFactory) -> None:
    prefill, vanished = make_link(transports(), IMPATIENT), transports()
    ticket = Ticket(b"t" * 16, 1, vanished.endpoint, 0, IMPATIENT.ticket_ttl_ms)
    vanished.close()
    with running(prefill):
        assert isinstance(Sending(prefill, ticket, 10).ended.wait(), TransferError)


def test_ticket_nobody_remembers_is_refused_at_once(transports: TransportFactory) -> None:
    prefill, decode = make_link(transports()), make_link(transports())
    with running(prefill, decode):
        ticket = Ticket(b"t" * 16, 1, decode.endpoint, 0, ttl_ms=60_000)
        error = Sending(prefill, ticket, 10).ended.wait()
        assert isinstance(error, TransferError)
        assert "no such transfer" in error.message


def test_ticket_of_a_malformed_endpoint_fails_its_sender_alone(transports: TransportFactory) -> None:
    prefill = make_link(transports())
    with running(prefill):
        ticket = Ticket(b"t" * 16, 1, "nowhere", 0, CONFIG.ticket_ttl_ms)
        assert isinstance(Sending(prefill, ticket, 10).ended.wait(), TransferError)
        assert prefill.stats().outgoing == prefill.stats().internal_errors == 0


def test_old_epoch_is_refused_and_the_transfer_goes_on(memory: TransportFactory) -> None:
    stale, prefill, decode = make_link(memory()), make_link(memory()), make_link(memory())
    with running(stale, prefill, decode):
        expecting = Expecting(decode, ids(70), lease=False)
        sending = Sending(prefill, expecting.ticket, 70)
        assert expecting.needed.wait(WAIT_S)
        old = Sending(stale, replace(expecting.ticket, epoch=0), 70)
        error = old.ended.wait()
        assert isinstance(error, TransferError)
        assert "epoch 0" in error.message
        expecting.lease_now()
        assert expecting.ended.wait() == TOKENS
        assert sending.ended.wait() is None


def test_second_worker_with_the_same_ticket_does_not_disturb_the_first(memory: TransportFactory) -> None:
    thief, prefill, decode = make_link(memory()), make_link(memory()), make_link(memory())
    with running(thief, prefill, decode):
        expecting = Expecting(decode, ids(70), lease=False)
        sending = Sending(prefill, expecting.ticket, 70)
        assert expecting.needed.wait(WAIT_S)
        error = Sending(thief, expecting.ticket, 70, seed=2).ended.wait()
        assert isinstance(error, TransferError)
        assert "another worker is sending under this ticket" in error.message
        expecting.lease_now()
        assert expecting.ended.wait() == TOKENS
        assert expecting.store.equals(sending.store, 0, 70)
        assert decode.stats().frames_refused > 0


def test_waiting_for_blocks_and_in_the_queue_keeps_the_ticket_alive(memory: TransportFactory) -> None:
    config = replace(CONFIG, ticket_ttl_ms=2_000)
    longer_than_the_ttl_s = 1.2 * config.ticket_ttl_ms / 1000
    prefill, decode = make_link(memory(), config), make_link(memory(), config)
    with running(prefill, decode):
        expecting = Expecting(decode, ids(70), lease=False)
        store, ended = FakeStore.random(LAYOUT, 70, seed=1), Outcome()
        prefill.open_sender(expecting.ticket, OWNER, ids(70), 70, ended)
        assert not expecting.needed.wait(longer_than_the_ttl_s)
        prefill.start_sender(expecting.ticket.transfer_id, store)
        assert expecting.needed.wait(WAIT_S)
        assert not expecting.ended.comes_within(longer_than_the_ttl_s)
        assert ended.calls == []
        expecting.lease_now()
        send_all(prefill, expecting.ticket, LAYOUT.layer_count, 70, 24)
        assert expecting.ended.wait() == TOKENS
        assert ended.wait() is None


class Dozing:
    """A transport that keeps the link's thread for a while after its first COMMIT."""

    def __init__(self, inner: Transport, seconds: float) -> None:
        self._inner = inner
        self._seconds = seconds
        self.endpoint = inner.endpoint
        self.connect, self.disconnect, self.buffer = inner.connect, inner.disconnect, inner.buffer
        self.receive, self.wake, self.close = inner.receive, inner.wake, inner.close

    def send(self, peer: Peer, parts: Sequence[Part]) -> None:
        self._inner.send(peer, parts)
        if type_of(parts) is Commit:
            seconds, self._seconds = self._seconds, 0.0
            time.sleep(seconds)


def test_link_that_was_away_for_longer_than_the_ttl_finds_the_answers_in_its_socket(
    transports: TransportFactory,
) -> None:
    prefill, decode = make_link(Dozing(transports(), seconds=1.5), IMPATIENT), make_link(transports(), IMPATIENT)
    with running(prefill, decode):
        expecting = Expecting(decode, ids(100))
        sending = Sending(prefill, expecting.ticket, 100)
        idle = Expecting(prefill, ids(10))  # a receiver at the link that is away
        assert sending.ended.wait() is None
        assert expecting.ended.wait() == TOKENS
        assert isinstance(idle.ended.wait(), TransferError)  # nobody ever comes


def test_turns_are_too_short_to_be_frozen_in_unseen(memory: TransportFactory) -> None:
    link = make_link(memory())
    link.accept()
    link.expect(OWNER, ids(10), lambda: None, Outcome())
    link.turn(link.wait_s())
    assert 0 < link.wait_s() <= CONFIG.ping_interval_ms / 1000
    link.close()


def test_full_link_refuses_and_takes_again_when_one_has_ended(memory: TransportFactory) -> None:
    prefill, decode = make_link(memory(), max_transfers=2), make_link(memory(), max_transfers=2)
    with running(prefill, decode):
        held = [Expecting(decode, ids(10), lease=False) for _ in range(2)]
        with pytest.raises(ResourceExhausted):
            Expecting(decode, ids(10))
        sendings = [Sending(prefill, expecting.ticket, 10) for expecting in held]
        with pytest.raises(ResourceExhausted):
            Sending(prefill, held[0].ticket, 10)
        decode.abort_receiver(held[0].ticket.transfer_id, Cancelled("stop"))
        held[0].ended.wait()
        sendings[0].ended.wait()
        again = Expecting(decode, ids(10))
        assert Sending(prefill, again.ticket, 10).ended.wait() is None


def test_same_ticket_sent_twice_from_one_worker_is_refused(memory: TransportFactory) -> None:
    prefill, decode = make_link(memory()), make_link(memory())
    with running(prefill, decode):
        expecting = Expecting(decode, ids(10), lease=False)
        first = Sending(prefill, expecting.ticket, 10)
        assert isinstance(Sending(prefill, expecting.ticket, 10, send=False).ended.wait(), AlreadyExists)
        assert expecting.needed.wait(WAIT_S)
        expecting.lease_now()
        assert first.ended.wait() is None


class Broken:
    """A reader and writer that raises."""

    def read_into(self, layer: int, start: int, stop: int, out: memoryview) -> None:
        raise KeyError("no such block")

    def write(self, layer: int, start: int, stop: int, payload: memoryview) -> None:
        raise ValueError("out of range")


def test_reader_that_raises_ends_its_transfer_and_no_other(memory: TransportFactory) -> None:
    prefill, decode = make_link(memory()), make_link(memory())
    with running(prefill, decode):
        broken, sound = Expecting(decode, ids(70)), Expecting(decode, ids(70))
        ended = Outcome()
        open_sender(prefill, broken.ticket, ids(70), Broken(), ended)
        sending = Sending(prefill, sound.ticket, 70)
        send_all(prefill, broken.ticket, LAYOUT.layer_count, 70, 24)
        assert isinstance(ended.wait(), InternalError)
        assert isinstance(broken.ended.wait(), TransferError)
        assert sound.ended.wait() == TOKENS
        assert sending.ended.wait() is None


def test_writer_that_raises_ends_its_transfer_and_no_other(memory: TransportFactory) -> None:
    prefill, decode = make_link(memory()), make_link(memory())
    with running(prefill, decode):
        broken, sound = Expecting(decode, ids(70), writer=Broken()), Expecting(decode, ids(70))
        sendings = [Sending(prefill, expecting.ticket, 70) for expecting in (broken, sound)]
        assert isinstance(broken.ended.wait(), InternalError)
        assert isinstance(sendings[0].ended.wait(), TransferError)
        assert sound.ended.wait() == TOKENS
        assert sendings[1].ended.wait() is None


class Refusing:
    """A reader and writer that refuses, for a reason that has a reason."""

    def read_into(self, layer: int, start: int, stop: int, out: memoryview) -> None:
        self.write(layer, start, stop, out)

    def write(self, layer: int, start: int, stop: int, payload: memoryview) -> None:
        try:
            bytes(payload).decode("ascii").index("no such text")
        except ValueError as problem:
            raise TransferError("evicted") from problem


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_errors_that_somebody_keeps_hold_no_payload(tmp_path: Path, side: str) -> None:
    make = transport_factory("shared", tmp_path)
    prefill, decode = make_link(make()), make_link(make())
    before = arenas()
    with running(prefill, decode):
        expecting = Expecting(decode, ids(100), writer=Refusing() if side == "decode" else None)
        ended = Outcome()
        reader = Refusing() if side == "prefill" else FakeStore.random(LAYOUT, 100, seed=1)
        open_sender(prefill, expecting.ticket, ids(100), reader, ended)
        assert expecting.needed.wait(WAIT_S)
        send_all(prefill, expecting.ticket, LAYOUT.layer_count, 100, 24)
        kept = ended.wait(), expecting.ended.wait()
        assert arenas() > before, "no payload went through shared memory"
    assert [str(error) for error in kept if "other side" not in str(error)] == ["evicted"]
    assert arenas() == before
    for error in kept:
        assert isinstance(error, TransferError)
        assert error.__traceback__ is error.__context__ is error.__cause__ is None


def arenas() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:pdserve-kv")


def test_callback_that_raises_is_counted_and_does_not_stop_the_link(memory: TransportFactory) -> None:
    def fail() -> None:
        raise RuntimeError("a bug in the engine")

    prefill, decode = make_link(memory()), make_link(memory())
    with running(prefill, decode):
        first, raising = Expecting(decode, ids(10)), Outcome(then=fail)
        store = FakeStore.random(LAYOUT, 10, seed=1)
        open_sender(prefill, first.ticket, ids(10), store, raising)
        send_all(prefill, first.ticket, LAYOUT.layer_count, 10, 24)
        assert first.ended.wait() == TOKENS
        second = Expecting(decode, ids(10))
        assert Sending(prefill, second.ticket, 10).ended.wait() is None
        assert prefill.stats().internal_errors == 1
        assert len(raising.calls) == 1


class Collapsing:
    """A transport whose `receive` fails once a test says so."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.broken = False
        self.endpoint = inner.endpoint
        self.connect, self.disconnect, self.send = inner.connect, inner.disconnect, inner.send
        self.wake, self.close = inner.wake, inner.close

    def receive(self, timeout_s: float) -> list[Event]:
        if self.broken:
            raise OSError("the network is on fire")
        return self._inner.receive(timeout_s)


def test_broken_transport_ends_every_transfer(memory: TransportFactory) -> None:
    transport = Collapsing(memory())
    link = make_link(transport)
    with running(link):
        held = [Expecting(link, ids(10)) for _ in range(3)]
        transport.broken = True
        transport.wake()
        for expecting in held:
            assert isinstance(expecting.ended.wait(), TransferError)
        with pytest.raises(Unavailable):
            Expecting(link, ids(10))


def test_close_ends_everything_once_and_nothing_is_accepted_after(transports: TransportFactory) -> None:
    prefill, decode = make_link(transports()), make_link(transports())
    with running(prefill, decode):
        held = [Expecting(decode, ids(70), lease=False) for _ in range(5)]
        sendings = [Sending(prefill, expecting.ticket, 70) for expecting in held]
        decode.close()
        prefill.close()
        for ended in (*(expecting.ended for expecting in held), *(sending.ended for sending in sendings)):
            assert isinstance(ended.wait(), TransferError)
        with pytest.raises(Unavailable):
            Expecting(decode, ids(10))
        with pytest.raises(Unavailable):
            Sending(prefill, held[0].ticket, 10)
        decode.blocks_leased(held[0].ticket.transfer_id, held[0].store)
        decode.abort_receiver(held[0].ticket.transfer_id, Cancelled("late"))
        assert decode.stats().incoming == prefill.stats().outgoing == 0
    assert all(len(expecting.ended.calls) == 1 for expecting in held)


def test_expectations_racing_with_close_are_refused_or_answered(memory: TransportFactory) -> None:
    """Everything accepted while the link's thread is busy and a close is coming gets its `on_end`."""
    prefill, decode = make_link(memory()), make_link(memory(), max_transfers=10**6)
    busy, go_on, accepted = threading.Event(), threading.Event(), list[Outcome]()

    def block() -> None:
        busy.set()
        assert go_on.wait(WAIT_S)

    with running(prefill, decode):
        ticket = decode.expect(OWNER, ids(10), block, Outcome())
        Sending(prefill, ticket, 10)
        assert busy.wait(WAIT_S)
        closer = threading.Thread(target=decode.close)
        accepted.append(expect_one(decode))
        closer.start()
        with pytest.raises(Unavailable):
            expect_until_refused(decode, accepted)
        go_on.set()
        closer.join()
    assert all(isinstance(outcome.wait(), TransferError) for outcome in accepted)


def expect_until_refused(link: Link, accepted: list[Outcome]) -> None:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        accepted.append(expect_one(link))


def expect_one(link: Link) -> Outcome:
    outcome = Outcome()
    link.expect(OWNER, ids(1), lambda: None, outcome)
    return outcome


def test_restarted_worker_at_the_same_endpoint_is_somebody_else(tmp_path: Path) -> None:
    def decode_link(identity: str) -> Link:
        return make_link(ZmqTransport(ipc_endpoint(tmp_path / "kv", "same"), identity.encode()))

    prefill, first = make_link(transport_factory("tcp", tmp_path)()), decode_link("first")
    with running(prefill):
        with running(first):
            old = Expecting(first, ids(70), lease=False)
            lost = Sending(prefill, old.ticket, 70)
            assert old.needed.wait(WAIT_S)
        second = decode_link("second")
        with running(second):
            error = lost.ended.wait()
            assert isinstance(error, TransferError)
            expecting = Expecting(second, ids(70))
            assert Sending(prefill, expecting.ticket, 70).ended.wait() is None
            assert expecting.ended.wait() == TOKENS


def test_trace_names_each_frame_on_both_sides(memory: TransportFactory) -> None:
    traces = Trace(), Trace()
    prefill, decode = (make_link(memory(), CALM, trace=trace) for trace in traces)
    with running(prefill, decode):
        expecting = Expecting(decode, ids(70))
        assert Sending(prefill, expecting.ticket, 70).ended.wait() is None
    name = expecting.ticket.transfer_id.hex()
    sent = [event.fields for event in traces[0].events() if event.name == "frame_sent"]
    received = [event.fields for event in traces[1].events() if event.name == "frame_received"]
    assert sent == received
    assert {fields["transfer"] for fields in sent} == {name}
    assert sum(fields["bytes"] for fields in sent) == 2 * LAYOUT.payload_bytes(70)
    for trace, side in zip(traces, ("sender", "receiver"), strict=True):
        steps = [event.name for event in trace.events() if event.fields.get("side") == side]
        assert steps == ["transfer_open", "transfer_commit", "transfer_complete"]


def test_limits_that_do_not_fit_the_layout_are_a_config_error(memory: TransportFactory) -> None:
    wide = KVFormat(1, 64, 128, "float32")
    with pytest.raises(ConfigError, match="max_frame_bytes"):
        make_link(memory(), TransferConfig(max_frame_bytes=4096), wide)


def test_nothing_is_left_after_close(tmp_path: Path) -> None:
    for kind in ("ipc", "tcp"):  # the first round starts what pyzmq keeps for the whole process
        transfer_and_close(kind, tmp_path)
    threads, descriptors = threading.active_count(), open_descriptors()
    for kind in ("ipc", "tcp", "memory"):
        transfer_and_close(kind, tmp_path)
        assert threading.active_count() == threads
        assert open_descriptors() == descriptors
    assert list((tmp_path / "kv").iterdir()) == []


def transfer_and_close(kind: str, folder: Path) -> None:
    transports = transport_factory(kind, folder)
    large = KVFormat(1, 8, 128, "float32")  # frames that go to the socket without a copy
    config = TransferConfig(ticket_ttl_ms=1_000, ping_interval_ms=50)
    prefill, decode = make_link(transports(), config, large), make_link(transports(), config, large)
    unfinished = make_link(transports(), config, large)
    with running(prefill, decode, unfinished):
        for sender in (prefill, unfinished):
            source, ended = FakeStore.random(large, 256, seed=1), Outcome()
            expecting = Expecting(decode, ids(256), writer=FakeStore(large, 256))
            open_sender(sender, expecting.ticket, ids(256), source, ended)
            sender.layer_ready(expecting.ticket.transfer_id, 0, 0, 256)
            if sender is prefill:
                sender.commit(expecting.ticket.transfer_id, TOKENS)
                assert ended.wait() is None
                assert source.equals(expecting.writer, 0, 256)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
