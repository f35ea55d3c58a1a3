"""The decorator that carries payloads another way: over a carrier that a test holds in its hand, on a manual clock."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.transports.base import Message, Part
from kvtransfer.transports.carried import CarriedLimits, CarriedTransport, Envelope
from kvtransfer.transports.carrier import PayloadLost, Wake
from kvtransfer.transports.memory import MemoryNetwork
from pdserve.clock import ManualClock
from pdserve.errors import TransferError
from pdserve.logs import Logger
from support.length import times

LIMITS = CarriedLimits(min_bytes=4, answer_timeout_s=5.0, arrival_timeout_s=2.0, cooldown_s=10.0)


class HandCarrier:
    """Payloads come when the test says so. Both ends are made by the same object."""

    def __init__(self, name: str = "hand") -> None:
        self.name = name
        self.refuses = False
        self.opens = True
        self.offer: bytes | None = b"offer"
        self.full = False
        self.room = memoryview(b"")
        self.broken_outlet: str | None = None
        self.broken_inlet: str | None = None
        self.payloads: list[bytes] = []
        self.wanted: list[Future[memoryview]] = []
        self.outlets = self.outlets_closed = self.inlets_closed = 0

    def outlet(self, wake: Wake) -> _Outlet:
        self.outlets += 1
        return _Outlet(self)

    def inlet(self, offer: bytes, wake: Wake) -> _Inlet:
        if self.refuses:
            raise TransferError("no, thank you")
        return _Inlet(self)

    def bring(self, number: int) -> None:
        self.wanted[number].set_result(memoryview(self.payloads[number]))


class _Outlet:
    def __init__(self, carrier: HandCarrier) -> None:
        self._carrier = carrier

    def offer(self) -> bytes | None:
        return self._carrier.offer

    def broken(self) -> str | None:
        return self._carrier.broken_outlet

    def on_note(self, note: bytes) -> None:
        raise TransferError("no notes")

    def reserve(self, byte_count: int) -> memoryview | None:
        return self._carrier.room[:byte_count] if self._carrier.room else None

    def put(self, payload: Part) -> bytes | None:
        if self._carrier.full:
            return None
        self._carrier.payloads.append(bytes(payload))
        return b"%d" % (len(self._carrier.payloads) - 1)

    def close(self) -> None:
        self._carrier.outlets_closed += 1


class _Inlet:
    def __init__(self, carrier: HandCarrier) -> None:
        self._carrier = carrier

    def ready(self) -> bool:
        return self._carrier.opens

    def broken(self) -> str | None:
        return self._carrier.broken_inlet

    def take(self, descriptor: bytes) -> Future[memoryview]:
        self._carrier.wanted.append(Future())
        return self._carrier.wanted[-1]

    def note(self) -> bytes | None:
        return None

    def close(self) -> None:
        self._carrier.inlets_closed += 1


class Log(Logger):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warning(self, event: str, **fields: object) -> None:
        self.warnings.append(f"{fields['carrier']}: {fields['reason']}")

    def debug(self, event: str, **fields: object) -> None:
        pass


class Pair:
    """A sender and a receiver with one carrier (or none at the receiver), connected."""

    def __init__(self, carriers: Sequence[HandCarrier] = (), theirs: Sequence[HandCarrier] | None = None) -> None:
        self.carriers = list(carriers) or [HandCarrier()]
        self.clock, self.log, self.network = ManualClock(), Log(), MemoryNetwork()
        self.receiver = CarriedTransport(
            self.network.transport(), self.carriers if theirs is None else theirs, self.clock, Log(), LIMITS
        )
        self.raw = self.network.transport()
        self.sender = CarriedTransport(self.raw, self.carriers, self.clock, self.log, LIMITS)
        self.peer = self.sender.connect(self.receiver.endpoint)
        self.turn()

    @property
    def carrier(self) -> HandCarrier:
        return self.carriers[0]

    def send(self, *texts: bytes) -> None:
        for text in texts:
            header, _, payload = text.partition(b":")
            self.sender.send(self.peer, [header, payload] if payload else [header])

    def turn(self) -> list[bytes]:
        """What comes at the receiver; the sender hears the answers."""
        events = self.receiver.receive(0.0)
        assert self.sender.receive(0.0) == []
        assert all(isinstance(event, Message) for event in events)
        return [b":".join(bytes(part) for part in event.parts) for event in events if isinstance(event, Message)]


def test_large_payload_is_carried_and_a_small_one_is_not() -> None:
    pair = Pair()
    pair.send(b"head:large", b"head:abc", b"head")
    assert pair.turn() == []
    pair.carrier.bring(0)
    assert pair.turn() == [b"head:large", b"head:abc", b"head"]
    assert pair.sender.counts == {"hand": 1, "inline": 1}


def test_late_payload_holds_up_its_own_peer_only_and_order_is_kept() -> None:
    pair = Pair()
    pair.send(b"1:large", b"2:large", b"3")
    assert pair.turn() == []
    other = pair.network.transport()
    other.send(other.connect(pair.receiver.endpoint), [b"another's"])
    pair.carrier.bring(1)
    assert pair.turn() == [b"another's"]
    pair.carrier.bring(0)
    assert pair.turn() == [b"1:large", b"2:large", b"3"]


def test_payload_that_does_not_come_is_given_up_in_time_and_its_carrier_with_it() -> None:
    pair = Pair()
    pair.send(b"1:large", b"2:large", b"3")
    assert pair.turn() == []
    pair.clock.advance(LIMITS.arrival_timeout_s)
    assert pair.turn() == [b"3"]
    assert pair.receiver.counts == {"lost": 2}
    assert pair.carrier.inlets_closed == 1
    pair.turn()
    pair.send(b"4:large")
    assert pair.turn() == [b"4:large"]
    assert pair.sender.counts["inline"] == 1
    assert len(pair.log.warnings) == 1


def test_payload_that_is_lost_ends_its_way_but_not_what_has_come() -> None:
    pair = Pair()
    pair.send(b"1:large", b"2:large", b"3:large")
    pair.turn()
    pair.carrier.wanted[0].set_exception(PayloadLost("gone"))
    pair.carrier.bring(1)
    assert pair.turn() == [b"2:large"]
    assert pair.log.warnings == ["hand: gone"]
    pair.send(b"4:large")
    assert pair.turn() == [b"4:large"]


def test_room_for_a_payload_is_the_carriers_where_it_is_open_and_has_some() -> None:
    pair = Pair([HandCarrier("first"), HandCarrier("second")])
    pair.carriers[1].room = memoryview(bytearray(b"the carrier's own"))
    assert bytes(pair.sender.buffer(pair.peer, 11)) == b"the carrier"
    small = pair.sender.buffer(pair.peer, LIMITS.min_bytes - 1)
    assert small.obj is not pair.carriers[1].room.obj, "small ones go inline"
    pair.carriers[1].broken_outlet = "gone"
    inline = pair.sender.buffer(pair.peer, 11)
    assert (len(inline), inline.readonly) == (11, False)
    assert pair.log.warnings == ["second: gone"]


def test_full_carrier_sends_inline_and_stays_open() -> None:
    pair = Pair()
    pair.carrier.full = True
    pair.send(b"1:large")
    assert pair.turn() == [b"1:large"]
    pair.carrier.full = False
    pair.send(b"2:large")
    assert pair.turn() == []
    assert pair.log.warnings == []


def test_inline_payload_does_not_overtake_a_carried_one() -> None:
    pair = Pair()
    pair.send(b"1:large")
    pair.carrier.full = True
    pair.send(b"2:large")
    assert pair.turn() == []
    pair.carrier.bring(0)
    assert pair.turn() == [b"1:large", b"2:large"]


def test_refused_offer_is_made_again_after_the_cooldown_and_warned_of_once() -> None:
    pair = Pair([HandCarrier()], theirs=[])
    for turn in range(3):
        pair.send(b"1:large")
        assert pair.turn() == [b"1:large"]
        assert pair.carrier.outlets == 1 + turn
        pair.clock.advance(LIMITS.cooldown_s)
        pair.send(b"2:large")
        assert pair.turn() == [b"2:large"]
    assert pair.log.warnings == ["hand: not in use here"]
    assert pair.carrier.outlets_closed == 4


def test_offer_that_takes_time_is_made_when_it_is_there() -> None:
    carrier = HandCarrier()
    carrier.offer = None
    pair = Pair([carrier])
    pair.send(b"1:large")
    assert pair.turn() == [b"1:large"]
    carrier.offer = b"offer"
    assert pair.turn() == []
    assert pair.turn() == []
    pair.send(b"2:large")
    assert pair.turn() == []
    assert pair.sender.counts == {"inline": 1, "hand": 1}


def test_offer_without_an_answer_in_time_is_given_up() -> None:
    carrier = HandCarrier()
    carrier.opens = False
    pair = Pair([carrier])
    pair.clock.advance(LIMITS.answer_timeout_s)
    pair.send(b"1:large")
    assert pair.turn() == [b"1:large"]
    assert len(pair.log.warnings) == 1
    carrier.opens = True
    pair.turn()
    pair.send(b"2:large")
    assert pair.turn() == [b"2:large"], "an answer to an offer that was withdrawn opens nothing"
    pair.clock.advance(LIMITS.cooldown_s)
    pair.send(b"3:large")
    assert pair.turn() == [b"3:large"]
    pair.send(b"4:large")
    assert pair.turn() == []
    carrier.bring(0)
    assert pair.turn() == [b"4:large"]


def test_broken_outlet_sends_inline() -> None:
    pair = Pair()
    pair.carrier.broken_outlet = "the thread died"
    pair.send(b"1:large")
    assert pair.turn() == [b"1:large"]
    assert pair.log.warnings == ["hand: the thread died"]


def test_broken_inlet_is_found_without_traffic_and_the_sender_told() -> None:
    pair = Pair()
    pair.carrier.broken_inlet = "its sender is gone"
    pair.clock.advance(1.0)
    pair.turn()
    assert pair.carrier.inlets_closed == 1
    assert pair.log.warnings == ["hand: its sender is gone"]


def test_next_carrier_takes_over_from_a_broken_one() -> None:
    first, second = HandCarrier("first"), HandCarrier("second")
    pair = Pair([first, second])
    pair.send(b"1:large")
    first.broken_outlet = "gone"
    pair.send(b"2:large")
    assert pair.turn() == []
    first.bring(0)
    second.bring(0)
    assert pair.turn() == [b"1:large", b"2:large"]
    assert pair.sender.counts == {"first": 1, "second": 1}


def test_note_that_makes_no_sense_closes_the_way() -> None:
    pair = Pair()
    (entrance,) = pair.receiver._inlets.values()
    entrance.inlet.note = lambda: b"nonsense"  # type: ignore[method-assign]
    pair.turn()
    assert pair.log.warnings == ["hand: no notes"]


def test_descriptor_for_a_way_that_is_not_open_is_lost_and_said_so() -> None:
    pair = Pair()
    pair.receiver._inlets.clear()
    pair.send(b"1:large", b"2")
    assert pair.turn() == [b"2"]
    assert pair.receiver.counts == {"lost": 1}
    assert pair.log.warnings == ["hand: not open here"]


def test_disconnect_and_close_close_every_end_once() -> None:
    pair = Pair()
    pair.sender.disconnect(pair.peer)
    assert pair.carrier.outlets_closed == 1
    pair.sender.close()
    pair.receiver.close()
    assert (pair.carrier.outlets_closed, pair.carrier.inlets_closed) == (1, 1)


@settings(max_examples=times(50), deadline=None)
@given(
    st.binary(max_size=64)
    | st.lists(st.integers() | st.text() | st.binary(), max_size=6).map(
        lambda items: bytes(msgpack.packb([i % 2**64 if isinstance(i, int) else i for i in items]))
    )
)
def test_any_bytes_are_an_envelope_or_a_typed_error(part: bytes) -> None:
    try:
        envelope = Envelope.unpack(part)
    except TransferError:
        return
    assert Envelope.unpack(envelope.pack()) == envelope


@pytest.mark.parametrize("third", [b"", b"\xc1", bytes(msgpack.packb([3, "hand", b"session", b"0"])), bytes(10_000)])
def test_message_with_a_third_part_that_is_wrong_is_dropped(third: bytes) -> None:
    pair = Pair()
    pair.raw.send(pair.peer, [b"head", b"", third])
    pair.raw.send(pair.peer, [b"after"])
    assert pair.turn() == [b"after"]
