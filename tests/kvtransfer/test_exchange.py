"""What one worker's exchange does around its transfers, on a clock that stands still until told."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from kvtransfer.exchange import Exchange
from kvtransfer.frames import Abort, Ack, Commit, Credit, Frame, Gone, Layer, Nack, Open, Ping, decode, encode
from kvtransfer.receiver import Expectation
from kvtransfer.stats import LinkStats
from kvtransfer.transports.base import Event, Message, Part, Peer, PeerLost, fresh_buffer
from pdserve.clock import ManualClock
from pdserve.errors import Cancelled, TransferError
from pdserve.logs import logger
from pdserve.tracing import Trace
from pdserve.types import Ticket
from support.kv_links import IMPATIENT as CONFIG
from support.kv_links import LAYOUT
from support.kv_store import FakeStore

TTL_S = CONFIG.ticket_ttl_ms / 1000
IDLE_S = CONFIG.connection_idle_ms / 1000
ENDPOINT = "wire://there"
RECEIVER, SENDER = b">" + ENDPOINT.encode(), b"<somebody"
STOP = Cancelled("stop")


class RememberingTransport:
    """Sends nothing anywhere and remembers what it was asked for."""

    endpoint = "wire://here"

    def __init__(self) -> None:
        self.sent: list[tuple[Peer, Frame]] = []
        self.disconnected: list[Peer] = []

    def connect(self, endpoint: str) -> Peer:
        return b">" + endpoint.encode()

    def disconnect(self, peer: Peer) -> None:
        self.disconnected.append(peer)

    def buffer(self, peer: Peer, byte_count: int) -> memoryview:
        return fresh_buffer(byte_count)

    def send(self, peer: Peer, parts: Sequence[Part]) -> None:
        self.sent.append((peer, decode(parts).frame))

    def receive(self, timeout_s: float) -> list[Event]:
        return []

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


class Worker:
    """An exchange with everything a test may want to look at."""

    def __init__(self) -> None:
        self.transport = RememberingTransport()
        self.clock = ManualClock()
        self.stats = LinkStats()
        self.ends: list[object] = []
        self.exchange = Exchange(self.transport, CONFIG, self.clock, Trace(), logger("test"), self.stats)

    def send(self, number: int) -> bytes:
        """Begin to send a transfer. Returns its id."""
        offer = Open(transfer_id(number), 1, LAYOUT, b"model", b"h" * 16, 0, 10, 32, 4096)
        ticket = Ticket(offer.transfer, 1, ENDPOINT, 0, CONFIG.ticket_ttl_ms)
        store = FakeStore.random(LAYOUT, 10, number)
        self.exchange.open_outgoing(offer, ticket, self.ends.append)
        self.exchange.start_outgoing(offer.transfer, store)
        return offer.transfer

    def expect(self, number: int) -> bytes:
        expected = Expectation(transfer_id(number), 1, LAYOUT, b"model", b"h" * 16, 0, 10)
        lost = partial(self.exchange.abort_incoming, expected.transfer)
        self.exchange.expect(expected, lambda: None, lost, self.ends.append)
        return expected.transfer

    def hears(self, peer: Peer, frame: Frame, payload: bytes | None = None) -> list[Frame]:
        """Bring a frame; returns what is answered."""
        before = len(self.transport.sent)
        self.exchange.on_event(Message(peer, encode(frame, payload)))
        return [answer for to, answer in self.transport.sent[before:] if to == peer]

    def advance(self, seconds: float) -> None:
        self.listen(seconds)

    def listen(self, wait_s: float) -> None:
        """A turn whose whole wait brings nothing."""
        self.clock.advance(wait_s)
        self.exchange.listened(wait_s)
        self.exchange.tick()


def transfer_id(number: int) -> bytes:
    return bytes([number]) * 16


def test_connection_without_transfers_is_given_up_after_a_while() -> None:
    worker = Worker()
    first, second = worker.send(1), worker.send(2)
    worker.exchange.abort_outgoing(first, STOP)
    worker.advance(TTL_S / 2)
    worker.exchange.abort_outgoing(second, STOP)
    worker.advance(TTL_S / 2)
    worker.advance(IDLE_S - 0.01)
    assert worker.transport.disconnected == []
    worker.advance(0.02)
    assert worker.transport.disconnected == [RECEIVER]
    worker.advance(IDLE_S)
    assert worker.transport.disconnected == [RECEIVER]


def test_connection_to_a_peer_that_is_lost_does_not_wait() -> None:
    worker = Worker()
    first = worker.send(1)
    worker.exchange.on_event(PeerLost(RECEIVER))
    assert worker.transport.disconnected == []
    worker.exchange.abort_outgoing(first, STOP)
    worker.advance(0.01)
    assert worker.transport.disconnected == [RECEIVER]


def test_connection_in_use_again_is_kept() -> None:
    worker = Worker()
    worker.exchange.abort_outgoing(worker.send(1), STOP)
    worker.advance(IDLE_S - TTL_S)
    third = worker.send(3)
    for _ in range(4):
        worker.advance(TTL_S / 2)
        worker.hears(RECEIVER, Ping(third, 1, reply=True, spent=0))
    assert worker.transport.disconnected == []


def test_receiver_of_a_transfer_we_no_longer_have_is_told_so() -> None:
    worker = Worker()
    gone = worker.send(1)
    worker.exchange.abort_outgoing(gone, STOP)
    worker.advance(0.0)
    assert worker.hears(RECEIVER, Credit(gone, 1, 100)) == [Gone(gone, 1)]
    assert worker.hears(RECEIVER, Nack(gone, 1, ((0, 0, 1),))) == [Gone(gone, 1)]
    assert worker.hears(RECEIVER, Ack(gone, 1)) == []


def test_sender_of_a_transfer_nobody_expects_is_told_so() -> None:
    worker = Worker()
    unknown = transfer_id(9)
    for probe, payload in ((Ping(unknown, 1, reply=False, spent=0), None), (Commit(unknown, 1, (), 0), b"")):
        (answer,) = worker.hears(SENDER, probe, payload)
        assert isinstance(answer, Abort)
        assert (answer.transfer, answer.epoch, answer.code) == (unknown, 1, TransferError.code)
    assert worker.hears(SENDER, Abort(unknown, 1, "CANCELLED", "stop")) == []
    assert worker.hears(SENDER, Gone(unknown, 1)) == []


def test_ended_receiver_answers_probes_with_its_error_for_a_while() -> None:
    worker = Worker()
    transfer = worker.expect(1)
    worker.exchange.abort_incoming(transfer, STOP)
    worker.advance(0.0)
    worker.advance(TTL_S - 0.01)
    (answer,) = worker.hears(SENDER, Ping(transfer, 1, reply=False, spent=0))
    assert isinstance(answer, Abort)
    assert answer.code == "CANCELLED"
    worker.advance(0.02)
    (answer,) = worker.hears(SENDER, Ping(transfer, 1, reply=False, spent=0))
    assert isinstance(answer, Abort)
    assert answer.code == TransferError.code


def test_frames_of_the_wrong_direction_reach_nobody() -> None:
    """An answer cannot come from a sender, nor an offer from a receiver."""
    worker = Worker()
    sending, expecting = worker.send(1), worker.expect(2)
    assert worker.hears(SENDER, Credit(sending, 1, 100)) == []
    assert worker.hears(SENDER, Credit(expecting, 1, 100)) == []
    assert worker.hears(RECEIVER, Commit(expecting, 1, (), 0), b"") == []
    assert worker.ends == []


def test_a_flood_of_rubbish_is_counted_and_harms_nobody() -> None:
    worker = Worker()
    transfer = worker.expect(1)
    for number in range(1000):
        worker.exchange.on_event(Message(SENDER, [number.to_bytes(4, "big") * 8, b"payload"]))
    assert worker.stats.frames_refused == 1000
    assert worker.ends == []
    assert worker.hears(SENDER, Ping(transfer, 1, reply=False, spent=0)) == [Ping(transfer, 1, reply=True, spent=0)]


def test_shut_down_ends_all_and_nothing_is_due_after() -> None:
    worker = Worker()
    for number in range(3):
        worker.send(number)
        worker.expect(number + 10)
    worker.exchange.shut_down(TransferError("closed"))
    assert len(worker.ends) == 6
    assert worker.exchange.next_deadline() is None


def test_second_peer_with_a_ticket_is_told_that_it_is_taken_and_changes_nothing() -> None:
    worker, other = Worker(), b"<another"
    transfer = worker.expect(1)
    worker.hears(SENDER, Ping(transfer, 1, reply=False, spent=0))
    deadline = worker.exchange.next_deadline()
    worker.clock.advance(TTL_S / 2)
    offer = Open(transfer, 1, LAYOUT, b"model", b"h" * 16, 0, 10, 32, 4096)
    for question in (offer, Ping(transfer, 1, reply=False, spent=0)):
        (answer,) = worker.hears(other, question)
        assert isinstance(answer, Abort)
        assert "another worker" in answer.message
    for remark in (answer, Gone(transfer, 1), Layer(transfer, 1, 0, 0, 1, 256, 256)):
        assert worker.hears(other, remark, bytes(256) if isinstance(remark, Layer) else None) == []
    assert worker.exchange.next_deadline() == deadline
    assert worker.ends == []
    assert worker.hears(SENDER, Ping(transfer, 1, reply=False, spent=0)) == [Ping(transfer, 1, reply=True, spent=0)]


def test_who_does_not_hold_the_ticket_learns_nothing_of_it() -> None:
    worker = Worker()
    transfer = worker.expect(1)
    worker.hears(SENDER, Ping(transfer, 1, reply=False, spent=0))
    for (named, epoch), said in {
        (transfer_id(9), 1): "no such transfer is expected here",
        (transfer, 0): "epoch 0 is not the one that is expected",
    }.items():
        answers = worker.hears(b"<another", Ping(named, epoch, reply=False, spent=0))
        assert answers == [Abort(named, epoch, "UNAVAILABLE", said)]


PROBE_S = CONFIG.ping_interval_ms / 1000


def test_silence_is_judged_only_by_time_in_which_the_link_listened() -> None:
    worker = Worker()
    worker.send(1)
    worker.expect(2)
    worker.clock.advance(10 * TTL_S)  # frozen, or in a slow store
    worker.exchange.listened(PROBE_S)
    worker.exchange.tick()
    assert worker.ends == []
    assert worker.hears(RECEIVER, Credit(transfer_id(1), 1, 10**6)) == []
    while not worker.ends and worker.clock.now() < 12 * TTL_S:
        worker.listen(PROBE_S)
    assert len(worker.ends) == 1, "the receiver, whom nobody was heard by, ends first"
    assert worker.clock.now() < 11 * TTL_S


def test_link_that_is_late_with_every_turn_still_notices_that_a_peer_is_dead() -> None:
    worker = Worker()
    worker.expect(1)
    turns = 0
    while not worker.ends:
        worker.clock.advance(3 * TTL_S)
        worker.exchange.listened(0.0)
        worker.exchange.tick()
        turns += 1
        assert turns <= 2 * TTL_S / PROBE_S + 1
    assert turns > 1


def test_ended_transfer_answers_probes_for_a_ttl_in_which_the_link_listened() -> None:
    worker = Worker()
    transfer = worker.expect(1)
    worker.hears(SENDER, Ping(transfer, 1, reply=False, spent=0))
    worker.exchange.abort_incoming(transfer, STOP)
    worker.listen(PROBE_S)
    worker.clock.advance(10 * TTL_S)
    worker.exchange.listened(PROBE_S)
    worker.exchange.tick()
    (answer,) = worker.hears(SENDER, Ping(transfer, 1, reply=False, spent=0))
    assert isinstance(answer, Abort)
    assert answer.code == STOP.code
