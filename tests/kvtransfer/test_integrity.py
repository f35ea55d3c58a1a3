"""Block hashes: independent of how the range was cut, and bound to all they belong to."""

from __future__ import annotations

import random
import struct
from dataclasses import replace

import pytest

from kvtransfer.frames import Open
from kvtransfer.integrity import BlockHashes, block_count, block_range, hash_tokens, list_bytes
from pdserve.kv_format import KVFormat
from support.kv_store import FakeStore

LAYOUT = KVFormat(2, 1, 4, "float32")
OFFER = Open(bytes(16), 1, LAYOUT, b"model", hash_tokens([1, 2, 3]), 5, 70, 16, 4096)
STORE = FakeStore.random(LAYOUT, 80, seed=1)


def hashes_of(offer: Open, cuts: list[int], store: FakeStore = STORE) -> bytes:
    hashes = BlockHashes(offer)
    pieces = list(zip([offer.token_start, *cuts], [*cuts, offer.token_stop], strict=True))
    random.Random(0).shuffle(pieces)
    for layer in range(offer.layout.layer_count):
        for start, stop in pieces:
            hashes.absorb(layer, start, stop, store.read(layer, start, stop))
            hashes.complete(layer, start, stop, store.read)
    return hashes.packed()


def whole(offer: Open = OFFER, store: FakeStore = STORE) -> bytes:
    return hashes_of(offer, [], store)


@pytest.mark.parametrize("cuts", [[], [16], [15], [17], [6, 7, 8], [16, 32, 48, 64], list(range(6, 70))], ids=str)
def test_hashes_do_not_depend_on_the_cuts(cuts: list[int]) -> None:
    assert hashes_of(OFFER, cuts) == whole()


def test_list_has_one_hash_for_each_layer_and_block() -> None:
    assert block_count(OFFER) == 5
    assert [block_range(OFFER, block) for block in range(5)] == [(5, 16), (16, 32), (32, 48), (48, 64), (64, 70)]
    assert len(whole()) == list_bytes(OFFER) == 2 * 5 * 8
    assert len(set(struct.unpack("<10Q", whole()))) == 10


@pytest.mark.parametrize(
    ("start", "stop", "count"), [(0, 0, 0), (5, 5, 0), (0, 1, 1), (0, 16, 1), (0, 17, 2), (15, 17, 2), (16, 32, 1)]
)
def test_block_count_at_the_borders(start: int, stop: int, count: int) -> None:
    assert block_count(replace(OFFER, token_start=start, token_stop=stop)) == count


@pytest.mark.parametrize(
    "other",
    [{"transfer": b"x" * 16}, {"model": b"other"}, {"prompt_hash": hash_tokens([1, 2])}, {"token_stop": 69}],
    ids=lambda other: next(iter(other)),
)
def test_block_of_another_owner_never_matches(other: dict[str, object]) -> None:
    hashes = BlockHashes(OFFER)
    for layer in range(2):
        hashes.complete(layer, 5, 70, STORE.read)
    foreign = whole(replace(OFFER, **other))
    expected = [(0, 4), (1, 4)] if "token_stop" in other else [(layer, b) for layer in range(2) for b in range(5)]
    assert hashes.mismatches(memoryview(foreign)) == expected


def test_equal_bytes_at_another_place_have_another_hash() -> None:
    same = FakeStore(LAYOUT, 80)  # zeros everywhere
    assert len(set(struct.unpack("<10Q", whole(store=same)))) == 10


def test_swapped_keys_and_values_are_noticed() -> None:
    swapped = FakeStore(LAYOUT, 80)
    swapped.keys, swapped.values = STORE.values, STORE.keys
    assert whole(store=swapped) != whole()


def test_mismatches_name_layer_and_block() -> None:
    damaged = FakeStore(LAYOUT, 80)
    damaged.keys[:], damaged.values[:] = STORE.keys, STORE.values
    damaged.values[1, 69, -1] ^= 1
    hashes = BlockHashes(OFFER)
    for layer in range(2):
        hashes.complete(layer, 5, 70, damaged.read)
    assert hashes.mismatches(memoryview(whole())) == [(1, 4)]


class Reads:
    """A store's `read`, and which ranges were read."""

    def __init__(self, store: FakeStore = STORE) -> None:
        self.ranges: list[tuple[int, int]] = []
        self._store = store

    def __call__(self, layer: int, start: int, stop: int) -> memoryview:
        self.ranges.append((start, stop))
        return self._store.read(layer, start, stop)


def test_rewritten_blocks_are_hashed_anew_and_no_others() -> None:
    hashes, reads = BlockHashes(OFFER), Reads()
    hashes.complete(0, 5, 70, STORE.read)
    hashes.forget(0, 20, 33)
    hashes.complete(0, 20, 33, reads)
    assert reads.ranges == [(16, 48)]


def test_incomplete_blocks_are_not_hashed() -> None:
    hashes, reads = BlockHashes(OFFER), Reads()
    hashes.complete(0, 5, 31, reads)
    hashes.complete(0, 32, 50, reads)
    assert reads.ranges == [(5, 16), (32, 48)]
    hashes.complete(0, 31, 32, reads)
    assert reads.ranges[2:] == [(16, 32)]


def test_forgotten_tokens_are_no_longer_there() -> None:
    hashes, reads = BlockHashes(OFFER), Reads()
    hashes.complete(0, 16, 32, STORE.read)
    hashes.forget(0, 20, 24)
    hashes.complete(0, 24, 32, reads)
    assert reads.ranges == []


@pytest.mark.parametrize(("start", "stop"), [(5, 70), (16, 32), (20, 50), (6, 7), (15, 17)])
def test_frame_is_verified_by_what_is_stored_and_a_changed_bit_shows(start: int, stop: int) -> None:
    checksum = BlockHashes(OFFER).absorb(1, start, stop, STORE.read(1, start, stop))
    assert BlockHashes(OFFER).verify(1, start, stop, STORE.read, checksum)
    assert not BlockHashes(OFFER).verify(0, start, stop, STORE.read, checksum), "another layer"
    assert not BlockHashes(replace(OFFER, transfer=b"x" * 16)).verify(1, start, stop, STORE.read, checksum)
    for token in (start, stop - 1):
        damaged = FakeStore(LAYOUT, 80)
        damaged.keys[:], damaged.values[:] = STORE.keys, STORE.values
        damaged.keys[1, token, 0] ^= 128
        assert not BlockHashes(OFFER).verify(1, start, stop, damaged.read, checksum)


def test_steps_in_which_much_is_read_show_neither_in_list_nor_checksum() -> None:
    layout = KVFormat(1, 8, 64, "float32")  # 4 KiB a token: four blocks a step
    offer = replace(OFFER, layout=layout, token_start=3, token_stop=200)
    store = FakeStore.random(layout, 200, seed=2)
    hashes, reads = BlockHashes(offer), Reads(store)
    checksum = BlockHashes(offer).absorb(0, 3, 200, store.read(0, 3, 200))
    assert hashes.verify(0, 3, 200, reads, checksum)
    assert reads.ranges == [(3, 64), (64, 128), (128, 192), (192, 200)]
    assert hashes.packed() == hashes_of(offer, [100], store)


def test_token_hash_tells_order_length_and_value_apart() -> None:
    lists = [[], [0], [0, 0], [1, 2], [2, 1], [1, 2, 0], [256], [2**32 - 1]]
    assert len({hash_tokens(ids) for ids in lists}) == len(lists)
    assert hash_tokens((1, 2)) == hash_tokens([1, 2])
    assert len(hash_tokens([])) == 16
