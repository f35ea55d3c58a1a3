"""A payload carrier within one host: memory that the sender writes and the receiver maps read-only.

The outlet owns an arena, a memfd that has no name and lives as long as one of the two processes holds it. The offer
says where to find it (/proc/<pid>/fd/<n>) and a token that its first bytes must hold; so a receiver in another
namespace, or one that may not look into this process, finds nothing and refuses. The file is sealed against a change of
its size, so that reading never faults.

    arena   | token | ring                                           |
                      ^ released        ^ head (both count bytes from 0, never back; modulo the ring's size: the place)

A payload is one piece of the ring. The inlet hands it out without a copy and sends `released`, a cumulative total, once
nobody holds what lies before it: what is lost or doubled frees nothing that is in use. A descriptor from before what
was seen already is stale, as its place may have been written again. When all is released the ring starts at its
beginning, so that a short transfer touches little memory.

Nobody says goodbye: the inlet lets go when the outlet's descriptor is no longer there (closed, or its process killed).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import stat
import struct
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from kvtransfer.transports.base import Part
from kvtransfer.transports.carrier import Wake, lost
from pdserve.errors import TransferError

_TOKEN_BYTES = 16
_RING_OFFSET = 64
_OFFER = struct.Struct("<IIQ16s")  # pid, descriptor, bytes of the ring, token
_PIECE = struct.Struct("<QQ")  # position, bytes
_RELEASED = struct.Struct("<Q")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MAX_RING_BYTES = 1 << 40

_Bytes = NDArray[np.uint8]


class SharedCarrier:
    """A Carrier. `ring_bytes`: of each outlet; memory is used only where it is written to."""

    name = "shared"

    def __init__(self, ring_bytes: int) -> None:
        self._ring_bytes = ring_bytes

    def outlet(self, wake: Wake) -> SharedOutlet:
        return SharedOutlet(self._ring_bytes)

    def inlet(self, offer: bytes, wake: Wake) -> SharedInlet:
        return SharedInlet(offer)


class SharedOutlet:
    """The owner of an arena. Raises TransferError where there is no memory for it."""

    def __init__(self, ring_bytes: int) -> None:
        token = secrets.token_bytes(_TOKEN_BYTES)
        self._size = ring_bytes
        try:
            self._file = os.memfd_create("pdserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise TransferError(f"no shared memory: {error}") from None
        try:
            os.ftruncate(self._file, _RING_OFFSET + ring_bytes)
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _SEALS)
            memory = mmap.mmap(self._file, _RING_OFFSET + ring_bytes)
        except (OSError, ValueError) as error:
            os.close(self._file)
            raise TransferError(f"no shared memory: {error}") from None
        memory[:_TOKEN_BYTES] = token
        self._ring: _Bytes | None = np.frombuffer(memory, np.uint8)[_RING_OFFSET:]
        self._head = 0
        self._released = 0
        self._reserved: tuple[int, _Bytes] | None = None  # position and place of the next payload, perhaps
        self._offer = _OFFER.pack(os.getpid(), self._file, ring_bytes, token)

    def offer(self) -> bytes:
        return self._offer

    def broken(self) -> str | None:
        return "closed" if self._ring is None else None

    def on_note(self, note: bytes) -> None:
        if len(note) != _RELEASED.size:
            raise TransferError(f"a note of {len(note)} bytes")
        (released,) = _RELEASED.unpack(note)
        if released > self._head:
            raise TransferError(f"{released} bytes released, {self._head} were written")
        self._released = max(self._released, released)

    def reserve(self, byte_count: int) -> memoryview | None:
        self._reserved = None
        start = self._place(byte_count)
        if start is None or self._ring is None:
            return None
        offset = start % self._size
        self._reserved = start, self._ring[offset : offset + byte_count]
        return self._reserved[1].data

    def put(self, payload: Part) -> bytes | None:
        if not self._is_reserved(payload):
            room = self.reserve(len(payload))
            if room is None:
                return None
            room[:] = payload
        assert self._reserved is not None
        start, piece = self._reserved
        self._reserved = None
        if self._released == self._head:
            self._released = start
        self._head = start + len(piece)
        return _PIECE.pack(start, len(piece))

    def close(self) -> None:
        if self._ring is not None:
            self._ring = self._reserved = None  # the last references to the mapping
            os.close(self._file)

    def _is_reserved(self, payload: Part) -> bool:
        """Whether it was written to the room reserved last: it is a view of that very array."""
        place: object = None if self._reserved is None else self._reserved[1]
        return place is not None and isinstance(payload, memoryview) and payload.obj is place

    def _place(self, byte_count: int) -> int | None:
        """Where a piece of that size begins, which does not wrap; None: no room now."""
        start, released = self._head, self._released
        if released == start:
            start = released = self._round_up(start)
        if start % self._size + byte_count > self._size:
            start = self._round_up(start)
        return start if start + byte_count - released <= self._size else None

    def _round_up(self, position: int) -> int:
        return -(-position // self._size) * self._size


class SharedInlet:
    """A reader of another's arena. Raises TransferError where it is not to be had or not what was offered."""

    def __init__(self, offer: bytes) -> None:
        if len(offer) != _OFFER.size:
            raise TransferError(f"an offer of {len(offer)} bytes")
        pid, number, self._size, token = _OFFER.unpack(offer)
        self._path = f"/proc/{pid}/fd/{number}"
        self._ring, self._identity = _mapped(self._path, self._size, token)
        self._seen = 0  # end of the last piece handed out
        self._held: dict[int, weakref.ref[_Bytes]] = {}  # by position, which only grows
        self._freed: deque[int] = deque()  # filled by whoever drops a piece, in any thread
        self._noted = 0

    def ready(self) -> bool:
        return True

    def broken(self) -> str | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return "the sender's memory is gone"
        return None if (found.st_dev, found.st_ino) == self._identity else "the sender's memory is another"

    def take(self, descriptor: bytes) -> Future[memoryview]:
        if self._ring is None or len(descriptor) != _PIECE.size:
            return lost("no piece of the sender's memory")
        start, byte_count = _PIECE.unpack(descriptor)
        offset = start % self._size
        if start < self._seen or offset + byte_count > self._size:
            return lost(f"{byte_count} bytes at {start}: stale or not in the sender's memory")
        self._seen = start + byte_count
        piece = self._ring[offset : offset + byte_count]
        self._held[start] = weakref.ref(piece, _appending(self._freed, start))
        there: Future[memoryview] = Future()
        there.set_result(piece.data)
        return there

    def note(self) -> bytes | None:
        while self._freed:
            self._held.pop(self._freed.popleft(), None)
        released = next(iter(self._held), self._seen)
        if released == self._noted:
            return None
        self._noted = released
        return _RELEASED.pack(released)

    def close(self) -> None:
        """What was handed out stays valid."""
        self._ring = None


def _appending(freed: deque[int], position: int) -> Callable[[object], None]:
    """Holds neither the inlet nor the piece."""
    return lambda _: freed.append(position)


def _mapped(path: str, ring_bytes: int, token: bytes) -> tuple[_Bytes | None, tuple[int, int]]:
    """The ring behind an offer, and what tells its file from others."""
    if not 0 < ring_bytes <= _MAX_RING_BYTES:
        raise TransferError(f"a ring of {ring_bytes} bytes")
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise TransferError(f"{path}: cannot be opened: {error}") from None
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size != _RING_OFFSET + ring_bytes:
            raise TransferError(f"{path}: not the memory that was offered")
        if fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise TransferError(f"{path}: its size could change")
        memory = mmap.mmap(file, status.st_size, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise TransferError(f"{path}: cannot be mapped: {error}") from None
    finally:
        os.close(file)
    if not secrets.compare_digest(memory[:_TOKEN_BYTES], token):
        raise TransferError(f"{path}: the token differs")
    return np.frombuffer(memory, np.uint8)[_RING_OFFSET:], (status.st_dev, status.st_ino)
