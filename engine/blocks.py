"""The block pool: which of a worker's KV blocks are free and who holds the others.

A block is in exactly one state: free, cached or leased (see `BlockCounts`; nothing is cached yet). A lease belongs
to an owner and is returned in exactly one function, `give_back`. Blocks may be shared: a block is free again when
the last of its owners has given it back.

It knows numbers only: no tensor, no clock, no thread. Its user calls it from one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence

from pdserve.types import BlockCounts


class IntegrityError(AssertionError):
    """The pool's books do not add up: a bug."""


class BlockPool:
    """`block_count` blocks of `block_tokens` tokens each, numbered from 0."""

    def __init__(self, block_count: int, block_tokens: int) -> None:
        if block_count < 1 or block_tokens < 1:
            raise ValueError(f"a pool of {block_count} blocks of {block_tokens} tokens cannot hold anything")
        self.block_count = block_count
        self.block_tokens = block_tokens
        self._free: deque[int] = deque(range(block_count))
        self._references = [0] * block_count
        self._leases: dict[Hashable, list[int]] = {}

    @property
    def free_count(self) -> int:
        return len(self._free)

    def counts(self) -> BlockCounts:
        return BlockCounts(free=len(self._free), cached=0, leased=self.block_count - len(self._free))

    def blocks_for(self, token_count: int) -> int:
        """How many blocks hold `token_count` tokens."""
        return -(-token_count // self.block_tokens)

    def lease(self, owner: Hashable, count: int) -> list[int] | None:
        """Lease `count` more blocks to `owner`: all of them, or None and nothing changes."""
        if count > len(self._free):
            return None
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        self._leases.setdefault(owner, []).extend(blocks)
        return blocks

    def share(self, owner: Hashable, blocks: Sequence[int]) -> None:
        """Add `owner` to the holders of blocks that somebody holds already."""
        for block in blocks:
            if self._references[block] == 0:
                raise IntegrityError(f"block {block} is free and cannot be shared with {owner}")
        for block in blocks:
            self._references[block] += 1
        self._leases.setdefault(owner, []).extend(blocks)

    def give_back(self, owner: Hashable) -> int:
        """End the owner's lease; returns how many blocks became free. An owner without a lease gives back nothing,
        so a late or repeated call harms nobody."""
        freed = 0
        for block in self._leases.pop(owner, ()):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)
                freed += 1
        return freed

    def leased_to(self, owner: Hashable) -> tuple[int, ...]:
        return tuple(self._leases.get(owner, ()))

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every block is free once, or referenced as often as it is leased."""
        held = [0] * self.block_count
        for blocks in self._leases.values():
            for block in blocks:
                held[block] += 1
        if held != self._references:
            wrong = next(i for i in range(self.block_count) if held[i] != self._references[i])
            raise IntegrityError(f"block {wrong}: {held[wrong]} leases, {self._references[wrong]} references")
        free = set(self._free)
        if len(free) != len(self._free):
            raise IntegrityError("a block is in the free list twice")
        for block, count in enumerate(held):
            if (count == 0) != (block in free):
                raise IntegrityError(f"block {block}: {count} leases and {'free' if block in free else 'not free'}")
