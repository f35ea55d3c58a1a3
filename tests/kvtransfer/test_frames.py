"""The wire format: what is sent comes back, and anything else is refused."""

from __future__ import annotations

import struct
import tracemalloc
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvtransfer import fields
from kvtransfer.failure import abort_error, abort_frame
from kvtransfer.frames import (
    MAX_DECODE_BYTES,
    MAX_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    Abort,
    Ack,
    BadPayload,
    Commit,
    Frame,
    FrameError,
    Layer,
    Nack,
    decode,
    encode,
)
from pdserve.errors import Cancelled, DataLoss, FailedPrecondition, InternalError, ProtocolError, TransferError
from pdserve.kv_format import KVFormat
from pdserve.types import SampledToken
from support.kv_frames import COMMIT, FRAMES, ID, LAYER, LIST, OPEN, PAYLOAD
from support.length import times


def seal(header: Any) -> bytes:
    """A header whose checksum is right, whatever it says."""
    packed = header if isinstance(header, bytes) else msgpack.packb(header)
    return struct.pack("<Q", xxh3_64_intdigest(packed)) + packed


def header_of(frame: Frame, payload: bytes | None = None) -> dict[str, Any]:
    return msgpack.unpackb(bytes(encode(frame, payload)[0])[8:])


def open_header(**changes: Any) -> list[bytes]:
    return [seal(header_of(OPEN) | changes)]


@pytest.mark.parametrize(("frame", "payload"), FRAMES, ids=lambda case: type(case).__name__)
def test_frame_comes_back_as_it_was_sent(frame: Frame, payload: bytes | None) -> None:
    received = decode(encode(frame, payload))
    assert received.frame == frame
    assert bytes(received.payload) == (payload or b"")


def test_payload_is_passed_on_without_a_copy() -> None:
    buffer = bytearray(PAYLOAD)
    parts = encode(LAYER, memoryview(buffer))
    received = decode(parts)
    assert memoryview(parts[1]).obj is buffer
    assert received.payload.obj is buffer


def test_header_says_magic_and_version() -> None:
    header = header_of(Ack(ID, 1))
    assert header == {"magic": "pdkv", "version": 1, "type": 4, "transfer": ID, "epoch": 1}


@pytest.mark.parametrize(
    "changes",
    [
        {"magic": "pdkw"},
        {"magic": b"pdkv"},
        {"magic": None},
        {"version": 2},
        {"version": True},
        {"version": 1.0},
        {"type": 0},
        {"type": 10},
        {"type": True},
        {"type": [1]},
        {"transfer": ID[:15]},
        {"transfer": ID + b"x"},
        {"transfer": "0123456789abcdef"},
        {"epoch": -1},
        {"epoch": 2**32},
        {"epoch": True},
        {"epoch": "1"},
        {"epoch": None},
        {"token_start": 101},
        {"token_stop": 2**32},
        {"block_tokens": 0},
        {"block_tokens": 2**16},
        {"model": b""},
        {"model": b"m" * 257},
        {"prompt_hash": b"h" * 15},
        {"layout": [30, 3, 64]},
        {"layout": [30, 3, 64, "bfloat16", 1]},
        {"layout": [0, 3, 64, "bfloat16"]},
        {"layout": [30, 3, 64, "int3"]},
        {"layout": [30, 3, 64, None]},
        {"layout": [30, 3, 64, ["bfloat16"]]},
        {"layout": [30, 3, 64.0, "bfloat16"]},
        {"layout": "abcd"},
        {"layout": {"layers": 30}},
        {"surprise": 1},
        {"checksum": 1},
        {"payload_bytes": 0},
    ],
    ids=str,
)
def test_field_that_is_not_as_stated_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(FrameError):
        decode(open_header(**changes))


@pytest.mark.parametrize(("frame", "payload"), FRAMES, ids=lambda case: type(case).__name__)
def test_every_field_is_required(frame: Frame, payload: bytes | None) -> None:
    parts = encode(frame, payload)
    header = header_of(frame, payload)
    for name in header:
        shorter = {key: value for key, value in header.items() if key != name}
        with pytest.raises(FrameError):
            decode([seal(shorter), *parts[1:]])


@pytest.mark.parametrize(
    "ranges",
    [
        [[0, 1, 1]],
        [[0, 2, 1]],
        [[0, 1]],
        [[2**16, 0, 1]],
        [[0, -1, 1]],
        [[0, 0, 2**32]],
        [[0, 0, 1.0]],
        5,
        [[0, 0, 1]] * 1025,
    ],
    ids=lambda ranges: str(ranges)[:30],
)
def test_ranges_that_are_none_are_refused(ranges: Any) -> None:
    with pytest.raises(FrameError):
        decode([seal(header_of(Nack(ID, 1, ())) | {"ranges": ranges})])


@pytest.mark.parametrize(
    "tokens",
    [
        [[1, 0.5]],
        [[1, 0, []]],
        [[1, float("nan"), []]],
        [[-1, None, []]],
        [[2**32, None, []]],
        [[1, None, [[1]]]],
        [[1, None, [[1, None]]]],
        [[1, None, [[1, -0.5]] * 33]],
        [[1, None, []]] * 129,
        [7],
        "tokens",
    ],
    ids=lambda tokens: str(tokens)[:30],
)
def test_tokens_that_are_none_are_refused(tokens: Any) -> None:
    with pytest.raises(FrameError):
        decode([seal(header_of(COMMIT, LIST) | {"tokens": tokens}), LIST])


def test_logprobs_keep_their_bits() -> None:
    logprob = -0.1 - 2**-54
    tokens = (SampledToken(1, logprob, ((1, logprob), (2, float("-inf")))),)
    frame = decode(encode(Commit(ID, 1, tokens, 0), b"")).frame
    assert isinstance(frame, Commit)
    assert struct.pack("d", frame.tokens[0].logprob or 0.0) == struct.pack("d", logprob)
    assert frame.tokens == tokens


def test_field_sent_twice_is_refused() -> None:
    packed = bytearray(msgpack.packb(header_of(Ack(ID, 1))))
    packed[0] += 1  # one pair more
    with pytest.raises(FrameError, match="twice"):
        decode([seal(bytes(packed) + msgpack.packb("epoch") + msgpack.packb(1))])


def test_trailing_bytes_are_refused() -> None:
    with pytest.raises(FrameError):
        decode([seal(msgpack.packb(header_of(OPEN)) + b"\xc0")])


@pytest.mark.parametrize("parts", [[], [b""], [b"short"], [b"x" * 9], [b"\0" * (MAX_HEADER_BYTES + 1)]], ids=len)
def test_what_is_no_header_is_refused(parts: list[bytes]) -> None:
    with pytest.raises(FrameError):
        decode(parts)


def test_missing_or_extra_parts_are_refused() -> None:
    ack, layer = encode(Ack(ID, 1)), encode(LAYER, PAYLOAD)
    for parts in ([*ack, b""], [layer[0]], [*layer, b""], [*layer, *layer]):
        with pytest.raises(FrameError):
            decode(parts)


def test_payload_of_another_length_is_refused() -> None:
    header = encode(LAYER, PAYLOAD)[0]
    for payload in (PAYLOAD[:-1], PAYLOAD + b"x", b""):
        with pytest.raises(FrameError) as caught:
            decode([header, payload])
        assert not isinstance(caught.value, BadPayload)


def test_damaged_list_says_which_frame_it_was() -> None:
    header = encode(COMMIT, LIST)[0]
    with pytest.raises(BadPayload) as caught:
        decode([header, LIST[:-1] + b"!"])
    assert caught.value.frame == COMMIT


def test_layers_checksum_comes_with_it_for_who_stores_the_payload() -> None:
    layer = replace(LAYER, checksum=2**64 - 1)
    assert decode([encode(layer, PAYLOAD)[0], PAYLOAD[:-1] + b"!"]).frame == layer


def test_any_flipped_bit_of_a_header_is_noticed() -> None:
    header, payload = encode(COMMIT, LIST)
    for bit in range(8 * len(header)):
        damaged = bytearray(header)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError) as caught:
            decode([bytes(damaged), payload])
        assert not isinstance(caught.value, BadPayload)


@pytest.mark.parametrize(
    ("frame", "payload"),
    [
        (replace(OPEN, epoch=-1), None),
        (replace(OPEN, model=b"m" * 300), None),
        (replace(OPEN, layout=KVFormat(70_000, 1, 1, "float32")), None),
        (Nack(ID, 1, ((0, 0, 1),) * (fields.MAX_RANGES + 1)), None),
        (LAYER, PAYLOAD[:-1]),
        (LAYER, None),
        (replace(LAYER, token_stop=32), PAYLOAD),
        (Ack(ID, 1), b""),
        (replace(COMMIT, payload_bytes=23), LIST[:23]),
        (replace(LAYER, payload_bytes=MAX_PAYLOAD_BYTES + 1), bytes(MAX_PAYLOAD_BYTES + 1)),
    ],
    ids=range(10),
)
def test_nothing_is_sent_that_would_be_refused(frame: Frame, payload: bytes | None) -> None:
    with pytest.raises(FrameError):
        encode(frame, payload)


def test_largest_commit_and_nack_fit_the_header() -> None:
    top = tuple((2**32 - 1, -1.5) for _ in range(fields.MAX_TOP_LOGPROBS))
    commit = Commit(ID, 1, (SampledToken(2**32 - 1, -1.5, top),) * fields.MAX_TOKENS, 0)
    nack = Nack(ID, 1, ((2**16 - 1, 2**32 - 2, 2**32 - 1),) * fields.MAX_RANGES)
    assert decode(encode(commit, b"")).frame == commit
    assert decode(encode(nack)).frame == nack


@settings(max_examples=times(300), deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=3))
def test_decode_of_any_bytes_raises_only_frame_errors(parts: list[bytes]) -> None:
    for message in (parts, [seal(part) for part in parts]):
        with pytest.raises(FrameError):
            decode(message)


@pytest.mark.parametrize(
    "body",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\xdc\x20\x00" * 40_000,
        b"\xdc\x04\x00" * 40_000,
        b"\xde\x00\x1f\xa1a" * 20_000,
        b"\x91" * 100_000,
    ],
    ids=["list", "map", "text", "bytes", "extension", "long lists", "nested lists", "nested maps", "deep"],
)
def test_header_that_declares_more_than_it_holds_allocates_no_more_than_the_limit(body: bytes) -> None:
    message = [seal(body)]
    tracemalloc.start()
    try:
        with pytest.raises(FrameError):
            decode(message)
        assert tracemalloc.get_traced_memory()[1] < MAX_DECODE_BYTES
    finally:
        tracemalloc.stop()


@settings(max_examples=times(200), deadline=None)
@given(st.lists(st.integers(0, 255), min_size=1, max_size=4), st.integers(1, 30_000))
def test_repeated_bytes_of_any_kind_stay_below_the_limit(pattern: list[int], times: int) -> None:
    message = [seal(bytes(pattern) * times)]
    tracemalloc.start()
    try:
        with pytest.raises(FrameError):
            decode(message)
        assert tracemalloc.get_traced_memory()[1] < MAX_DECODE_BYTES
    finally:
        tracemalloc.stop()


@settings(max_examples=times(300), deadline=None)
@given(st.sampled_from(FRAMES), st.data())
def test_damaged_message_leaves_its_bytes_untouched(case: tuple[Frame, bytes | None], data: st.DataObject) -> None:
    parts = [bytearray(part) for part in encode(*case)]
    unchecked = parts[1:] if isinstance(case[0], Layer) else []  # who stores it looks at it
    part = data.draw(st.sampled_from([part for part in parts if part and part not in unchecked]))
    part[data.draw(st.integers(0, len(part) - 1))] ^= data.draw(st.integers(1, 255))
    before = [bytes(part) for part in parts]
    with pytest.raises(FrameError):
        decode([memoryview(part) for part in parts])
    assert [bytes(part) for part in parts] == before


_SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
_VALUES = st.recursive(_SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@settings(max_examples=times(400), deadline=None)
@given(st.sampled_from(FRAMES), st.data())
def test_decode_of_a_changed_header_raises_only_frame_errors(
    case: tuple[Frame, bytes | None], data: st.DataObject
) -> None:
    parts = encode(*case)
    header = header_of(*case)
    name = data.draw(st.sampled_from(sorted(header)))
    header[name] = data.draw(_VALUES)
    try:
        frame = decode([seal(header), *parts[1:]]).frame
    except FrameError:
        return
    assert encode(frame, case[1])  # what is accepted could have been sent


def test_abort_carries_an_error_to_the_other_side() -> None:
    def across(error: Exception) -> Exception:
        frame = decode(encode(abort_frame(ID, 1, error))).frame
        assert isinstance(frame, Abort)
        return abort_error(frame)

    for same in (FailedPrecondition("layout"), DataLoss("beyond repair")):
        assert type(across(same)) is type(same)
        assert str(across(same)) == str(same)
    for other in (
        InternalError("bug"),
        ProtocolError("what?"),
        TransferError("silent"),
        Cancelled("its router is gone"),
    ):
        assert type(across(other)) is TransferError
        assert str(other) in str(across(other))
    assert across(TransferError("ä" * 5000 + "\udc80"))
