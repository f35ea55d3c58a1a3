"""Links in pairs, and one transfer driven between them as the two engines would."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from kvtransfer.kv_access import KVReader, KVWriter
from kvtransfer.link import Link
from kvtransfer.transports.base import Transport
from kvtransfer.transports.carried import CarriedLimits, CarriedTransport
from kvtransfer.transports.carrier import Carrier
from kvtransfer.transports.memory import MemoryNetwork
from kvtransfer.transports.shared import SharedCarrier
from kvtransfer.transports.zmq import CurveKey, ZmqTransport, ipc_endpoint
from pdserve.clock import SystemClock
from pdserve.config import TransferConfig
from pdserve.errors import PdserveError
from pdserve.kv_format import KVFormat
from pdserve.logs import logger
from pdserve.tracing import Trace
from pdserve.types import Owner, SampledToken, Ticket
from support.kv_store import FakeStore

LAYOUT = KVFormat(layer_count=2, kv_heads=1, head_dim=32, item="float32")  # 256 bytes a token and layer
# Patient: a side that is away for some seconds, as happens on a busy machine, is not taken for lost. Lost frames are
# asked for soon.
CONFIG = TransferConfig(
    window_bytes=8192, max_frame_bytes=4096, ticket_ttl_ms=10_000, ping_interval_ms=50, deadline_ms=30_000
)
IMPATIENT = replace(CONFIG, ticket_ttl_ms=1_000)  # for what happens when a side is silent for too long
CALM = replace(CONFIG, ping_interval_ms=5_000)  # nothing is asked for twice, however late its answer
OWNER = Owner("tenant", "request", "router", 1)
TOKENS = (SampledToken(42, -0.125, ((42, -0.125),)),)
CARRIED_LIMITS = CarriedLimits(min_bytes=1, answer_timeout_s=1.0, arrival_timeout_s=0.4, cooldown_s=0.5)
WAIT_S = 20.0

Received = Sequence[SampledToken] | PdserveError
TransportFactory = Callable[[], Transport]


def transport_factory(kind: str, folder: Path) -> TransportFactory:
    """Makes transports that can reach each other: "memory", "ipc", "tcp", "curve" (tcp with one key), or "shared" or
    "gloo" (ipc, with every payload on that carrier once it is open)."""
    network, numbers, key = MemoryNetwork(), itertools.count(), CurveKey.generate()

    def make() -> Transport:
        name = f"worker{next(numbers)}"
        if kind == "memory":
            return network.transport()
        if kind in ("tcp", "curve"):
            return ZmqTransport("tcp://127.0.0.1:*", name.encode(), key=key if kind == "curve" else None)
        zmq = ZmqTransport(ipc_endpoint(folder / "kv", name), name.encode())
        return zmq if kind == "ipc" else carried(zmq, kind)

    return make


def carried(inner: Transport, *kinds: str, limits: CarriedLimits = CARRIED_LIMITS) -> CarriedTransport:
    """`inner` with the carriers named, best first."""
    carriers: dict[str, Callable[[], Carrier]] = {
        "shared": lambda: SharedCarrier(2 * CONFIG.window_bytes),
        "gloo": lambda: gloo_carrier(timeout_s=1.0),
    }
    return CarriedTransport(inner, [carriers[kind]() for kind in kinds], SystemClock(), logger("test-carried"), limits)


def gloo_carrier(timeout_s: float) -> Carrier:
    from kvtransfer.transports.distributed import DistributedCarrier, GroupSettings  # torch: seconds to import

    return DistributedCarrier(GroupSettings("127.0.0.1", timeout_s=timeout_s))


def make_link(
    transport: Transport,
    config: TransferConfig = CONFIG,
    layout: KVFormat = LAYOUT,
    model: bytes = b"model",
    trace: Trace | None = None,
    max_transfers: int = 64,
) -> Link:
    log = logger("test-link")
    return Link(transport, layout, model, config, SystemClock(), trace or Trace(), log, max_transfers=max_transfers)


@contextmanager
def running(*links: Link) -> Iterator[None]:
    for link in links:
        link.start()
    try:
        yield
    finally:
        for link in links:
            link.close()


class Outcome:
    """What an `on_end` was called with. More than one call shows in `calls`."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self.calls: list[object] = []
        self._then = then
        self._came = threading.Event()

    def __call__(self, result: object) -> None:
        self.calls.append(result)
        self._then()
        self._came.set()

    def comes_within(self, timeout_s: float) -> bool:
        return self._came.wait(timeout_s)

    def wait(self, timeout_s: float = WAIT_S) -> object:
        assert self.comes_within(timeout_s), "on_end was not called"
        assert len(self.calls) == 1
        return self.calls[0]


class Expecting:
    """The receiving engine of one transfer. Leases blocks when they are needed, or `lease_after_s` later; not at all
    where `lease` is False: then call `lease_now`."""

    def __init__(
        self,
        link: Link,
        token_ids: Sequence[int],
        *,
        writer: KVWriter | None = None,
        cached_tokens: int = 0,
        token_stop: int | None = None,
        lease: bool = True,
        lease_after_s: float = 0.0,
    ) -> None:
        self.store = FakeStore(LAYOUT, max(len(token_ids), 1))
        self.writer: KVWriter = writer or self.store
        self.needed = threading.Event()
        self.ended = Outcome()
        self._link = link
        self._lease = lease
        self._lease_after_s = lease_after_s
        self._issued = threading.Event()
        self.ticket: Ticket = link.expect(
            OWNER, token_ids, self._on_need_blocks, self.ended, cached_tokens=cached_tokens, token_stop=token_stop
        )
        self._issued.set()

    def lease_now(self) -> None:
        self._link.blocks_leased(self.ticket.transfer_id, self.writer)

    def _on_need_blocks(self) -> None:
        assert self._issued.wait(WAIT_S)
        if self._lease and self._lease_after_s:
            threading.Timer(self._lease_after_s, self.lease_now).start()
        elif self._lease:
            self.lease_now()
        self.needed.set()


def send_all(link: Link, ticket: Ticket, layers: int, token_stop: int, chunk_tokens: int) -> None:
    """What a chunked prefill reports, then the sampled token."""
    send_layers(link, ticket, layers, token_stop, chunk_tokens)
    link.commit(ticket.transfer_id, TOKENS)


def send_layers(link: Link, ticket: Ticket, layers: int, token_stop: int, chunk_tokens: int) -> None:
    """What a chunked prefill reports."""
    for start in range(0, token_stop, chunk_tokens):
        for layer in range(layers):
            link.layer_ready(ticket.transfer_id, layer, start, min(start + chunk_tokens, token_stop))


def open_sender(
    link: Link, ticket: Ticket, token_ids: Sequence[int], reader: KVReader, on_end: Callable[..., None]
) -> None:
    link.open_sender(ticket, OWNER, token_ids, len(token_ids), on_end)
    link.start_sender(ticket.transfer_id, reader)
