"""The other process of `bench.transfer`: sends KV, or answers bare ZMQ, as it is told by lines of JSON on its input.

    {"do": "link", "name", "transport", "frame_bytes", "integrity"}     -> {}
    {"do": "send", "name", "ticket"}                                    -> {"error", "cpu_s"}
    {"do": "zmq", "endpoint", "count", "echo"}                          -> {}, then what `serve_zmq` does

It ends when its input does. What both processes need (links, stores, the size of a transfer) is here as well.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from kvtransfer.link import Link
from kvtransfer.transports.assembly import worker_transport
from kvtransfer.transports.base import Transport
from kvtransfer.transports.memory import MemoryNetwork
from kvtransfer.transports.zmq import CurveKey, ZmqTransport
from pdserve import logs
from pdserve.clock import SystemClock
from pdserve.config import TransferConfig
from pdserve.errors import PdserveError
from pdserve.kv_format import KVFormat
from pdserve.tracing import Trace
from pdserve.types import Owner, SampledToken, Ticket

LAYOUT = KVFormat(layer_count=8, kv_heads=8, head_dim=64, item="bfloat16")  # 2 KiB a token and layer
TOKEN_COUNT = 4096
TRANSFER_BYTES = LAYOUT.layer_count * LAYOUT.payload_bytes(TOKEN_COUNT)  # 64 MiB
TOKEN_IDS = list(range(TOKEN_COUNT))
OWNER = Owner("bench", "transfer", "router", 1)
TRANSPORTS = ("memory", "ipc", "tcp", "curve", "shared", "gloo")
WAIT_S = 60.0


class PlainStore:
    """KV in one array: a copy out at the sender and a copy in at the receiver, as with a paged cache."""

    def __init__(self, fill: int) -> None:
        self._kv = np.full((LAYOUT.layer_count, 2, TOKEN_COUNT, LAYOUT.row_bytes), fill, np.uint8)

    def read_into(self, layer: int, start: int, stop: int, out: memoryview) -> None:
        np.copyto(np.frombuffer(out, np.uint8).reshape(2, stop - start, -1), self._kv[layer, :, start:stop])

    def write(self, layer: int, start: int, stop: int, payload: memoryview) -> None:
        self._kv[layer, :, start:stop] = np.frombuffer(payload, np.uint8).reshape(2, stop - start, -1)


def make_transport(kind: str, folder: Path, name: str, network: MemoryNetwork) -> Transport:
    """One of TRANSPORTS: "curve" is tcp with a key, "shared" and "gloo" are ipc with that carrier for the payload.
    `network` joins those of one process."""
    if kind == "memory":
        return network.transport()
    if kind == "tcp":
        return ZmqTransport("tcp://127.0.0.1:*", name.encode())
    config = TransferConfig(
        network="tcp" if kind == "curve" else "ipc", payload="inline" if kind in ("ipc", "curve") else kind
    )
    return worker_transport(config, name, folder / "kv", _key(folder), SystemClock(), logs.logger("bench"))


def _key(folder: Path) -> CurveKey:
    """The same for both processes; the first one makes it."""
    file = folder / "key"
    if not file.exists():
        made = CurveKey.generate()
        file.write_bytes(made.public + made.secret)
    both = file.read_bytes()
    return CurveKey(both[:40], both[40:])


def make_link(transport: Transport, frame_bytes: int, integrity: bool) -> Link:
    """A started link with the default window."""
    config = TransferConfig(max_frame_bytes=frame_bytes, integrity=integrity)
    link = Link(transport, LAYOUT, b"model", config, SystemClock(), Trace(capacity=16), logs.logger("bench"))
    link.start()
    return link


def send(link: Link, ticket: Ticket, store: PlainStore) -> dict[str, Any]:
    """Send all of a store that is computed already. The CPU seconds are the whole process's."""
    ended = threading.Event()
    outcomes: list[PdserveError | None] = []

    def on_end(error: PdserveError | None) -> None:
        outcomes.append(error)
        ended.set()

    cpu_s = time.process_time()
    link.open_sender(ticket, OWNER, TOKEN_IDS, TOKEN_COUNT, on_end)
    link.start_sender(ticket.transfer_id, store)
    for layer in range(LAYOUT.layer_count):
        link.layer_ready(ticket.transfer_id, layer, 0, TOKEN_COUNT)
    link.commit(ticket.transfer_id, [SampledToken(1)])
    if not ended.wait(WAIT_S):
        return {"error": f"not sent within {WAIT_S:g} s", "cpu_s": 0.0}
    return {"error": outcomes[0] and str(outcomes[0]), "cpu_s": time.process_time() - cpu_s}


def serve_zmq(endpoint: str, count: int, echo: bool) -> None:
    """Take `count` messages; send each back (`echo`), or one empty message after the last."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as mine:
        mine.bind(endpoint)
        _answer({})
        for number in range(count):
            message = mine.recv(copy=False)
            if echo:
                mine.send(message, copy=False)
            elif number == count - 1:
                mine.send(b"")
        mine.recv()  # the other side has everything


def _answer(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def _run(folder: Path) -> None:
    links: dict[str, Link] = {}
    store, network = PlainStore(fill=7), MemoryNetwork()
    for line in sys.stdin:
        what = json.loads(line)
        match what.pop("do"):
            case "link":
                name = what["name"]
                transport = make_transport(what["transport"], folder, f"sender-{name}", network)
                links[name] = make_link(transport, what["frame_bytes"], what["integrity"])
                _answer({})
            case "send":
                ticket = what["ticket"] | {"transfer_id": bytes.fromhex(what["ticket"]["transfer_id"])}
                _answer(send(links[what["name"]], Ticket(**ticket), store))
            case "zmq":
                serve_zmq(**what)
    for link in links.values():
        link.close()


if __name__ == "__main__":
    _run(Path(sys.argv[1]))
