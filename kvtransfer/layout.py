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

    def read(self, layer: int, start: int, stop: int) -> memoryview:
        """The canonical bytes of tokens [start, stop) of a layer, in a buffer the caller may keep."""
        ...


class KVWriter(Protocol):
    """Writes one sequence's KV. Called from the link's thread, only for blocks leased to that sequence."""

    def write(self, layer: int, start: int, stop: int, payload: memoryview) -> None:
        """Store the canonical bytes of tokens [start, stop) of a layer. Copies; keeps no reference."""
        ...

    def read(self, layer: int, start: int, stop: int) -> memoryview:
        """What is stored, in canonical bytes: for the end-to-end check."""
        ...
