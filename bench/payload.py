"""How fast payloads go between two processes, by path and size: python -m bench.payload

Both ends do what a worker does with a payload: the sender gathers its halves into one buffer, the receiver checks the
header and scatters the halves into its memory. A window of 32 MB; the receiver's answers are its credit. Rounds of all
paths are interleaved, so that a busy neighbour slows all of them. One line of JSON for each path and size.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from kvtransfer.transports.assembly import worker_transport
from kvtransfer.transports.base import Message, Transport
from kvtransfer.transports.zmq import CurveKey
from pdserve.clock import SystemClock
from pdserve.config import TransferConfig
from pdserve.logs import logger

PATHS = {
    "ipc inline": ("ipc", "inline"),
    "ipc shared": ("ipc", "shared"),
    "ipc gloo": ("ipc", "gloo"),
    "tcp curve": ("tcp", "inline"),
}
SIZES = (64 * 1024, 256 * 1024, 1024 * 1024, 8 * 1024 * 1024)
WINDOW_BYTES = 32 * 1024 * 1024
MEMORY_BYTES = 64 * 1024 * 1024
TOTAL_BYTES = 256 * 1024 * 1024
ROUNDS = 3


def main() -> None:
    rounds: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    for _ in range(ROUNDS):
        for size in SIZES:
            for path in PATHS:
                rounds.setdefault((path, size), []).append(measure(path, size, TOTAL_BYTES // size))
    for (path, size), results in rounds.items():
        speed, sender, receiver = (statistics.median(column) for column in zip(*results, strict=True))
        row = {"path": path, "frame_kb": size // 1024, "gb_per_s": round(speed, 2)}
        print(json.dumps(row | {"cpu_s_per_gb": [round(sender, 3), round(receiver, 3)]}))


def measure(path: str, size: int, count: int) -> tuple[float, float, float]:
    """GB/s, and CPU seconds a GB of the sender and of the receiver."""
    network, payload = PATHS[path]
    config, key = TransferConfig(network=network, payload=payload, window_bytes=WINDOW_BYTES), CurveKey.generate()
    with tempfile.TemporaryDirectory(prefix="pay", dir="/tmp") as folder:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            transport = _transport(config, "receiver", folder, key)
            os.write(writer, transport.endpoint.encode())
            _receive(transport, size, count)
            os._exit(0)
        transport = _transport(config, "sender", folder, key)
        result = _send(transport, os.read(reader, 1024).decode(), size, count)
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)
    return result


def _transport(config: TransferConfig, name: str, folder: str, key: CurveKey) -> Transport:
    return worker_transport(config, name, Path(folder) / "s", key, SystemClock(), logger("bench"))


def _send(transport: Transport, endpoint: str, size: int, count: int) -> tuple[float, float, float]:
    memory = np.random.default_rng(0).integers(0, 256, (2, MEMORY_BYTES // 2), np.uint8)
    peer, half, taken, began, cpu = transport.connect(endpoint), size // 2, 0, 0.0, 0.0
    warm = max(4, count // 16)  # opens the carrier, touches the memory
    opened = time.monotonic() + 0.5
    while time.monotonic() < opened:
        transport.receive(0.01)
    for number in range(warm + count):
        if number == warm:
            taken = _credit(transport, taken, warm)
            began, cpu = time.perf_counter(), _cpu_s()
        taken = _credit(transport, taken, number + 1 - WINDOW_BYTES // size)
        start = number * half % (MEMORY_BYTES // 2 - half + 1)
        gathered = np.concatenate((memory[0, start : start + half], memory[1, start : start + half]))
        transport.send(peer, [number.to_bytes(8, "little"), gathered.data])
    _credit(transport, taken, warm + count)
    elapsed, spent = time.perf_counter() - began, _cpu_s() - cpu
    gigabytes = count * size / 1e9
    transport.send(peer, [b"end"])
    while not (events := transport.receive(1.0)):
        pass
    theirs = next(float(bytes(event.parts[1])) for event in events if isinstance(event, Message))
    transport.close()
    return gigabytes / elapsed, spent / gigabytes, theirs / gigabytes * count / (warm + count)


def _credit(transport: Transport, taken: int, needed: int) -> int:
    """Wait until `needed` payloads are stored; how many are."""
    events = transport.receive(0.0)
    while True:
        for event in events:
            if isinstance(event, Message):
                taken = max(taken, int.from_bytes(event.parts[0], "little"))
        if taken >= needed:
            return taken
        events = transport.receive(1.0)


def _receive(transport: Transport, size: int, count: int) -> None:
    memory = np.zeros((2, MEMORY_BYTES // 2), np.uint8)
    half, stored, began = size // 2, 0, _cpu_s()
    step = max(1, WINDOW_BYTES // 2 // size)
    while True:
        for event in transport.receive(1.0):
            if not isinstance(event, Message):
                continue
            if len(event.parts) == 1:
                transport.send(event.peer, [bytes(8), str(_cpu_s() - began).encode()])
                transport.receive(0.2)
                return
            start = stored * half % (MEMORY_BYTES // 2 - half + 1)
            halves = np.frombuffer(event.parts[1], np.uint8).reshape(2, half)
            memory[:, start : start + half] = halves
            stored += 1
            if stored % step == 0 or stored >= count:
                transport.send(event.peer, [stored.to_bytes(8, "little")])


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
