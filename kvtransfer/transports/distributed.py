"""A payload carrier over torch.distributed: one group of two ranks for each sender and receiver.

The outlet is rank 0 and owns the group's store, on a port of its own, which the offer names; the inlet is rank 1. So a
group belongs to one pair of processes in one of their lives, and nobody else's death can touch it. On the CPU the
backend is gloo; for CUDA devices it is NCCL, with host buffers staged on a stream of the group's own, so that the
compute stream waits for nothing. RDMA is reached through NCCL only. gloo is tested; NCCL has not run yet.

    outlet   put -> queue -> thread: send         inlet   take -> queue -> thread: receive -> the future, wake

In the group a payload comes after its number and size. The descriptor is the number alone: descriptors may be lost or
reordered, and gloo ends the process where a receive is not of the size that was sent.

Each end has one thread, which makes the group and then moves payloads in order. Every wait of it is bounded by
`timeout_s`. Those in which torch waits for another process's store without a limit, for ever where that is frozen, end
because the connection is shut from outside (cutting.py). When a wait fails the end is broken for good and the thread
ends. `close` waits for nothing: a thread that is stuck ends by its timeout. So a peer that stands still costs one
thread for some seconds, and nobody else's way. Payloads are not encrypted: for networks that are trusted.
"""

from __future__ import annotations

import atexit
import queue
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar

import msgpack
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch._C._distributed_c10d import Store, TCPStore

from kvtransfer.frames import MAX_PAYLOAD_BYTES
from kvtransfer.transports.base import Part
from kvtransfer.transports.carrier import PayloadLost, Wake, lost
from kvtransfer.transports.cutting import cut_when_late
from pdserve.errors import ConfigError, TransferError

_NUMBER = struct.Struct("<Q")
_MAX_QUEUED = 256
_STEPS_OF_SETUP = 3  # with a wait of `timeout_s` each
_SENDER, _RECEIVER = 0, 1

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """`host`: the address of this host that peers reach. `backend`: "gloo", or "nccl", which uses the current CUDA
    device. `timeout_s`: of each step of the set-up and of each payload."""

    host: str
    backend: str = "gloo"
    timeout_s: float = 2.0


class DistributedCarrier:
    """A Carrier, by its backend's name. Raises ConfigError where the backend is not to be had."""

    def __init__(self, settings: GroupSettings) -> None:
        if settings.backend == "nccl" and not (torch.cuda.is_available() and dist.is_nccl_available()):
            raise ConfigError("NCCL is not to be had: it needs a CUDA device and a build of torch with it")
        self._settings = settings
        self.name = settings.backend

    def outlet(self, wake: Wake) -> DistributedOutlet:
        return DistributedOutlet(self._settings, wake)

    def inlet(self, offer: bytes, wake: Wake) -> DistributedInlet:
        return DistributedInlet(offer, self._settings, wake)


class DistributedOutlet:
    """Rank 0."""

    def __init__(self, settings: GroupSettings, wake: Wake) -> None:
        self._settings = settings
        self._wake = wake
        self._offer: bytes | None = None
        self._count = 0
        self._end: _End[Part] = _End("kv-group-send", self._run, wake, settings.timeout_s)
        self._end.start()

    def offer(self) -> bytes | None:
        return self._offer

    def broken(self) -> str | None:
        return self._end.broken

    def on_note(self, note: bytes) -> None:
        raise TransferError("a receiver of a group has no news")

    def reserve(self, byte_count: int) -> memoryview | None:
        return None

    def put(self, payload: Part) -> bytes | None:
        if not self._end.give(payload):
            return None
        self._count += 1
        return _NUMBER.pack(self._count - 1)

    def close(self) -> None:
        self._end.stop()

    def _run(self) -> None:
        store = _store(self._settings.host, 0, self._settings)
        self._offer = bytes(msgpack.packb([self._settings.host, store.port]))
        self._wake()
        group, count = _Group(store, _SENDER, self._settings), 0
        while (payload := self._end.next()) is not None:
            group.send(np.array([count, len(payload)], np.int64))
            group.send(_writable(payload))
            count += 1


class DistributedInlet:
    """Rank 1. Raises TransferError for an offer that is none."""

    def __init__(self, offer: bytes, settings: GroupSettings, wake: Wake) -> None:
        try:
            host, port = msgpack.unpackb(offer)
            if type(host) is not str or type(port) is not int:
                raise ValueError("wrong types")
        except (ValueError, TypeError) as error:
            raise TransferError(f"not a group's offer: {error}") from None
        self._wake = wake
        self._next = 0  # the lowest number that may still be taken
        self._group_made = threading.Event()
        self._end: _End[tuple[int, Future[memoryview]]] = _End(
            "kv-group-receive", lambda: self._run(host, port, settings), self._on_end, settings.timeout_s
        )
        self._end.start()

    def ready(self) -> bool:
        return self._group_made.is_set()

    def broken(self) -> str | None:
        return self._end.broken

    def take(self, descriptor: bytes) -> Future[memoryview]:
        if len(descriptor) != _NUMBER.size:
            return lost("not a payload's number")
        (number,) = _NUMBER.unpack(descriptor)
        if number < self._next:
            return lost(f"payload {number} was taken or left out already")
        payload: Future[memoryview] = Future()
        if not self._end.give((number, payload)):
            return lost(self._end.broken or f"{_MAX_QUEUED} payloads are on their way")
        self._next = number + 1
        return payload

    def note(self) -> bytes | None:
        return None

    def close(self) -> None:
        self._end.stop()

    def _run(self, host: str, port: int, settings: GroupSettings) -> None:
        with cut_when_late(host, port, _STEPS_OF_SETUP * settings.timeout_s):
            group = _Group(_store(host, port, settings), _RECEIVER, settings)
        self._group_made.set()
        self._wake()
        while (item := self._end.next()) is not None:
            number, payload = item
            try:
                payload.set_result(_receive(group, number))
            except (RuntimeError, TransferError) as error:
                payload.set_exception(PayloadLost(str(error)))
                raise
            finally:
                self._wake()

    def _on_end(self) -> None:
        for _, payload in self._end.undone():
            payload.set_exception(PayloadLost(f"the group ended: {self._end.broken}"))
        self._wake()


def _receive(group: _Group, wanted: int) -> memoryview:
    """The payload of that number; those before it that nobody wants are left out."""
    while True:
        number, byte_count = (int(value) for value in group.receive(2, np.int64))
        if number > wanted or not 0 <= byte_count <= MAX_PAYLOAD_BYTES:
            raise TransferError(f"payload {number} of {byte_count} bytes instead of number {wanted}")
        payload = group.receive(byte_count, np.uint8)
        if number == wanted:
            return payload.data


def _writable(payload: Part) -> NDArray[Any]:
    """torch takes no other memory, though it only reads it here. Only small payloads (of COMMIT) have to be copied."""
    values = np.frombuffer(payload, np.uint8)
    return values if values.flags.writeable else values.copy()


class _End(Generic[_Item]):
    """The thread of one end, what it has to do, and why it is broken, if it is."""

    def __init__(self, name: str, run: Callable[[], None], on_end: Callable[[], None], timeout_s: float) -> None:
        self.broken: str | None = None
        self._items: queue.Queue[_Item | None] = queue.Queue(_MAX_QUEUED)
        self._run = run
        self._on_end = on_end
        self._timeout_s = timeout_s
        self._thread = threading.Thread(target=self._supervise, name=name, daemon=True)

    def start(self) -> None:
        atexit.register(self._leave)  # a thread that the interpreter's end meets inside torch would abort the process
        self._thread.start()

    def give(self, item: _Item) -> bool:
        """Something to do. False: too much is waiting already, or the end is broken."""
        try:
            self._items.put_nowait(item)
        except queue.Full:
            return False
        return self.broken is None

    def next(self) -> _Item | None:
        """For the thread: wait for something to do. None at the end."""
        return None if self.broken is not None else self._items.get()

    def undone(self) -> Iterator[_Item]:
        while not self._items.empty():
            if (item := self._items.get_nowait()) is not None:
                yield item

    def stop(self) -> None:
        if self.broken is None:
            self.broken = "closed"
        with suppress(queue.Full):  # full: the thread is not waiting for it, and looks at `broken` next
            self._items.put_nowait(None)

    def _supervise(self) -> None:
        reason = "ended"
        try:
            self._run()
        except (RuntimeError, TransferError) as error:  # torch's own errors are RuntimeErrors
            reason = str(error).splitlines()[0]
        self.broken = self.broken or reason
        self._on_end()
        atexit.unregister(self._leave)

    def _leave(self) -> None:
        self.stop()
        self._thread.join(_STEPS_OF_SETUP * self._timeout_s)


class _Group:
    """Two ranks, of which this is one. Raises RuntimeError where the other is not there or gone."""

    def __init__(self, store: Store, rank: int, settings: GroupSettings) -> None:
        timeout = timedelta(seconds=settings.timeout_s)
        self._other = 1 - rank
        self._device = torch.device("cuda" if settings.backend == "nccl" else "cpu")
        self._stream = _side_stream(self._device)
        self._group: Any
        if self._stream is not None:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, rank, 2, options)
        else:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = timeout
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=settings.host, lazy_init=False)]
            self._group = dist.ProcessGroupGloo(store, rank, 2, options)

    def send(self, values: NDArray[Any]) -> None:
        with self._on_stream():
            staged = torch.from_numpy(values).to(self._device)
            self._group.send([staged], self._other, 0).wait()
            self._finish()

    def receive(self, count: int, dtype: type[Any]) -> NDArray[Any]:
        host = np.empty(count, dtype)
        with self._on_stream():
            target = torch.from_numpy(host)
            staged = target if self._stream is None else torch.empty_like(target, device=self._device)
            self._group.recv([staged], self._other, 0).wait()
            if self._stream is not None:
                target.copy_(staged)
            self._finish()
        return host

    def _on_stream(self) -> Any:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _finish(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def _side_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def _store(host: str, port: int, settings: GroupSettings) -> TCPStore:
    """Port 0: our own, on a free port. Raises TransferError."""
    timeout = timedelta(seconds=settings.timeout_s)
    try:
        return TCPStore(host, port, None, port == 0, timeout, wait_for_workers=False)
    except RuntimeError as error:
        raise TransferError(f"{host}:{port}: no store: {error}") from None
