"""What the KV wire carries: bytes a second by transport and frame size, beside memcpy and bare ZMQ, and what
integrity costs.

Two processes (one for the memory transport), real links, 64 MiB a transfer whose KV is computed already. Everything is
measured in turns, round after round, so that what else the machine does strikes all alike; medians over the rounds.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TypeVar

import numpy as np
import zmq

from bench.transfer_peer import (
    OWNER,
    TOKEN_IDS,
    TRANSFER_BYTES,
    WAIT_S,
    PlainStore,
    make_link,
    make_transport,
    send,
)
from kvtransfer.link import Link
from kvtransfer.transports.memory import MemoryNetwork
from pdserve.errors import TransferError
from pdserve.types import Ticket

MIN_INTEGRITY_PAIRS = 10  # fewer medians of pairs tell little
FRAME_SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 8 << 20)
_ECHOES_IN_FLIGHT = 4

_Key = TypeVar("_Key")


@dataclass(frozen=True, slots=True)
class TransportRow:
    """`transport`: "memcpy", "zmq echo" (each byte goes there and back and counts once), "zmq one way", or one of the
    wire's. CPU seconds a GB (1e9 bytes) of the two processes; of "memory" both sides' are the receiver's."""

    transport: str
    frame_bytes: int
    bytes_per_s: float
    of_memcpy: float
    of_echo: float
    sender_cpu_s_per_gb: float | None
    receiver_cpu_s_per_gb: float | None


@dataclass(frozen=True, slots=True)
class IntegrityRow:
    """What integrity adds: medians over pairs of transfers with and without it, of time and of CPU seconds a GB.
    `added_quartiles`: half of the pairs' `added_share` lie between these two."""

    transport: str
    frame_bytes: int
    pairs: int
    added_share: float
    added_quartiles: tuple[float, float]
    bytes_per_s: float  # with it
    added_sender_cpu_s_per_gb: float
    added_receiver_cpu_s_per_gb: float


@dataclass(frozen=True, slots=True)
class Sample:
    seconds: float
    sender_cpu_s: float | None
    receiver_cpu_s: float | None


def bench_transports(transports: Sequence[str], frame_sizes: Sequence[int], rounds: int) -> list[TransportRow]:
    """A row for each transport and size. One more round goes before, unmeasured."""
    with _peer() as peer:
        subjects: dict[tuple[str, int], Callable[[], Sample]] = {}
        for size in frame_sizes:
            subjects["memcpy", size] = _memcpy(size)
            subjects["zmq echo", size] = _bare_zmq(peer, size, echo=True)
            subjects["zmq one way", size] = _bare_zmq(peer, size, echo=False)
            for transport in transports:
                subjects[transport, size] = peer.transfers(transport, size, integrity=True)
        samples = _in_turns(subjects, rounds)
    rates = {key: TRANSFER_BYTES / median(s.seconds for s in found) for key, found in samples.items()}
    return [
        TransportRow(
            transport,
            size,
            rate,
            rate / rates["memcpy", size],
            rate / rates["zmq echo", size],
            _per_gb([sample.sender_cpu_s for sample in samples[transport, size]]),
            _per_gb([sample.receiver_cpu_s for sample in samples[transport, size]]),
        )
        for (transport, size), rate in rates.items()
    ]


def bench_integrity(transports: Sequence[str], frame_bytes: int, pairs: int) -> list[IntegrityRow]:
    """A row for each transport between two processes. All are measured in turns, a pair one after the other."""
    with _peer() as peer:
        subjects = {
            (transport, on): peer.transfers(transport, frame_bytes, integrity=on)
            for transport in transports
            for on in (True, False)
        }
        samples = _in_turns(subjects, pairs)
    return [_added(name, frame_bytes, samples[name, True], samples[name, False]) for name in transports]


def _added(transport: str, frame_bytes: int, with_it: Sequence[Sample], without: Sequence[Sample]) -> IntegrityRow:
    both = list(zip(with_it, without, strict=True))
    added = [on.seconds / off.seconds - 1 for on, off in both]
    return IntegrityRow(
        transport,
        frame_bytes,
        len(both),
        median(added),
        middle_half(added),
        TRANSFER_BYTES / median(on.seconds for on in with_it),
        median(on.sender_cpu_s - off.sender_cpu_s for on, off in both) / TRANSFER_BYTES * 1e9,
        median(on.receiver_cpu_s - off.receiver_cpu_s for on, off in both) / TRANSFER_BYTES * 1e9,
    )


def middle_half(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third quartile."""
    if len(values) < 2:
        return values[0], values[0]
    first, _, third = quantiles(values, n=4, method="inclusive")
    return first, third


def _in_turns(subjects: dict[_Key, Callable[[], Sample]], rounds: int) -> dict[_Key, list[Sample]]:
    """Each subject once a round, every other round backwards; the first round only warms up."""
    samples: dict[_Key, list[Sample]] = {key: [] for key in subjects}
    for number in range(rounds + 1):
        order = list(subjects) if number % 2 else list(reversed(subjects))
        for key in order:
            sample = subjects[key]()
            if number:
                samples[key].append(sample)
    return samples


def _per_gb(cpu_s: Sequence[float | None]) -> float | None:
    known = [seconds for seconds in cpu_s if seconds is not None]
    return median(known) / TRANSFER_BYTES * 1e9 if known else None


class Peer:
    """The other process, and our ends of what leads to it."""

    def __init__(self, process: subprocess.Popen[str], folder: Path, stack: ExitStack) -> None:
        self._process = process
        self._folder = folder
        self._stack = stack
        self._network = MemoryNetwork()
        self._names = (f"link{number}" for number in itertools.count())
        self._target = PlainStore(fill=0)
        self._source = PlainStore(fill=7)  # of the memory transport

    def ask(self, **what: Any) -> dict[str, Any]:
        self.tell(**what)
        return self.answer()

    def tell(self, **what: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise TransferError("the other process of the measurement has died")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def endpoint(self) -> str:
        """A fresh one for bare sockets."""
        return f"ipc://{self._folder}/{next(self._names)}"

    def transfers(self, transport: str, frame_bytes: int, *, integrity: bool) -> Callable[[], Sample]:
        """Two links; each call of what is returned is one transfer from the other process to this one."""
        name = next(self._names)
        mine = self._link(transport, frame_bytes, integrity, f"receiver-{name}")
        if transport == "memory":
            sender = self._link(transport, frame_bytes, integrity, f"sender-{name}")
            return lambda: self._transfer(mine, lambda ticket: send(sender, ticket, self._source), shared=True)
        self.ask(do="link", name=name, transport=transport, frame_bytes=frame_bytes, integrity=integrity)

        def send_there(ticket: Ticket) -> dict[str, Any]:
            return self.ask(do="send", name=name, ticket=asdict(ticket) | {"transfer_id": ticket.transfer_id.hex()})

        return lambda: self._transfer(mine, send_there, shared=False)

    def _link(self, transport: str, frame_bytes: int, integrity: bool, name: str) -> Link:
        link = make_link(make_transport(transport, self._folder, name, self._network), frame_bytes, integrity)
        self._stack.callback(link.close)
        return link

    def _transfer(self, mine: Link, send_with: Callable[[Ticket], dict[str, Any]], *, shared: bool) -> Sample:
        """From the arrival of OPEN to the last block verified."""
        times: list[float] = []
        ended = threading.Event()
        outcomes: list[object] = []
        known = threading.Event()

        def lease() -> None:
            known.wait(WAIT_S)
            times.append(time.perf_counter())
            mine.blocks_leased(ticket.transfer_id, self._target)

        def on_end(outcome: object) -> None:
            times.append(time.perf_counter())
            outcomes.append(outcome)
            ended.set()

        cpu_s = time.process_time()
        ticket = mine.expect(OWNER, TOKEN_IDS, lease, on_end)
        known.set()
        sent = send_with(ticket)
        if sent["error"] or not ended.wait(WAIT_S) or isinstance(outcomes[0], Exception):
            raise TransferError(f"a measured transfer failed: {sent['error']}, {outcomes}")
        receiver_cpu_s = time.process_time() - cpu_s
        return Sample(times[1] - times[0], None if shared else sent["cpu_s"], receiver_cpu_s)


@contextmanager
def _peer() -> Iterator[Peer]:
    with tempfile.TemporaryDirectory(prefix="kvb", dir="/tmp") as made, ExitStack() as stack:  # short: socket paths
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.transfer_peer", made],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            yield Peer(process, Path(made), stack)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(WAIT_S)


def _memcpy(size: int) -> Callable[[], Sample]:
    source, target = (np.full(TRANSFER_BYTES, fill, np.uint8) for fill in (7, 0))

    def copy() -> Sample:
        begin = time.perf_counter()
        for start in range(0, TRANSFER_BYTES, size):
            np.copyto(target[start : start + size], source[start : start + size])
        return Sample(time.perf_counter() - begin, None, None)

    return copy


def _bare_zmq(peer: Peer, size: int, *, echo: bool) -> Callable[[], Sample]:
    """DEALER to DEALER over ipc, without a copy on our side of the socket."""
    count, payload = TRANSFER_BYTES // size, bytes(size)

    def run() -> Sample:
        endpoint = peer.endpoint()
        peer.ask(do="zmq", endpoint=endpoint, count=count, echo=echo)
        with zmq.Context() as context, context.socket(zmq.DEALER) as mine:
            mine.connect(endpoint)
            begin = time.perf_counter()
            for number in range(count):
                mine.send(payload, copy=False)
                if echo and number >= _ECHOES_IN_FLIGHT:
                    mine.recv(copy=False)
            for _ in range(min(count, _ECHOES_IN_FLIGHT) if echo else 1):
                mine.recv(copy=False)
            seconds = time.perf_counter() - begin
            mine.send(b"")
        return Sample(seconds, None, None)

    return run
