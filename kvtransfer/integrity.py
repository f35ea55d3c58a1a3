"""End-to-end integrity: what was stored at the receiver is what was computed at the sender.

COMMIT lists one xxh3-64 for each (layer, block). A block is block_tokens consecutive tokens counted from position 0,
cut to the transfer's range. Its hash is over its canonical K bytes, then its V bytes, and is seeded with all that the
bytes belong to: transfer, model, prompt, layer and token range. So a block of another request, layer, place or model
never matches, and how the range was cut into frames does not show.

The hashes are computed as blocks become complete, so that COMMIT finds them done. Knows no frame and no store: bytes
come in as arguments. xxh3 finds accidents, not forgers; a hostile peer is kept out by the transport.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from xxhash import xxh3_64, xxh3_64_intdigest, xxh3_128_digest

from kvtransfer.frames import HASH_BYTES, Open
from kvtransfer.ranges import RangeSet

BLOCK_TOKENS = 32
_PLACE = struct.Struct("<III")


def hash_tokens(token_ids: Sequence[int]) -> bytes:
    """16 bytes that stand for exactly these token ids in this order."""
    return xxh3_128_digest(struct.pack(f"<{len(token_ids)}I", *token_ids))


class BlockHashes:
    """The hashes of one transfer's blocks, on either side. Block numbers count from the transfer's first one."""

    def __init__(self, offer: Open) -> None:
        self._offer = offer
        self._key = b"".join((offer.transfer, len(offer.model).to_bytes(4, "little"), offer.model, offer.prompt_hash))
        layers = range(offer.layout.layer_count)
        self._block_count = block_count(offer)
        self._hashes: list[list[int | None]] = [[None] * self._block_count for _ in layers]
        self._present = [RangeSet() for _ in layers]

    def present(self, layer: int, start: int, stop: int) -> None:
        """Tokens [start, stop) of a layer are there."""
        self._present[layer].add(start, stop)

    def forget(self, layer: int, start: int, stop: int) -> None:
        """The bytes of [start, stop) may change: drop the hashes of the blocks they touch."""
        for block in self._blocks(start, stop):
            self._hashes[layer][block] = None

    def absorb(self, layer: int, start: int, stop: int, payload: memoryview) -> None:
        """Hash the blocks that lie whole in [start, stop), whose canonical bytes are `payload`, and have none yet."""
        row = self._offer.layout.row_bytes
        values = (stop - start) * row  # where V begins
        hashes = self._hashes[layer]
        for block in self._blocks(start, stop):
            first, last = block_range(self._offer, block)
            if hashes[block] is None and start <= first and last <= stop:
                begin, end = (first - start) * row, (last - start) * row
                digest = xxh3_64(seed=self._seed(layer, first, last))
                digest.update(payload[begin:end])
                digest.update(payload[values + begin : values + end])
                hashes[block] = digest.intdigest()

    def unhashed(self, layer: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Runs of tokens to read and absorb: the complete blocks without a hash that [start, stop) touches."""
        run: tuple[int, int] | None = None
        for block in self._blocks(start, stop):
            first, last = block_range(self._offer, block)
            if self._hashes[layer][block] is not None or not self._present[layer].covers(first, last):
                continue
            if run is not None and run[1] == first:
                run = run[0], last
                continue
            if run is not None:
                yield run
            run = first, last
        if run is not None:
            yield run

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

    def _blocks(self, start: int, stop: int) -> range:
        """The blocks that [start, stop) touches."""
        size = self._offer.block_tokens
        first_block = self._offer.token_start // size
        return range(max(start // size - first_block, 0), min(-(-stop // size) - first_block, self._block_count))

    def _seed(self, layer: int, start: int, stop: int) -> int:
        return xxh3_64_intdigest(self._key + _PLACE.pack(layer, start, stop))


class NoHashes:
    """In the place of BlockHashes where integrity is off, to measure what it costs: knows nothing, doubts nothing."""

    def __init__(self, offer: Open) -> None:
        self._list = bytes(list_bytes(offer))

    def present(self, layer: int, start: int, stop: int) -> None:
        pass

    def forget(self, layer: int, start: int, stop: int) -> None:
        pass

    def absorb(self, layer: int, start: int, stop: int, payload: memoryview) -> None:
        pass

    def unhashed(self, layer: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
        return iter(())

    def packed(self) -> bytes:
        return self._list

    def mismatches(self, packed: memoryview) -> list[tuple[int, int]]:
        return []


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
