"""A worker's KV memory for tests of the wire: plain arrays behind the reader and writer protocols."""

from __future__ import annotations

import numpy as np

from pdserve.kv_format import KVFormat


class FakeStore:
    """One sequence's KV: `keys` and `values` are uint8 [layer, token, row byte].

    After `close`, which a test calls where blocks would be given back, any access is a test failure that raises.
    """

    def __init__(self, layout: KVFormat, token_count: int) -> None:
        shape = (layout.layer_count, token_count, layout.row_bytes)
        self.keys = np.zeros(shape, np.uint8)
        self.values = np.zeros(shape, np.uint8)
        self.reads = 0
        self.writes = 0
        self.late_accesses = 0
        self._closed = False

    @classmethod
    def random(cls, layout: KVFormat, token_count: int, seed: int) -> FakeStore:
        store = cls(layout, token_count)
        generator = np.random.default_rng(seed)
        store.keys[:] = generator.integers(0, 256, store.keys.shape, np.uint8)
        store.values[:] = generator.integers(0, 256, store.values.shape, np.uint8)
        return store

    def read_into(self, layer: int, start: int, stop: int, out: memoryview) -> None:
        self._use()
        self.reads += 1
        halves = np.frombuffer(out, np.uint8).reshape(2, stop - start, -1)
        halves[0], halves[1] = self.keys[layer, start:stop], self.values[layer, start:stop]

    def read(self, layer: int, start: int, stop: int) -> memoryview:
        """For tests themselves: in memory of its own."""
        out = memoryview(bytearray(2 * (stop - start) * self.keys.shape[-1]))
        self.read_into(layer, start, stop, out)
        return out

    def write(self, layer: int, start: int, stop: int, payload: memoryview) -> None:
        self._use()
        self.writes += 1
        halves = np.frombuffer(payload, np.uint8).reshape(2, stop - start, -1)
        self.keys[layer, start:stop] = halves[0]
        self.values[layer, start:stop] = halves[1]

    def close(self) -> None:
        self._closed = True

    def equals(self, other: FakeStore, start: int, stop: int) -> bool:
        """Whether tokens [start, stop) of all layers are the same bytes."""
        return np.array_equal(self.keys[:, start:stop], other.keys[:, start:stop]) and np.array_equal(
            self.values[:, start:stop], other.values[:, start:stop]
        )

    def _use(self) -> None:
        if self._closed:
            self.late_accesses += 1
            raise AssertionError("KV touched after its blocks were given back")
