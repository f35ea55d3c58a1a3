"""How the single fields of a frame's header cross the wire: one checked pair of functions a kind.

A field is packed and unpacked under the same limits, so that no side ever sends what the other would refuse.
Out of range, of a wrong type, too long: ValueError. Knows nothing of frame types.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pdserve.kv_format import KVFormat
from pdserve.types import SampledToken

MAX_RANGES = 1024  # of one NACK; a receiver that misses more asks again
MAX_TOKENS = 128  # of one COMMIT
MAX_TOP_LOGPROBS = 32  # of one token

LayerRange = tuple[int, int, int]  # layer, token start, token stop


@dataclass(frozen=True, slots=True)
class Field:
    """`pack` turns a value into what msgpack can carry, `unpack` turns it back. Both raise ValueError."""

    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]


def uint(bits: int) -> Field:
    """An integer from 0 to 2**bits - 1. A bool is none."""

    def check(value: Any) -> int:
        if type(value) is not int or not 0 <= value < 1 << bits:
            raise ValueError(f"{value!r:.40} is not an unsigned integer of {bits} bits")
        return value

    return Field(check, check)


def blob(min_bytes: int, max_bytes: int) -> Field:
    def check(value: Any) -> bytes:
        if type(value) is not bytes or not min_bytes <= len(value) <= max_bytes:
            raise ValueError(f"{value!r:.40} is not of {min_bytes} to {max_bytes} bytes")
        return value

    return Field(check, check)


def text(max_bytes: int) -> Field:
    def check(value: Any) -> str:
        if type(value) is not str or len(value.encode()) > max_bytes:
            raise ValueError(f"{value!r:.40} is not a text of at most {max_bytes} bytes")
        return value

    return Field(check, check)


def flag() -> Field:
    def check(value: Any) -> bool:
        if type(value) is not bool:
            raise ValueError(f"{value!r:.40} is neither true nor false")
        return value

    return Field(check, check)


def layout() -> Field:
    """A KVFormat: [layer count, KV heads, head dimension, item type]."""

    def unpack(value: Any) -> KVFormat:
        layers, heads, dimension, item = _array(value, 4, 4)
        return KVFormat(_u16.unpack(layers), _u16.unpack(heads), _u16.unpack(dimension), _item.unpack(item))

    def pack(value: KVFormat) -> list[Any]:
        packed = [value.layer_count, value.kv_heads, value.head_dim, value.item]
        unpack(tuple(packed))
        return packed

    return Field(pack, unpack)


def layer_ranges() -> Field:
    """A list of [layer, token start, token stop], none of them empty."""

    def unpack(value: Any) -> tuple[LayerRange, ...]:
        return tuple(_layer_range(item) for item in _array(value, 0, MAX_RANGES))

    def pack(value: tuple[LayerRange, ...]) -> tuple[LayerRange, ...]:
        return unpack(value)

    return Field(pack, unpack)


def sampled_tokens() -> Field:
    """A list of [token id, logprob or nil, list of [token id, logprob]]."""

    def unpack(value: Any) -> tuple[SampledToken, ...]:
        return tuple(_sampled_token(item) for item in _array(value, 0, MAX_TOKENS))

    def pack(value: tuple[SampledToken, ...]) -> list[Any]:
        packed = [(token.token_id, token.logprob, token.top_logprobs) for token in value]
        unpack(tuple(packed))
        return packed

    return Field(pack, unpack)


_u16 = uint(16)
_u32 = uint(32)
_item = text(32)


def _array(value: Any, min_items: int, max_items: int) -> tuple[Any, ...]:
    if type(value) is not tuple or not min_items <= len(value) <= max_items:
        raise ValueError(f"{value!r:.40} is not a list of {min_items} to {max_items}")
    return value


def _layer_range(item: Any) -> LayerRange:
    layer, start, stop = _array(item, 3, 3)
    if not _u32.unpack(start) < _u32.unpack(stop):
        raise ValueError(f"[{start}, {stop}) is not a range of tokens")
    return _u16.unpack(layer), start, stop


def _sampled_token(item: Any) -> SampledToken:
    token_id, logprob, top = _array(item, 3, 3)
    if logprob is not None:
        _logprob(logprob)
    pairs = tuple(_array(pair, 2, 2) for pair in _array(top, 0, MAX_TOP_LOGPROBS))
    return SampledToken(
        _u32.unpack(token_id), logprob, tuple((_u32.unpack(other), _logprob(value)) for other, value in pairs)
    )


def _logprob(value: Any) -> float:
    if type(value) is not float or value != value:
        raise ValueError(f"{value!r:.40} is not a logprob")
    return value
