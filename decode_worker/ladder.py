"""The ladder: what a receiver does when the sender it had is gone. One door, a budget a transfer, a cooldown a rung.

    RESEND          missing and damaged frames are asked for again: within the transfer (kvtransfer), not here
    ANOTHER_SENDER  a new epoch, for which somebody sends what is still missing
    LOCAL           the receiver computes the rest itself; always possible, so the ladder has an end

A rung is skipped once the transfer has used up its budget there, or while it cools down: a rung that failed
`max_failures` times in a row, over all transfers, is not tried for `cooldown_s`. Pure; time comes in as an argument.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from pdserve.config import TransferConfig


class Rung(StrEnum):
    ANOTHER_SENDER = "another sender"
    LOCAL = "local"


@dataclass(frozen=True, slots=True)
class LadderLimits:
    """`budget`: how often one transfer may take the rung."""

    budget: int
    max_failures: int
    cooldown_s: float

    @staticmethod
    def from_config(config: TransferConfig) -> LadderLimits:
        return LadderLimits(config.max_renewals, config.renewal_failures, config.renewal_cooldown_ms / 1000)


class Cooldown:
    """Keeps from a way that fails: after `max_failures` failures in a row it is closed for `cooldown_s`."""

    def __init__(self, max_failures: int, cooldown_s: float) -> None:
        self._max_failures = max_failures
        self._cooldown_s = cooldown_s
        self._failures = 0
        self._cools_until = -math.inf

    def is_open(self, now: float) -> bool:
        return now >= self._cools_until

    def failed(self, now: float) -> None:
        self._failures += 1
        if self._failures >= self._max_failures:
            self._failures = 0
            self._cools_until = now + self._cooldown_s

    def succeeded(self) -> None:
        self._failures = 0


class Ladder:
    """A worker's: what all its transfers have learned."""

    def __init__(self, limits: LadderLimits) -> None:
        self._budget = limits.budget
        self._renewing = Cooldown(limits.max_failures, limits.cooldown_s)

    def next_rung(self, taken: int, now: float) -> Rung:
        """The rung for a transfer that has taken ANOTHER_SENDER `taken` times so far."""
        if taken >= self._budget or not self._renewing.is_open(now):
            return Rung.LOCAL
        return Rung.ANOTHER_SENDER

    def failed(self, now: float) -> None:
        """A transfer's new sender was lost too, or there was none."""
        self._renewing.failed(now)

    def succeeded(self) -> None:
        """A transfer's new sender delivered."""
        self._renewing.succeeded()
