"""The canonical layout of KV on the wire: what both sides must agree on, and nothing they need not.

A range of tokens [a, b) of one layer travels as one buffer: K of all its tokens, then V of all its tokens, each
(token, head, dimension), row-major, little-endian. No block size, instruction set or head sharding shows in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of one token's KV. Two workers can exchange KV only if theirs are equal."""

    layer_count: int
    kv_heads: int
    head_dim: int
    dtype: str

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's K (or V) in one layer."""
        return self.kv_heads * self.head_dim * ITEM_BYTES[self.dtype]

    def payload_bytes(self, token_count: int) -> int:
        """Bytes of `token_count` tokens of one layer, K and V."""
        return 2 * token_count * self.row_bytes


class KVReader(Protocol):
    """Reads one sequence's KV. Called from the link's thread, only for tokens already computed."""

    def read_into(self, layer: int, start: int, stop: int, out: memoryview) -> None:
        """Copy the canonical bytes of tokens [start, stop) of a layer into `out`, which has room for just these. Keeps
        no reference."""
        ...


class KVWriter(Protocol):
    """Writes one sequence's KV. Called from the link's thread, only for blocks leased to that sequence."""

    def write(self, layer: int, start: int, stop: int, payload: memoryview) -> None:
        """Store the canonical bytes of tokens [start, stop) of a layer. Copies; keeps no reference."""
        ...

    def read_into(self, layer: int, start: int, stop: int, out: memoryview) -> None:
        """As a reader's, of what is stored: for the end-to-end check."""
        ...


class ScratchReader:
    """Reads KV of a layout into one buffer of its own, for who only looks at it: the next read overwrites the last."""

    def __init__(self, source: KVReader | KVWriter, layout: KVLayout) -> None:
        self._source = source
        self._layout = layout
        self._buffer = memoryview(b"")

    def __call__(self, layer: int, start: int, stop: int) -> memoryview:
        byte_count = self._layout.payload_bytes(stop - start)
        if byte_count > len(self._buffer):
            self._buffer = memoryview(bytearray(byte_count))
        out = self._buffer[:byte_count]
        self._source.read_into(layer, start, stop, out)
        return out
