"""What a token's keys and values look like as bytes: one value, and the only place that computes with their size.

The cache, the wire, the memory plan and the fingerprint all read it. Nothing else knows how many bytes a token has.

The canonical form, in which KV crosses the wire and readers and writers exchange it: a range of tokens [a, b) of one
layer is one buffer, K of all its tokens, then V of all its tokens, each (token, head, dimension), row-major,
little-endian. No block size, instruction set or head sharding shows in it. An item type with scales has each head's
scale behind its values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class ItemType:
    """How K and V are stored. `bits`: of a value. `scale_bytes`: of the scale that each token and head has; 0: none."""

    bits: int
    scale_bytes: int = 0


ITEM_TYPES: Final[Mapping[str, ItemType]] = MappingProxyType(
    {"float32": ItemType(32), "bfloat16": ItemType(16), "float16": ItemType(16)}
)


@dataclass(frozen=True, slots=True)
class KVFormat:
    """The shape of one token's KV. `item`: one of ITEM_TYPES. Two workers can exchange KV only if theirs are equal.

    Raises ValueError where a size is not positive or the item type is unknown.
    """

    layer_count: int
    kv_heads: int
    head_dim: int
    item: str

    def __post_init__(self) -> None:
        if min(self.layer_count, self.kv_heads, self.head_dim) < 1:
            raise ValueError(f"{self.layer_count} layers of {self.kv_heads} heads of {self.head_dim} hold no KV")
        if self.item not in ITEM_TYPES:
            raise ValueError(f"{self.item!r:.40} is none of {', '.join(ITEM_TYPES)}")

    @property
    def identity(self) -> str:
        """Equal for equal formats only: for the fingerprint."""
        return f"kv-{self.layer_count}x{self.kv_heads}x{self.head_dim}-{self.item}"

    @property
    def head_bytes(self) -> int:
        """Bytes of one token's K (or V) of one head in one layer."""
        item = ITEM_TYPES[self.item]
        return -(-self.head_dim * item.bits // 8) + item.scale_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's K (or V) in one layer."""
        return self.kv_heads * self.head_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers, K and V."""
        return self.layer_count * self.payload_bytes(1)

    def payload_bytes(self, token_count: int) -> int:
        """Bytes of `token_count` tokens of one layer, K and V: the canonical form of a range."""
        return 2 * token_count * self.row_bytes

    def rows(self, payload: memoryview) -> tuple[memoryview, memoryview]:
        """The K rows and the V rows of a range in canonical form, `row_bytes` for each token."""
        half = payload.nbytes // 2
        return payload[:half], payload[half:]
