"""Requests that crash workers: noticed, isolated, refused. Pure.

    innocent ──first crash──► suspected ──second──► isolated ──third──► convicted: ended with INTERNAL, refused a while
       ▲                          │                     │
       └──────PROGRESS tokens─────┴─────────────────────┘

Every request on a worker that crashes is suspected a little; one that goes on for a while afterwards was not the cause.
A worker that was killed from outside, or fell silent, makes nobody suspicious.
An isolated one gets one worker, which computes it alone from the prompt on, and others stay away from that worker; a
second one waits for a worker of its own.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

PROGRESS: Final = 16  # tokens after which a crash no longer counts against a request
ISOLATE_AFTER: Final = 2
CONVICT_AFTER: Final = 3
_MAX_REFUSED = 1024


@dataclass(slots=True)
class Suspicion:
    """How one request stands."""

    crashes: int = 0
    output_count: int = 0  # at the last crash

    @property
    def isolated(self) -> bool:
        return self.crashes >= ISOLATE_AFTER

    @property
    def convicted(self) -> bool:
        return self.crashes >= CONVICT_AFTER

    def crashed(self, output_count: int) -> None:
        self.progressed(output_count)
        self.crashes += 1
        self.output_count = output_count

    def progressed(self, output_count: int) -> None:
        if output_count - self.output_count >= PROGRESS:
            self.crashes = 0


class Refusals:
    """The prompts that are refused for now, by hash."""

    def __init__(self, duration_s: float) -> None:
        self._duration_s = duration_s
        self._until: dict[bytes, float] = {}

    def add(self, tenant: str, prompt_ids: Sequence[int], now: float) -> None:
        while len(self._until) >= _MAX_REFUSED:
            del self._until[next(iter(self._until))]
        self._until[_digest(tenant, prompt_ids)] = now + self._duration_s

    def remaining_s(self, tenant: str, prompt_ids: Sequence[int], now: float) -> float:
        """How long this prompt is refused from now on; 0 if it is not."""
        if not self._until:
            return 0.0
        key = _digest(tenant, prompt_ids)
        until = self._until.get(key, now)
        if until <= now:
            self._until.pop(key, None)
        return max(0.0, until - now)


def _digest(tenant: str, prompt_ids: Sequence[int]) -> bytes:
    digest = hashlib.blake2b(tenant.encode(), digest_size=16)
    digest.update(b"\0" + array("I", prompt_ids).tobytes())
    return digest.digest()
