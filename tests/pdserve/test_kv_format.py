"""The one place that computes with KV's bytes: sizes, identity, the two halves of a range."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve import kv_format
from pdserve.kv_format import ItemType, KVFormat

FORMAT = KVFormat(layer_count=30, kv_heads=3, head_dim=64, item="bfloat16")


@pytest.mark.parametrize(("item", "item_bytes"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_sizes_follow_from_the_item_type(item: str, item_bytes: int) -> None:
    made = replace(FORMAT, item=item)
    assert made.head_bytes == 64 * item_bytes
    assert made.row_bytes == 3 * 64 * item_bytes
    assert made.payload_bytes(7) == 2 * 7 * 3 * 64 * item_bytes
    assert made.token_bytes == 30 * 2 * 3 * 64 * item_bytes


def test_scales_count_once_for_each_token_and_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_format, "ITEM_TYPES", {"int4": ItemType(bits=4, scale_bytes=2)})
    made = KVFormat(layer_count=2, kv_heads=3, head_dim=65, item="int4")
    assert made.head_bytes == 33 + 2
    assert made.payload_bytes(5) == 2 * 5 * 3 * 35


def test_rows_are_the_keys_and_the_values_of_a_range() -> None:
    made = KVFormat(layer_count=1, kv_heads=1, head_dim=2, item="float16")
    keys, values = made.rows(memoryview(bytes(range(24))))
    assert (bytes(keys), bytes(values)) == (bytes(range(12)), bytes(range(12, 24)))
    assert len(keys) == 3 * made.row_bytes


def test_every_difference_shows_in_the_identity() -> None:
    others = [replace(FORMAT, layer_count=3), replace(FORMAT, kv_heads=30), replace(FORMAT, head_dim=4)]
    identities = {made.identity for made in (FORMAT, *others, replace(FORMAT, item="float16"))}
    assert len(identities) == 5


@pytest.mark.parametrize(
    "change", [{"layer_count": 0}, {"kv_heads": 0}, {"head_dim": -1}, {"item": "int3"}, {"item": "x" * 100}], ids=str
)
def test_what_is_no_format_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"hold no KV|is none of"):
        replace(FORMAT, **change)
