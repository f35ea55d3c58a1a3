"""The faults of the wire's tests and the phases of a transfer in which they strike, told apart by frames.

A phase is named by the side whose message is struck, the message's type and its number of that type: what is on its
way at that moment of the transfer that `kv_links` and `kv_process` drive (70 tokens, blocks leased 0.15 s late).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvtransfer.frames import Ack, Commit, Credit, Layer, Open, Ping
from kvtransfer.receiver import MAX_FRUITLESS_ROUNDS
from kvtransfer.transports.faulty import Fault, FaultRule
from pdserve.config import TransferConfig
from support.kv_links import CONFIG, IMPATIENT

TOKEN_COUNT = 70
CHUNK_TOKENS = 24
LEASE_AFTER_S = 0.15  # some probes long
# How long a receiver asks for what never comes. A round takes some probes, because what is lost uses up the window.
FRUITLESS_S = MAX_FRUITLESS_ROUNDS * 4 * CONFIG.ping_interval_ms / 1000


@dataclass(frozen=True, slots=True)
class Phase:
    side: str
    frame_type: type[Any]
    first: int


PHASES = {
    "before OPEN": Phase("prefill", Open, 0),
    "waiting for blocks": Phase("decode", Ping, 1),
    "credit": Phase("decode", Credit, 0),
    "in the stream": Phase("prefill", Layer, 3),
    "at COMMIT": Phase("prefill", Commit, 0),
    "at ACK": Phase("decode", Ack, 0),
}


@dataclass(frozen=True, slots=True)
class FaultCase:
    """`passes`: the transfer must get over it."""

    fault: Fault
    count: int | None
    seconds: float
    passes: bool

    @property
    def config(self) -> TransferConfig:
        return CONFIG if self.passes else IMPATIENT

    def rule(self, phase: Phase) -> FaultRule:
        return FaultRule(self.fault, phase.frame_type, phase.first, self.count, seconds=self.seconds)


FAULTS = {
    "dropped": FaultCase(Fault.DROP, 1, 0.0, passes=True),
    "doubled": FaultCase(Fault.DUPLICATE, None, 0.0, passes=True),
    "reordered": FaultCase(Fault.REORDER, None, 0.0, passes=True),
    "corrupted": FaultCase(Fault.CORRUPT, 1, 0.0, passes=True),
    "delayed": FaultCase(Fault.DELAY, 3, 0.2, passes=True),
    "cut for a while": FaultCase(Fault.CUT, 1, 0.3, passes=True),
    "dropped for good": FaultCase(Fault.DROP, None, 0.0, passes=False),
    "corrupted for good": FaultCase(Fault.CORRUPT, None, 0.0, passes=False),
    "cut for good": FaultCase(Fault.CUT, 1, math.inf, passes=False),
}
