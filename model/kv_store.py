"""The paged KV store: the cache's memory, and one sequence's view of it as canonical bytes.

`StoredKV` has the shape of kvtransfer's reader and writer without knowing that package: the store and the wire meet in
the workers.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike

import torch

from kernels.ops import CacheShape, Kernels, slots_of


class KVStore:
    """The memory of all blocks of one worker."""

    def __init__(self, kernels: Kernels, shape: CacheShape) -> None:
        self.kernels = kernels
        self.shape = shape
        self.cache = kernels.make_cache(shape)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` tokens of a block into another one, in all layers."""
        from_slots = slots_of((source,), 0, tokens, self.shape.block_tokens)
        to_slots = slots_of((target,), 0, tokens, self.shape.block_tokens)
        for layer in range(self.shape.layer_count):
            k, v = self.kernels.read_kv(self.cache, layer, from_slots)
            self.kernels.write_kv(self.cache, layer, to_slots, k, v)


class StoredKV:
    """`engine.sequence.SequenceKV` over a store: one sequence's KV, through its block table as it is now."""

    def __init__(self, store: KVStore, blocks: ListLike[int]) -> None:
        self._store = store
        self._all_slots = slots_of(blocks, 0, len(blocks) * store.shape.block_tokens, store.shape.block_tokens)

    def read_into(self, layer: int, start: int, stop: int, out: memoryview) -> None:
        """Copy the canonical bytes of tokens [start, stop) of a layer into `out`."""
        store, values = self._store, self._store.shape.canonical(out, stop - start)
        store.kernels.read_kv(store.cache, layer, self._slots(start, stop), values)

    def write(self, layer: int, start: int, stop: int, payload: memoryview) -> None:
        """Copy canonical bytes into the sequence's blocks."""
        store = self._store
        k, v = store.shape.canonical(payload, stop - start)
        store.kernels.write_kv(store.cache, layer, self._slots(start, stop), k, v)

    def _slots(self, start: int, stop: int) -> torch.Tensor:
        return self._all_slots[start:stop]
