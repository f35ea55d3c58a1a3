"""The paged KV store: the cache's memory, and one sequence's view of it as canonical bytes.

`StoredKV` has the shape of kvtransfer's reader and writer without knowing that package: the store and the wire meet in
the workers.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence as ListLike

import torch

from kernels.ops import CacheShape, Kernels, slots_of

# A received frame's memory is read-only. It is only read from, which torch cannot know.
warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)


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
        """Copy tokens [start, stop) of a layer: K [T, Hkv, D] then V [T, Hkv, D], row-major."""
        store, shape = self._store, self._store.shape
        values = torch.frombuffer(out, dtype=shape.dtype).view(2, stop - start, shape.kv_heads, shape.head_dim)
        store.kernels.read_kv(store.cache, layer, self._slots(start, stop), values)

    def write(self, layer: int, start: int, stop: int, payload: memoryview) -> None:
        """Copy canonical bytes into the sequence's blocks."""
        store, shape = self._store, self._store.shape
        values = torch.frombuffer(payload, dtype=shape.dtype)
        k, v = values.view(2, stop - start, shape.kv_heads, shape.head_dim)
        store.kernels.write_kv(store.cache, layer, self._slots(start, stop), k, v)

    def _slots(self, start: int, stop: int) -> torch.Tensor:
        return self._all_slots[start:stop]
