"""How the wire reads and writes KV: two protocols, and a buffer for who only looks.

What crosses is the canonical form of `pdserve.kv_format`. Whose KV it is, and where it lies, is not known here.
"""

from __future__ import annotations

from typing import Protocol

from pdserve.kv_format import KVFormat


class KVReader(Protocol):
    """Reads one sequence's KV. Called from the link's thread, only for tokens already computed."""

    def read_into(self, layer: int, start: int, stop: int, out: memoryview) -> None:
        """Copy the canonical bytes of tokens [start, stop) of a layer into `out`, which has room for just these. Keeps
        no reference."""
        ...


class KVWriter(Protocol):
    """Writes one sequence's KV. Called from the link's thread, only for blocks leased to that sequence."""

    def write(self, layer: int, start: int, stop: int, payload: memoryview) -> None:
        """Store the canonical bytes of tokens [start, stop) of a layer. Copies; keeps no reference."""
        ...

    def read_into(self, layer: int, start: int, stop: int, out: memoryview) -> None:
        """As a reader's, of what is stored: for the end-to-end check."""
        ...


class ScratchReader:
    """Reads KV of a format into one buffer of its own, for who only looks at it: the next read overwrites the last."""

    def __init__(self, source: KVReader | KVWriter, kv_format: KVFormat) -> None:
        self._source = source
        self._format = kv_format
        self._buffer = memoryview(b"")

    def __call__(self, layer: int, start: int, stop: int) -> memoryview:
        byte_count = self._format.payload_bytes(stop - start)
        if byte_count > len(self._buffer):
            self._buffer = memoryview(bytearray(byte_count))
        out = self._buffer[:byte_count]
        self._source.read_into(layer, start, stop, out)
        return out
