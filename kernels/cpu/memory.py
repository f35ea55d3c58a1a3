"""Large memory in huge pages, zero and uncommitted until it is written.

A read of many megabytes in small pages stops at every page's end, which costs about a fifth of the memory's rate.
"""

from __future__ import annotations

import mmap

import torch

HUGE_PAGE_BYTES = 2 * 2**20
_CHUNK_BYTES = 64 * 2**20


def map_zeros(size_bytes: int) -> torch.Tensor:
    """uint8 [size_bytes] of zeros on a border of huge pages. The memory is given back with the last view of it."""
    mapped = mmap.mmap(-1, max(size_bytes, 1) + HUGE_PAGE_BYTES)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    first = -memory.data_ptr() % HUGE_PAGE_BYTES
    return memory[first : first + size_bytes]


class Arena:
    """Hands out pieces of large chunks one after another, so that a model's weights share huge pages."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, size_bytes: int) -> torch.Tensor:
        """uint8 [size_bytes] of zeros, aligned to a page."""
        if self._used + size_bytes > len(self._chunk):
            self._chunk = map_zeros(max(size_bytes, _CHUNK_BYTES))
            self._used = 0
        piece = self._chunk[self._used : self._used + size_bytes]
        self._used += -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        return piece
