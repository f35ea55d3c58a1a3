"""The faulty decorator does to messages what its rules say, and the same again with the same seed."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from kvtransfer.frames import Ack, Frame, Gone, Layer, decode, encode, type_of
from kvtransfer.transports.base import Event, Message, Part
from kvtransfer.transports.faulty import Fault, FaultRule, FaultyTransport
from kvtransfer.transports.memory import MemoryNetwork, MemoryTransport
from pdserve.clock import ManualClock, SystemClock

ID = b"t" * 16
WAIT_S = 10.0


class Pair:
    """A faulty transport that sends to a sound one."""

    def __init__(self, *rules: FaultRule, seed: int = 1) -> None:
        network = MemoryNetwork()
        self.clock = ManualClock()
        self.theirs: MemoryTransport = network.transport()
        self.ours = FaultyTransport(network.transport(), rules, seed, self.clock)
        self.peer = self.ours.connect(self.theirs.endpoint)

    def send(self, *epochs: int) -> None:
        """Messages told apart by their epoch."""
        for epoch in epochs:
            self.ours.send(self.peer, encode(Ack(ID, epoch)))

    def arrived(self) -> list[int]:
        self.ours.receive(0.0)
        return [epoch_of(event) for event in self.theirs.receive(0.0)]


def epoch_of(event: Event) -> int:
    assert isinstance(event, Message)
    return decode(event.parts).frame.epoch


def test_without_rules_nothing_happens() -> None:
    pair = Pair()
    pair.send(1, 2, 3)
    assert pair.arrived() == [1, 2, 3]
    assert not pair.ours.injected


def test_rule_strikes_the_messages_it_names_and_no_other() -> None:
    pair = Pair(FaultRule(Fault.DROP, Ack, first=1, count=2))
    for epoch in range(5):
        pair.ours.send(pair.peer, encode(Gone(ID, epoch + 100)))
        pair.send(epoch)
    assert pair.arrived() == [100, 0, 101, 102, 103, 3, 104, 4]
    assert pair.ours.injected == {Fault.DROP: 2}


def test_doubled_and_reordered_messages_all_come() -> None:
    pair = Pair(FaultRule(Fault.DUPLICATE, first=0, count=1), FaultRule(Fault.REORDER, first=1, count=1))
    pair.send(1, 2, 3, 4)
    assert pair.arrived() == [1, 1, 3, 2, 4]


def test_reordered_message_without_a_next_one_comes_all_the_same() -> None:
    pair = Pair(FaultRule(Fault.REORDER))
    pair.send(1)
    assert pair.arrived() == []
    due = pair.ours.next_due()
    assert due is not None
    pair.clock.advance(due)
    assert pair.arrived() == [1]


def test_delayed_message_comes_when_its_time_is_up() -> None:
    pair = Pair(FaultRule(Fault.DELAY, count=1, seconds=2.0))
    pair.send(1, 2)
    assert pair.arrived() == [2]
    pair.clock.advance(1.9)
    assert pair.arrived() == []
    pair.clock.advance(0.2)
    assert pair.arrived() == [1]


def test_wait_ends_when_a_delayed_message_is_due() -> None:
    network = MemoryNetwork()
    theirs = network.transport()
    ours = FaultyTransport(network.transport(), [FaultRule(Fault.DELAY, seconds=1.0)], 1, SystemClock())
    ours.send(ours.connect(theirs.endpoint), encode(Ack(ID, 1)))
    began = time.monotonic()
    assert ours.receive(WAIT_S) == []
    assert time.monotonic() - began < WAIT_S / 2
    assert len(theirs.receive(0.0)) == 1


def test_corrupt_message_differs_in_one_bit_and_its_sender_keeps_the_original() -> None:
    pair = Pair(FaultRule(Fault.CORRUPT))
    payload = bytes(1024)
    parts = encode(Layer(ID, 1, 0, 0, 1, 1024, 1024), payload)
    before = [bytes(part) for part in parts]
    pair.ours.send(pair.peer, parts)
    (event,) = pair.theirs.receive(0.0)
    assert isinstance(event, Message)
    assert [bytes(part) for part in parts] == before
    assert flipped_bits(before, event.parts) == 1


def flipped_bits(before: Sequence[bytes], after: Sequence[Part]) -> int:
    pairs = zip(b"".join(before), b"".join(bytes(part) for part in after), strict=True)
    return sum((a ^ b).bit_count() for a, b in pairs)


@pytest.mark.parametrize("seconds", [3.0, float("inf")])
def test_cut_peer_is_silent_both_ways_for_as_long_as_stated(seconds: float) -> None:
    pair = Pair(FaultRule(Fault.CUT, first=1, count=1, seconds=seconds))
    pair.send(1)
    (event,) = pair.theirs.receive(0.0)
    pair.send(2, 3)
    pair.theirs.send(event.peer, encode(Ack(ID, 50)))
    assert pair.ours.receive(0.0) == []
    assert pair.arrived() == []
    pair.clock.advance(3.0)
    pair.send(4)
    pair.theirs.send(event.peer, encode(Ack(ID, 51)))
    healed = seconds == 3.0
    assert [epoch_of(event) for event in pair.ours.receive(0.0)] == ([51] if healed else [])
    assert pair.arrived() == ([4] if healed else [])


def test_what_is_held_for_a_forgotten_peer_is_dropped() -> None:
    pair = Pair(FaultRule(Fault.DELAY, seconds=1.0))
    pair.send(1)
    pair.ours.disconnect(pair.peer)
    pair.clock.advance(2.0)
    assert pair.arrived() == []


def fate(seed: int, others: int) -> list[int]:
    """Which of 50 ACKs come through at an even chance, with `others` GONEs between them."""
    pair = Pair(FaultRule(Fault.DROP, Ack, rate=0.5), seed=seed)
    for epoch in range(50):
        for _ in range(others):
            pair.ours.send(pair.peer, encode(Gone(ID, 99)))
        pair.send(epoch)
    return [epoch for _ in range(10) for epoch in pair.arrived() if epoch != 99]


def test_seed_decides_and_messages_of_other_types_do_not_matter() -> None:
    assert fate(1, others=0) == fate(1, others=3)
    assert fate(1, others=0) != fate(2, others=0)
    assert 10 < len(fate(1, others=0)) < 40


def test_type_of_names_a_frames_type_and_nothing_else() -> None:
    frames: list[Frame] = [Ack(ID, 1), Gone(ID, 1)]
    assert [type_of(encode(frame)) for frame in frames] == [Ack, Gone]
    assert type_of(encode(Layer(ID, 1, 0, 0, 1, 3, 3), b"abc")) is Layer
    for other in ([], [b""], [b"rubbish that is long enough"]):
        assert type_of(other) is None
