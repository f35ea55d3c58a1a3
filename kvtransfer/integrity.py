"""End-to-end integrity: what was stored at the receiver is what was computed at the sender.

COMMIT lists one hash for each (layer, block). A block is block_tokens consecutive tokens counted from position 0, cut
to the transfer's range. Its hash is the xxh3-64 of its canonical K bytes and then of its V bytes, the one seeding the
other, and the first seeded with all that the bytes belong to: transfer, model, prompt, layer and token range. So a
block of another request, layer, place or model never matches, and how the range was cut into frames does not show.

A LAYER frame's checksum is the xxh3-64 over the hashes of its pieces: the blocks it holds, at its ends maybe parts of
blocks. So each byte is hashed once on either side: at the sender after it was gathered, at the receiver as it reads
back what it stored, in steps that stay in the cache.

The hashes are computed as blocks become complete, so that COMMIT finds them done. Knows no frame and no store: bytes
come in as arguments. xxh3 finds accidents, not forgers; a hostile peer is kept out by the transport.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from xxhash import xxh3_64_intdigest, xxh3_128_digest

from kvtransfer.frames import HASH_BYTES, Open
from kvtransfer.ranges import RangeSet

BLOCK_TOKENS = 32
_STEP_BYTES = 256 * 1024  # of what is read to be hashed: it must stay in a core's own cache

Read = Callable[[int, int, int], memoryview]  # layer, start, stop -> the canonical bytes of [start, stop) of a layer


def hash_tokens(token_ids: Sequence[int]) -> bytes:
    """16 bytes that stand for exactly these token ids in this order."""
    return xxh3_128_digest(struct.pack(f"<{len(token_ids)}I", *token_ids))


class BlockHashes:
    """The hashes of one transfer's blocks, on either side. Block numbers count from the transfer's first one."""

    def __init__(self, offer: Open) -> None:
        self._offer = offer
        key = b"".join((offer.transfer, len(offer.model).to_bytes(4, "little"), offer.model, offer.prompt_hash))
        self._seed = xxh3_64_intdigest(key)
        layers = range(offer.layout.layer_count)
        self._block_count = block_count(offer)
        self._hashes: list[list[int | None]] = [[None] * self._block_count for _ in layers]
        self._present = [RangeSet() for _ in layers]
        blocks_a_step = _STEP_BYTES // offer.layout.payload_bytes(offer.block_tokens)
        self._step_tokens = max(blocks_a_step, 1) * offer.block_tokens

    def forget(self, layer: int, start: int, stop: int) -> None:
        """The bytes of [start, stop) may change: drop the hashes of the blocks they touch."""
        self._present[layer].discard(start, stop)
        blocks = self._blocks(start, stop)
        self._hashes[layer][blocks.start : blocks.stop] = [None] * len(blocks)

    def absorb(self, layer: int, start: int, stop: int, payload: memoryview) -> int:
        """Hash [start, stop), whose canonical bytes are `payload`; the checksum of a frame of them."""
        return _checksum(self._absorb(layer, start, stop, payload))

    def verify(self, layer: int, start: int, stop: int, read: Read, checksum: int) -> bool:
        """Hash what `read` gives for [start, stop); whether a frame of it has this checksum."""
        pieces: list[int] = []
        for first, last in self._steps(start, stop):
            pieces += self._absorb(layer, first, last, read(layer, first, last))
        return _checksum(pieces) == checksum

    def complete(self, layer: int, start: int, stop: int, read: Read) -> None:
        """Tokens [start, stop) of a layer are there: hash those blocks that they touch which are whole now and were not
        hashed as such."""
        self._present[layer].add(start, stop)
        for begin, end in self._unhashed(layer, start, stop):
            for first, last in self._steps(begin, end):
                self._absorb(layer, first, last, read(layer, first, last))

    def packed(self) -> bytes:
        """COMMIT's payload. Every block must have its hash."""
        return b"".join(struct.pack(f"<{self._block_count}Q", *hashes) for hashes in self._hashes)

    def mismatches(self, packed: memoryview) -> list[tuple[int, int]]:
        """The (layer, block)s whose hash is not the one in COMMIT's payload, or that have none."""
        expected = struct.unpack(f"<{packed.nbytes // HASH_BYTES}Q", packed)
        own = [(layer, block) for layer in range(len(self._hashes)) for block in range(self._block_count)]
        return [
            (layer, block)
            for (layer, block), value in zip(own, expected, strict=True)
            if self._hashes[layer][block] != value
        ]

    def _absorb(self, layer: int, start: int, stop: int, payload: memoryview) -> list[int]:
        """The hashes of the pieces of [start, stop). Those of whole blocks are kept."""
        row, size = self._offer.layout.row_bytes, self._offer.block_tokens
        keys, values = self._offer.layout.rows(payload)
        borders = [start, *range(start - start % size + size, stop, size), stop]
        seed = self._seed ^ layer << 48  # layer, place and length are 64 bits: no two seeds of a transfer are equal
        pieces: list[int] = []
        begin = 0
        for first, last in pairwise(borders):
            end = begin + (last - first) * row
            key_hash = xxh3_64_intdigest(keys[begin:end], seed ^ (first << 16 | last - first))
            pieces.append(xxh3_64_intdigest(values[begin:end], key_hash))
            begin = end
        self._keep(layer, start, stop, pieces)
        return pieces

    def _keep(self, layer: int, start: int, stop: int, pieces: list[int]) -> None:
        """Of the pieces of [start, stop), the hashes of whole blocks."""
        blocks = self._blocks(start, stop)
        if not blocks:
            return
        first = blocks.start + (block_range(self._offer, blocks[0])[0] < start)
        last = blocks.stop - (block_range(self._offer, blocks[-1])[1] > stop)
        if first < last:
            self._hashes[layer][first:last] = pieces[first - blocks.start : last - blocks.start]

    def _unhashed(self, layer: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Runs of complete blocks without a hash that [start, stop) touches, in tokens."""
        run: tuple[int, int] | None = None
        for block in self._blocks(start, stop):
            if self._hashes[layer][block] is not None:
                continue
            first, last = block_range(self._offer, block)
            if not self._present[layer].covers(first, last):
                continue
            if run is not None and run[1] == first:
                run = run[0], last
                continue
            if run is not None:
                yield run
            run = first, last
        if run is not None:
            yield run

    def _steps(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """[start, stop) in parts that end at blocks' borders."""
        while start < stop:
            border = (start // self._step_tokens + 1) * self._step_tokens
            yield start, min(border, stop)
            start = border

    def _blocks(self, start: int, stop: int) -> range:
        """The blocks that [start, stop) touches."""
        size = self._offer.block_tokens
        first_block = self._offer.token_start // size
        return range(max(start // size - first_block, 0), min(-(-stop // size) - first_block, self._block_count))


class NoHashes:
    """In the place of BlockHashes where integrity is off, to measure what it costs: knows nothing, doubts nothing."""

    def __init__(self, offer: Open) -> None:
        self._list = bytes(list_bytes(offer))

    def forget(self, layer: int, start: int, stop: int) -> None:
        pass

    def absorb(self, layer: int, start: int, stop: int, payload: memoryview) -> int:
        return 0

    def verify(self, layer: int, start: int, stop: int, read: Read, checksum: int) -> bool:
        return True

    def complete(self, layer: int, start: int, stop: int, read: Read) -> None:
        pass

    def packed(self) -> bytes:
        return self._list

    def mismatches(self, packed: memoryview) -> list[tuple[int, int]]:
        return []


def _checksum(pieces: Sequence[int]) -> int:
    return xxh3_64_intdigest(struct.pack(f"<{len(pieces)}Q", *pieces))


Hashes = BlockHashes | NoHashes


def hashes_of(offer: Open, integrity: bool) -> Hashes:
    """What one side of a transfer keeps. Both sides must be of the same mind."""
    return BlockHashes(offer) if integrity else NoHashes(offer)


def block_count(offer: Open) -> int:
    """How many blocks the offered tokens touch."""
    if offer.token_start >= offer.token_stop:
        return 0
    return -(-offer.token_stop // offer.block_tokens) - offer.token_start // offer.block_tokens


def block_range(offer: Open, block: int) -> tuple[int, int]:
    """The tokens [start, stop) of a block, which is counted from the offer's first one."""
    start = (offer.token_start // offer.block_tokens + block) * offer.block_tokens
    return max(start, offer.token_start), min(start + offer.block_tokens, offer.token_stop)


def list_bytes(offer: Open) -> int:
    """Bytes of the list that COMMIT carries."""
    return HASH_BYTES * offer.layout.layer_count * block_count(offer)
