"""The durations that end or probe a transfer, in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.config import TransferConfig


@dataclass(frozen=True, slots=True)
class Timing:
    """`ttl_s`: how long the other side may be silent. `probe_s`: after how much silence it is asked for a sign of
    life. `deadline_s`: how long a transfer may take in all, counted from when its ticket or its sender was made."""

    ttl_s: float
    probe_s: float
    deadline_s: float

    @staticmethod
    def from_config(config: TransferConfig, ttl_ms: int) -> Timing:
        return Timing(ttl_ms / 1000, config.ping_interval_ms / 1000, config.deadline_ms / 1000)
