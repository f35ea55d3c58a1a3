"""Links in processes of their own, over real sockets, driven by lines of JSON: for faults that only processes show.

    in   {"do": "link", "link", "rules", "moment", "host", "key", "ttl_ms"}   a link with a faulty transport, over ipc
                                                                            or tcp
         {"do": "expect", "link", "name", "lease_after_s"}   expect a transfer; its blocks are leased so much later, or
                                                             never
         {"do": "send", "link", "name", "ticket", "commit"}  send one, whose whole prompt is computed already
         {"do": "report"}                                    memory, descriptors, threads; counts of the links
    out  {"event": "linked", "link"} {"event": "ticket", "name", "ticket"} {"event": "report", ...}
         {"event": "end", "name", "side", "error", "digest", "late"}

Payloads of a source's links go by the carrier named when it is made ("inline": by none); the transport below it is the
faulty one.

A process ends when its input does. `Signal` is how it stops or kills itself at an exact moment of the protocol. All are
forked from a source that has done the imports, which is what costs time.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvtransfer import frames
from kvtransfer.frames import type_of
from kvtransfer.link import Link
from kvtransfer.transports.base import Event, Message, Part, Peer, Transport
from kvtransfer.transports.carried import CarriedTransport
from kvtransfer.transports.faulty import Fault, FaultRule, FaultyTransport
from kvtransfer.transports.zmq import CurveKey, ZmqTransport, ipc_endpoint
from pdserve.clock import SystemClock
from pdserve.errors import PdserveError
from pdserve.tracing import Trace
from pdserve.types import Ticket
from support.kv_faults import CHUNK_TOKENS, LEASE_AFTER_S, TOKEN_COUNT
from support.kv_links import CONFIG, LAYOUT, OWNER, TOKENS, carried, gloo_carrier, make_link, send_layers
from support.kv_store import FakeStore

_TESTS = Path(__file__).parent.parent
_START_S = 30.0


@dataclass(frozen=True, slots=True)
class Signal:
    """Send `number` to the own process when the `first` message (from 0) of a type is about to leave, or has come."""

    number: int
    direction: str  # "out" or "in"
    frame_type: str
    first: int


@contextmanager
def kv_source(folder: Path, payload: str = "inline", command_prefix: Sequence[str] = ()) -> Iterator[KvSource]:
    """Where processes come from. They share a folder for their sockets and end with it. `command_prefix`: what the
    source's command line begins with, such as `nsenter` with its options."""
    ours, theirs = socket.socketpair()
    source = subprocess.Popen(
        [*command_prefix, sys.executable, "-m", "support.kv_process", str(folder), payload, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        env=os.environ | {"PYTHONPATH": str(_TESTS)},
    )
    theirs.close()
    made = KvSource(ours)
    try:
        yield made
    finally:
        made.close()
        source.wait(10.0)


class KvSource:
    """The parent's side of a source."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._processes: list[KvProcess] = []

    def fork(self, count: int) -> list[KvProcess]:
        """So many more processes."""
        pairs = [socket.socketpair() for _ in range(count)]
        for _, theirs in pairs:
            socket.send_fds(self._control, [b"fork"], [theirs.fileno()])
            theirs.close()
        made = [KvProcess(ours) for ours, _ in pairs]
        self._processes += made
        return made

    def let_end(self) -> None:
        """No more is asked of the processes there are. Waits for nothing."""
        for process in self._processes:
            process.let_end()

    def close(self) -> None:
        self.let_end()
        for process in self._processes:
            process.close()
        self._control.close()


class KvProcess:
    """The parent's side of one process."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._unread: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.pid: int = self.wait("started", _START_S)["pid"]

    def link(
        self,
        name: str,
        rules: Sequence[FaultRule] = (),
        moment: Signal | None = None,
        host: str = "",
        key: CurveKey | None = None,
        ttl_ms: int = CONFIG.ticket_ttl_ms,
    ) -> None:
        """Over ipc, or over tcp at `host` with `key`."""
        packed = [asdict(rule) | {"frame_type": rule.frame_type and rule.frame_type.__name__} for rule in rules]
        halves = key and {half: value.decode() for half, value in asdict(key).items()}
        where = {"host": host, "key": halves, "ttl_ms": ttl_ms}
        self.command(do="link", link=name, rules=packed, moment=moment and asdict(moment), **where)
        self.wait("linked", link=name, timeout_s=_START_S)

    def expect(self, link: str, name: str, lease_after_s: float | None = LEASE_AFTER_S) -> dict[str, Any]:
        """The ticket, for another process's `send`. None: its blocks are never leased."""
        self.command(do="expect", link=link, name=name, lease_after_s=lease_after_s)
        ticket: dict[str, Any] = self.wait("ticket", name=name)["ticket"]
        return ticket

    def send(self, link: str, name: str, ticket: dict[str, Any], *, commit: bool = True) -> None:
        """`commit=False`: all layers, but no COMMIT."""
        self.command(do="send", link=link, name=name, ticket=ticket, commit=commit)

    def command(self, **what: Any) -> None:
        self._connection.sendall(json.dumps(what).encode() + b"\n")

    def wait(self, event: str, timeout_s: float = 10.0, **fields: Any) -> dict[str, Any]:
        """The first event of that name and these fields."""
        wanted = {"event": event, **fields}
        deadline = time.monotonic() + timeout_s
        while True:
            for found in self._unread:
                if wanted.items() <= found.items():
                    self._unread.remove(found)
                    return found
            try:
                self._unread.append(self._events.get(timeout=max(deadline - time.monotonic(), 0.001)))
            except queue.Empty:
                raise AssertionError(f"not within {timeout_s:g} s: {wanted}; came: {self._unread}") from None

    def wait_dead(self, what: str, timeout_s: float = 10.0) -> None:
        """Until the process has ended, which closes its side of the connection."""
        self._reader.join(timeout_s)
        assert not self._reader.is_alive(), f"{what}: process {self.pid} is alive after {timeout_s:g} s"

    def let_end(self) -> None:
        if self._reader.is_alive():
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Wait for the process's end; kill it, by its id, where it does not come."""
        self._reader.join(10.0)
        if self._reader.is_alive():
            os.kill(self.pid, signal.SIGKILL)
            self._reader.join(10.0)
        self._connection.close()

    def _read(self) -> None:
        with self._connection.makefile("r") as lines:
            for line in lines:
                self._events.put(json.loads(line))


class _SignallingTransport:
    """Signals the own process at one moment."""

    def __init__(self, inner: Transport, moment: Signal) -> None:
        self._inner = inner
        self._moment = moment
        self._frame_type = getattr(frames, moment.frame_type)
        self._counted = 0
        self.endpoint = inner.endpoint
        self.connect, self.disconnect = inner.connect, inner.disconnect
        self.buffer, self.wake, self.close = inner.buffer, inner.wake, inner.close

    def send(self, peer: Peer, parts: Sequence[Part]) -> None:
        self._count("out", parts)
        self._inner.send(peer, parts)

    def receive(self, timeout_s: float) -> list[Event]:
        events = self._inner.receive(timeout_s)
        for event in events:
            if isinstance(event, Message):
                self._count("in", event.parts)
        return events

    def _count(self, direction: str, parts: Sequence[Part]) -> None:
        if direction == self._moment.direction and type_of(parts) is self._frame_type:
            self._counted += 1
            if self._counted == self._moment.first + 1:
                os.kill(os.getpid(), self._moment.number)


class _Child:
    """What runs in the process."""

    def __init__(self, folder: Path, payload: str, connection: socket.socket) -> None:
        self._folder = folder
        self._carriers = [] if payload == "inline" else [payload]
        self._carried: dict[str, CarriedTransport] = {}
        self._connection = connection
        self._links: dict[str, Link] = {}
        self._lock = threading.Lock()

    def run(self) -> None:
        self._say("started", pid=os.getpid())
        with self._connection.makefile("r") as lines:
            for line in lines:
                what = json.loads(line)
                getattr(self, f"_{what.pop('do')}")(**what)
        for link in self._links.values():
            link.close()

    def _link(
        self,
        link: str,
        rules: list[dict[str, Any]],
        moment: dict[str, Any] | None,
        host: str,
        key: dict[str, str] | None,
        ttl_ms: int,
    ) -> None:
        unpacked = [
            FaultRule(**rule | {"fault": Fault(rule["fault"]), "frame_type": getattr(frames, rule["frame_type"])})
            for rule in rules
        ]
        endpoint = f"tcp://{host}:*" if host else ipc_endpoint(self._folder, link)
        curve = key and CurveKey(**{half: value.encode() for half, value in key.items()})
        transport: Transport = ZmqTransport(endpoint, link.encode(), key=curve or None)
        transport = FaultyTransport(transport, unpacked, 1, SystemClock())
        transport = self._carried[link] = carried(transport, *self._carriers)
        transport = _SignallingTransport(transport, Signal(**moment)) if moment else transport
        config = replace(CONFIG, ticket_ttl_ms=ttl_ms)
        self._links[link] = make_link(transport, config, trace=Trace(capacity=256))  # a full one does not grow
        self._links[link].start()
        self._say("linked", link=link)

    def _expect(self, link: str, name: str, lease_after_s: float | None) -> None:
        store, issued = FakeStore(LAYOUT, TOKEN_COUNT), threading.Event()

        def lease() -> None:
            assert issued.wait(_START_S)
            self._links[link].blocks_leased(ticket.transfer_id, store)

        def need_blocks() -> None:
            if lease_after_s:
                threading.Timer(lease_after_s, lease).start()
            elif lease_after_s is not None:
                lease()

        ticket = self._links[link].expect(
            OWNER,
            range(TOKEN_COUNT),
            need_blocks,
            self._on_end(name, "decode", store),
        )
        issued.set()
        self._say("ticket", name=name, ticket=asdict(ticket) | {"transfer_id": ticket.transfer_id.hex()})

    def _send(self, link: str, name: str, ticket: dict[str, Any], commit: bool) -> None:
        given = Ticket(**ticket | {"transfer_id": bytes.fromhex(ticket["transfer_id"])})
        store = FakeStore.random(LAYOUT, TOKEN_COUNT, seed=1)
        on_end = self._on_end(name, "prefill", store)
        self._links[link].open_sender(given, OWNER, range(TOKEN_COUNT), TOKEN_COUNT, on_end)
        self._links[link].start_sender(given.transfer_id, store)
        send_layers(self._links[link], given, LAYOUT.layer_count, TOKEN_COUNT, CHUNK_TOKENS)
        if commit:
            self._links[link].commit(given.transfer_id, TOKENS)

    def _report(self) -> None:
        status = Path("/proc/self/status").read_text()
        resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        self._say(
            "report",
            rss_kb=int(resident.split()[1]),
            descriptors=len(os.listdir("/proc/self/fd")),
            threads=threading.active_count(),
            arenas=Path("/proc/self/maps").read_text().count("memfd:pdserve-kv"),
            counts={link: dict(transport.counts) for link, transport in self._carried.items()},
            stats={name: asdict(link.stats()) for name, link in self._links.items()},
        )

    def _on_end(self, name: str, side: str, store: FakeStore) -> Callable[[object], None]:
        def ended(outcome: object) -> None:
            store.close()
            error = f"{type(outcome).__name__}: {outcome}" if isinstance(outcome, PdserveError) else None
            self._say("end", name=name, side=side, error=error, digest=digest_of(store), late=store.late_accesses)

        return ended

    def _say(self, event: str, **fields: Any) -> None:
        with self._lock:
            self._connection.sendall(json.dumps({"event": event, **fields}).encode() + b"\n")


def digest_of(store: FakeStore) -> str:
    """Stands for all bytes of a store."""
    return hashlib.blake2b(store.keys.tobytes() + store.values.tobytes(), digest_size=16).hexdigest()


def _serve(folder: Path, payload: str, control: socket.socket) -> None:
    """Fork a child for each connection that comes; after the last one, wait for them all."""
    if payload == "gloo":
        gloo_carrier(1.0)  # imports torch, once for all
    children = 0
    while descriptors := socket.recv_fds(control, len(b"fork"), 1)[1]:
        if os.fork() == 0:
            control.close()
            _Child(folder, payload, socket.socket(fileno=descriptors[0])).run()
            os._exit(0)  # at once: a group's thread may wait for a peer that the test has killed
        os.close(descriptors[0])
        children += 1
    for _ in range(children):
        os.wait()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), sys.argv[2], socket.socket(fileno=int(sys.argv[3])))
