"""The KV wire: what one message holds, and the only code that writes or reads one.

A message has one part, or two where the type carries a payload:

    part 0   header
             0  u64 LE   xxh3-64 of the rest of this part
             8  map      msgpack: the keys below, each exactly once, no other
    part 1   payload, raw bytes (LAYER and COMMIT only)

    every type      magic "pdkv", version 1, type (u8), transfer (16 bytes), epoch (u32)

    1 OPEN    ->    layout [layers, kv heads, head dim, item type], model (identity of what the KV depends on),
                    prompt_hash (16 bytes, over the token ids), token_start, token_stop (what will be sent: the
                    half-open range), block_tokens (granularity of COMMIT's list, nobody's physical block size),
                    max_frame_bytes (of a LAYER's payload)
    2 LAYER   ->    layer, token_start, token_stop, spent (u64: credit used up with this frame, see credit.py),
                    payload_bytes, checksum (u64, of the payload: over the hashes of its blocks, see integrity.py)
                    payload: canonical KV of these tokens (pdserve/kv_format.py)
    3 COMMIT  ->    tokens [[token id, logprob or nil, [[token id, logprob], ...]], ...], payload_bytes, checksum
                    (xxh3-64 of the payload)
                    payload: u64 LE a (layer, block), layer-major (integrity.py)
    4 ACK     <-    everything is stored and verified
    5 NACK    <-    ranges [[layer, token start, token stop], ...] to send again, then COMMIT again
    6 CREDIT  <-    total (u64: payload bytes granted so far to this transfer and epoch)
    7 ABORT   <->   code, message: the other side gave up
    8 PING    <->   reply (false: answer me), spent (as in LAYER; 0 in a reply)
    9 GONE    ->    the sender no longer has the transfer
    10 HAVE   <-    ranges, as in NACK: what an earlier epoch's sender brought and need not be sent again

-> is from sender to receiver. The payload's checksum is apart from the header's: a frame whose header is good says
what to send again; one whose header is bad says nothing and is dropped (FrameError). COMMIT's payload is checked here
(BadPayload), LAYER's where it is stored, in one go with the check of what is stored (incoming.py).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgpack
from xxhash import xxh3_64_intdigest

from kvtransfer import fields
from kvtransfer.fields import Field, LayerRange
from pdserve.config import MAX_FRAME_BYTES
from pdserve.errors import ProtocolError
from pdserve.kv_format import KVFormat
from pdserve.types import SampledToken

MAGIC: Final = "pdkv"
VERSION: Final = 1
TRANSFER_ID_BYTES: Final = 16
HASH_BYTES: Final = 8  # of one entry of COMMIT's list
MAX_HEADER_BYTES: Final = 128 * 1024
MAX_PAYLOAD_BYTES: Final = MAX_FRAME_BYTES  # also of COMMIT's
MAX_DECODE_BYTES: Final = 16 * 1024 * 1024  # of memory, however a hostile header nests and whatever it declares
MAX_MODEL_BYTES: Final = 256
MAX_ABORT_BYTES: Final = 1024
Part = bytes | memoryview

_CHECK = struct.Struct("<Q")


class FrameError(ProtocolError):
    """A message that is no frame: wrong magic, version, type, field, length, part count or checksum."""


@dataclass(frozen=True, slots=True)
class Open:
    transfer: bytes
    epoch: int
    layout: KVFormat
    model: bytes
    prompt_hash: bytes
    token_start: int
    token_stop: int
    block_tokens: int
    max_frame_bytes: int


@dataclass(frozen=True, slots=True)
class Layer:
    """`checksum` stays 0 until the payload is at hand, and where integrity is off."""

    transfer: bytes
    epoch: int
    layer: int
    token_start: int
    token_stop: int
    spent: int
    payload_bytes: int
    checksum: int = 0


@dataclass(frozen=True, slots=True)
class Commit:
    transfer: bytes
    epoch: int
    tokens: tuple[SampledToken, ...]
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Ack:
    transfer: bytes
    epoch: int


@dataclass(frozen=True, slots=True)
class Nack:
    """`ranges` may be empty: only COMMIT is asked for again."""

    transfer: bytes
    epoch: int
    ranges: tuple[LayerRange, ...]


@dataclass(frozen=True, slots=True)
class Credit:
    transfer: bytes
    epoch: int
    total: int


@dataclass(frozen=True, slots=True)
class Abort:
    transfer: bytes
    epoch: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Ping:
    transfer: bytes
    epoch: int
    reply: bool
    spent: int


@dataclass(frozen=True, slots=True)
class Gone:
    transfer: bytes
    epoch: int


@dataclass(frozen=True, slots=True)
class Have:
    transfer: bytes
    epoch: int
    ranges: tuple[LayerRange, ...]


Frame = Open | Layer | Commit | Ack | Nack | Credit | Abort | Ping | Gone | Have


class BadPayload(FrameError):
    """The header is good, the payload is not what was sent. `frame` says what to ask for again."""

    def __init__(self, frame: Commit) -> None:
        super().__init__("the payload of a COMMIT frame does not match its checksum")
        self.frame = frame


@dataclass(frozen=True, slots=True)
class Received:
    """A decoded message. `payload` is a view of the message's own buffer; empty where the type has none."""

    frame: Frame
    payload: memoryview


_NO_PAYLOAD = memoryview(b"")

_EVERY = {"transfer": fields.blob(TRANSFER_ID_BYTES, TRANSFER_ID_BYTES), "epoch": fields.uint(32)}
_TOKENS = {"token_start": fields.uint(32), "token_stop": fields.uint(32)}
_PAYLOAD = {"payload_bytes": fields.uint(32)}

_SCHEMAS: Final[dict[type[Any], tuple[int, dict[str, Field]]]] = {
    Open: (
        1,
        _EVERY
        | {"layout": fields.layout(), "model": fields.blob(1, MAX_MODEL_BYTES), "prompt_hash": fields.blob(16, 16)}
        | _TOKENS
        | {"block_tokens": fields.uint(16), "max_frame_bytes": fields.uint(32)},
    ),
    Layer: (
        2,
        _EVERY
        | {"layer": fields.uint(16)}
        | _TOKENS
        | {"spent": fields.uint(64), "checksum": fields.uint(64)}
        | _PAYLOAD,
    ),
    Commit: (3, _EVERY | {"tokens": fields.sampled_tokens()} | _PAYLOAD),
    Ack: (4, _EVERY),
    Nack: (5, _EVERY | {"ranges": fields.layer_ranges()}),
    Credit: (6, _EVERY | {"total": fields.uint(64)}),
    Abort: (7, _EVERY | {"code": fields.text(64), "message": fields.text(MAX_ABORT_BYTES)}),
    Ping: (8, _EVERY | {"reply": fields.flag(), "spent": fields.uint(64)}),
    Gone: (9, _EVERY),
    Have: (10, _EVERY | {"ranges": fields.layer_ranges()}),
}
_TYPES: Final = {code: (frame_type, schema) for frame_type, (code, schema) in _SCHEMAS.items()}
_CHECKSUM = fields.uint(64)


def encode(frame: Frame, payload: Part | None = None, *, checked: bool = True) -> list[Part]:
    """The parts of a message. The payload is passed on as a view, not copied; COMMIT's has no checksum (0) unless
    `checked`.

    Raises FrameError for whatever `decode` would refuse, so a bug of ours stops here.
    """
    code, schema = _SCHEMAS[type(frame)]
    header: dict[str, Any] = {"magic": MAGIC, "version": VERSION, "type": code}
    try:
        for name, field in schema.items():
            header[name] = field.pack(getattr(frame, name))
    except ValueError as error:
        raise FrameError(f"{name} of {type(frame).__name__.upper()}: {error}") from None
    _check_order(frame)
    if not isinstance(frame, Layer | Commit):
        if payload is not None:
            raise FrameError(f"{type(frame).__name__.upper()} carries no payload")
        return [_seal(header)]
    body = memoryview(b"" if payload is None else payload).cast("B")
    _check_payload_bytes(frame, body)
    if isinstance(frame, Commit):
        header["checksum"] = xxh3_64_intdigest(body) if checked else 0
    return [_seal(header), body]


def decode(parts: Sequence[Part], *, checked: bool = True) -> Received:
    """Read a message. Whether COMMIT's payload is what was sent is not looked at unless `checked`; LAYER's is not here.

    Raises BadPayload where only COMMIT's checksum is wrong and FrameError for everything else that is not
    exactly a frame. Copies no payload and allocates at most MAX_DECODE_BYTES.
    """
    if not 1 <= len(parts) <= 2:
        raise FrameError(f"{len(parts)} parts instead of one or two")
    header = _open_header(parts[0])
    frame_type, schema = _frame_type(header)
    has_payload = frame_type is Layer or frame_type is Commit
    if has_payload != (len(parts) == 2):
        raise FrameError(f"{frame_type.__name__.upper()} with {len(parts)} parts")
    checksum = _take(header, "checksum", _CHECKSUM) if frame_type is Commit else 0
    frame: Frame = frame_type(**{name: _take(header, name, field) for name, field in schema.items()})
    if header:
        raise FrameError(f"unknown field {next(iter(header))!r:.40} in {frame_type.__name__.upper()}")
    _check_order(frame)
    if not isinstance(frame, Layer | Commit):
        return Received(frame, _NO_PAYLOAD)
    payload = memoryview(parts[1]).cast("B")
    _check_payload_bytes(frame, payload)
    if isinstance(frame, Commit) and checked and xxh3_64_intdigest(payload) != checksum:
        raise BadPayload(frame)
    return Received(frame, payload)


def type_of(parts: Sequence[Part]) -> type[Any] | None:
    """The frame type that a message's header names; None where it is no frame's. For those who only look on: neither
    the rest of the header nor the payload is checked."""
    try:
        return _frame_type(_open_header(parts[0]))[0] if parts else None
    except FrameError:
        return None


def _seal(header: dict[str, Any]) -> bytes:
    packed = msgpack.packb(header, use_bin_type=True)
    if len(packed) + _CHECK.size > MAX_HEADER_BYTES:
        raise FrameError(f"a header of {len(packed)} bytes is longer than {MAX_HEADER_BYTES}")
    return _CHECK.pack(xxh3_64_intdigest(packed)) + bytes(packed)


def _open_header(part: Part) -> dict[str, Any]:
    """The map of a header whose checksum is right."""
    view = memoryview(part).cast("B")
    if not _CHECK.size < view.nbytes <= MAX_HEADER_BYTES:
        raise FrameError(f"a header of {view.nbytes} bytes")
    packed = view[_CHECK.size :]
    if _CHECK.unpack_from(view)[0] != xxh3_64_intdigest(packed):
        raise FrameError("the header does not match its checksum")
    try:
        pairs = msgpack.unpackb(
            packed,
            raw=False,
            use_list=False,
            strict_map_key=True,
            object_pairs_hook=_Pairs,
            max_map_len=32,
            max_array_len=fields.MAX_RANGES,  # a list's place is made before its items are read
            max_str_len=MAX_ABORT_BYTES,
            max_bin_len=MAX_MODEL_BYTES,
            max_ext_len=0,
        )
    except ValueError as error:  # msgpack's own errors are ValueErrors too
        raise FrameError(f"the header is not msgpack: {error}") from None
    if type(pairs) is not _Pairs:
        raise FrameError("the header is not a map")
    header: dict[str, Any] = dict(pairs)
    if len(header) != len(pairs):
        raise FrameError("a field occurs twice")
    return header


class _Pairs(tuple[tuple[str, Any], ...]):
    """A map as it was sent, so that a key sent twice shows. No field is a map, so none passes as a list."""

    __slots__ = ()


def _frame_type(header: dict[str, Any]) -> tuple[type[Any], dict[str, Field]]:
    for name, expected in (("magic", MAGIC), ("version", VERSION)):
        value = header.pop(name, None)
        if type(value) is not type(expected) or value != expected:
            raise FrameError(f"{name} is {value!r:.40} instead of {expected!r}")
    code = header.pop("type", None)
    if type(code) is not int or code not in _TYPES:
        raise FrameError(f"unknown frame type {code!r:.40}")
    return _TYPES[code]


def _take(header: dict[str, Any], name: str, field: Field) -> Any:
    try:
        return field.unpack(header.pop(name))
    except KeyError:
        raise FrameError(f"{name} is missing") from None
    except ValueError as error:
        raise FrameError(f"{name}: {error}") from None


def _check_order(frame: Frame) -> None:
    """What no single field can tell."""
    if isinstance(frame, Layer) and frame.token_start >= frame.token_stop:
        raise FrameError(f"[{frame.token_start}, {frame.token_stop}) is not a range of tokens")
    if isinstance(frame, Open) and (frame.token_start > frame.token_stop or frame.block_tokens == 0):
        raise FrameError(f"[{frame.token_start}, {frame.token_stop}) in blocks of {frame.block_tokens}")
    if isinstance(frame, Commit) and frame.payload_bytes % HASH_BYTES:
        raise FrameError(f"a list of hashes of {frame.payload_bytes} bytes")


def _check_payload_bytes(frame: Layer | Commit, payload: memoryview) -> None:
    if payload.nbytes != frame.payload_bytes or payload.nbytes > MAX_PAYLOAD_BYTES:
        raise FrameError(f"a payload of {payload.nbytes} bytes instead of {frame.payload_bytes}")
