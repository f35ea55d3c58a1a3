"""The durations that end or probe a transfer, in seconds, and what counts as silence of the other side.

Only time in which this side listened can be silence. A process that was frozen, or whose thread was away in a slow
store, finds in its sockets what came meanwhile; so it must not judge by the clock before it has looked.
"""

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


class Silence:
    """The other side's: since when, and how much of it does not count."""

    __slots__ = ("_excused_s", "since")

    def __init__(self, now: float) -> None:
        self.since = now
        self._excused_s = 0.0

    def end(self, now: float) -> None:
        """The other side was heard."""
        self.since = now
        self._excused_s = 0.0

    def excuse(self, seconds: float) -> None:
        """This side did not listen for so long."""
        self._excused_s += seconds

    def lasts_until(self, length_s: float) -> float:
        """When it will have lasted so long."""
        return self.since + self._excused_s + length_s


class Attendance:
    """Whether a loop listens when it should. A turn that takes longer than the wait that was meant counts as no more
    than that and `allowance_s`: so a loop that is always late still notices, some turns later, that nobody speaks.

    `listened_at`: what had come by then is known, what came later is not.
    """

    __slots__ = ("_allowance_s", "listened_at")

    def __init__(self, allowance_s: float, now: float) -> None:
        self._allowance_s = allowance_s
        self.listened_at = now

    def missed_s(self, wait_s: float, now: float) -> float:
        """The loop has listened again until now, for which it had meant to wait at most `wait_s`: how long it was away
        since it had listened before."""
        away_s = now - self.listened_at - wait_s - self._allowance_s
        self.listened_at = now
        return max(away_s, 0.0)
