"""The shared-memory carrier alone: what is held is never written over, and nothing outlives its owner."""

from __future__ import annotations

import gc
import mmap
import os
import struct
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtransfer.transports.carrier import PayloadLost
from kvtransfer.transports.shared import SharedInlet, SharedOutlet
from pdserve.errors import TransferError
from support.length import times

RING = 1000


def arenas() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:pdserve-kv")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def there(payload: Future[memoryview]) -> memoryview:
    return payload.result(timeout=0)


def is_lost(payload: Future[memoryview]) -> bool:
    return isinstance(payload.exception(timeout=0), PayloadLost)


def test_payload_is_seen_in_the_senders_memory_and_cannot_be_written_there() -> None:
    outlet = SharedOutlet(RING)
    inlet = SharedInlet(outlet.offer())
    descriptor = outlet.put(b"some bytes")
    assert descriptor is not None
    payload = there(inlet.take(descriptor))
    assert bytes(payload) == b"some bytes"
    assert payload.readonly
    outlet.close()
    inlet.close()


def test_full_ring_takes_nothing_until_something_is_released() -> None:
    outlet = SharedOutlet(RING)
    inlet = SharedInlet(outlet.offer())
    first, second = outlet.put(bytes(500)), outlet.put(bytes(500))
    assert first is not None
    assert second is not None
    assert outlet.put(b"x") is None
    held = there(inlet.take(first))
    inlet.take(second)
    assert inlet.note() is None
    held.release()
    note = inlet.note()
    assert note is not None
    outlet.on_note(note)
    assert outlet.put(bytes(1000)) is not None
    outlet.close()
    inlet.close()


def test_payload_written_to_reserved_room_is_put_where_it_is() -> None:
    outlet = SharedOutlet(RING)
    inlet = SharedInlet(outlet.offer())
    room = outlet.reserve(10)
    assert room is not None
    room[:] = b"some bytes"
    address = np.frombuffer(room, np.uint8).ctypes.data
    descriptor = outlet.put(room.cast("B")[:])  # as it looks after some hands
    assert descriptor is not None
    assert np.frombuffer(room, np.uint8).ctypes.data == address
    assert bytes(there(inlet.take(descriptor))) == b"some bytes"
    other = outlet.put(b"of another")
    assert other is not None
    assert bytes(room) == b"some bytes", "the room was given away"
    outlet.close()
    inlet.close()


def test_room_that_is_left_unused_is_given_to_the_next_payload() -> None:
    outlet = SharedOutlet(RING)
    inlet = SharedInlet(outlet.offer())
    for _ in range(3):
        assert outlet.reserve(RING) is not None
    descriptor = outlet.put(bytes(RING))
    assert descriptor is not None
    assert outlet.reserve(1) is None
    assert len(there(inlet.take(descriptor))) == RING
    outlet.close()
    assert outlet.reserve(1) is None
    inlet.close()


def test_payload_larger_than_the_ring_is_not_taken() -> None:
    outlet = SharedOutlet(RING)
    assert outlet.put(bytes(RING + 1)) is None
    outlet.close()


def test_ring_in_which_nothing_is_held_begins_at_its_start_again() -> None:
    outlet = SharedOutlet(RING)
    inlet = SharedInlet(outlet.offer())
    for _ in range(5):
        descriptor = outlet.put(bytes(300))
        assert descriptor is not None
        assert struct.unpack("<QQ", descriptor)[0] % RING == 0
        inlet.take(descriptor)
        note = inlet.note()
        assert note is not None
        outlet.on_note(note)
    outlet.close()
    inlet.close()


def test_doubled_and_late_descriptors_bring_nothing() -> None:
    outlet = SharedOutlet(RING)
    inlet = SharedInlet(outlet.offer())
    first, second = outlet.put(b"1"), outlet.put(b"2")
    assert first is not None
    assert second is not None
    assert bytes(there(inlet.take(second))) == b"2"
    assert is_lost(inlet.take(second))
    assert is_lost(inlet.take(first))
    outlet.close()
    inlet.close()


def test_note_that_releases_what_was_not_written_is_refused() -> None:
    outlet = SharedOutlet(RING)
    for note in (struct.pack("<Q", 1), b"", b"longer than a note"):
        with pytest.raises(TransferError):
            outlet.on_note(note)
    outlet.close()


def test_inlet_sees_that_the_outlet_is_closed_and_keeps_what_it_handed_out() -> None:
    before = descriptors(), arenas()
    outlet = SharedOutlet(RING)
    inlet = SharedInlet(outlet.offer())
    descriptor = outlet.put(b"kept")
    assert descriptor is not None
    payload = there(inlet.take(descriptor))
    assert inlet.broken() is None
    outlet.close()
    outlet.close()
    assert inlet.broken() is not None
    inlet.close()
    assert bytes(payload) == b"kept"
    assert is_lost(inlet.take(descriptor))
    payload.release()
    assert (descriptors(), arenas()) == before


def test_another_file_in_the_outlets_place_is_seen() -> None:
    outlet = SharedOutlet(RING)
    inlet = SharedInlet(outlet.offer())
    number = struct.unpack_from("<II", outlet.offer())[1]
    kept = os.dup(number)
    other = os.memfd_create("other")
    os.dup2(other, number)
    assert inlet.broken() is not None
    os.dup2(kept, number)
    assert inlet.broken() is None
    os.close(kept)
    os.close(other)
    outlet.close()
    inlet.close()


def offer(pid: int, number: int, size: int = RING, token: bytes = bytes(16)) -> bytes:
    return struct.pack("<IIQ16s", pid, number, size, token)


def test_offers_of_anything_else_are_refused_at_once() -> None:
    outlet = SharedOutlet(RING)
    pid, number, size, token = struct.unpack("<IIQ16s", outlet.offer())
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, 64 + RING)
    reader, writer = os.pipe()
    socket_like = os.open("/dev/null", os.O_RDWR)
    before = descriptors()
    for wrong in (
        b"",
        outlet.offer() + b"x",
        offer(pid, number, size, bytes(16)),
        offer(pid, number, size - 1, token),
        offer(pid, number, 0, token),
        offer(pid, number, 2**64 - 1, token),
        offer(2**32 - 1, number, size, token),
        offer(pid, 2**32 - 1, size, token),
        offer(pid, unsealed),
        offer(pid, reader),
        offer(pid, writer),
        offer(pid, socket_like),
    ):
        with pytest.raises(TransferError):
            SharedInlet(wrong)
    assert descriptors() == before
    for opened in (unsealed, reader, writer, socket_like):
        os.close(opened)
    outlet.close()


def test_sealed_memory_cannot_shrink_below_a_reader() -> None:
    outlet = SharedOutlet(RING)
    number = struct.unpack_from("<II", outlet.offer())[1]
    with pytest.raises(PermissionError):
        os.ftruncate(number, mmap.PAGESIZE)
    outlet.close()


@settings(max_examples=times(200), deadline=None)
@given(st.lists(st.binary(max_size=20) | st.binary(min_size=16, max_size=16), max_size=8))
def test_no_descriptor_reaches_beyond_the_ring(parts: list[bytes]) -> None:
    outlet = SharedOutlet(RING)
    inlet = SharedInlet(outlet.offer())
    for descriptor in parts:
        payload = inlet.take(descriptor)
        assert is_lost(payload) or len(there(payload)) <= RING
    outlet.close()
    inlet.close()


class Ring(RuleBasedStateMachine):
    """Payloads and notes in any order, lost and doubled: what somebody holds stays as it was."""

    @initialize()
    def make(self) -> None:
        self.outlet = SharedOutlet(RING)
        self.inlet = SharedInlet(self.outlet.offer())
        self.on_their_way: list[tuple[bytes, bytes]] = []
        self.held: list[tuple[memoryview, bytes]] = []
        self.notes: list[bytes] = []
        self.count = 0

    @rule(size=st.integers(1, 400), reserved=st.booleans(), left=st.booleans())
    def put(self, size: int, reserved: bool, left: bool) -> None:
        """From memory of its own or in reserved room; `left`: after such room was written to and left."""
        self.count += 1
        content = bytes([self.count % 256]) * size
        if left and (room := self.outlet.reserve(400)) is not None:
            room[:] = bytes(400)
        room = self.outlet.reserve(size) if reserved else None
        if room is not None:
            room[:] = content
        descriptor = self.outlet.put(content if room is None else room)
        if descriptor is not None:
            self.on_their_way.append((descriptor, content))

    @precondition(lambda self: self.on_their_way)
    @rule(place=st.integers(0, 3), doubled=st.booleans())
    def take(self, place: int, doubled: bool) -> None:
        place = min(place, len(self.on_their_way) - 1)
        descriptor, content = self.on_their_way[place]
        if not doubled:
            del self.on_their_way[place]
        payload = self.inlet.take(descriptor)
        if not is_lost(payload):
            assert bytes(there(payload)) == content
            self.held.append((there(payload), content))

    @precondition(lambda self: self.on_their_way)
    @rule()
    def lose(self) -> None:
        del self.on_their_way[0]

    @precondition(lambda self: self.held)
    @rule(place=st.integers(0, 5))
    def drop(self, place: int) -> None:
        del self.held[place % len(self.held)]

    @rule()
    def note(self) -> None:
        if (note := self.inlet.note()) is not None:
            self.notes.append(note)

    @precondition(lambda self: self.notes)
    @rule(place=st.integers(0, 5), doubled=st.booleans())
    def bring_note(self, place: int, doubled: bool) -> None:
        place %= len(self.notes)
        self.outlet.on_note(self.notes[place] if doubled else self.notes.pop(place))

    @invariant()
    def held_is_untouched(self) -> None:
        for payload, content in getattr(self, "held", ()):
            assert bytes(payload) == content

    def teardown(self) -> None:
        self.held.clear()
        self.outlet.close()
        self.inlet.close()


TestRing = Ring.TestCase
TestRing.settings = settings(max_examples=times(60), stateful_step_count=40, deadline=None)
