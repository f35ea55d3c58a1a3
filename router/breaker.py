"""Circuit breakers: a worker that keeps failing becomes the last choice, and is tried again after a while. Pure.

    closed ──`threshold` failures in a row──► open ──cooldown──► half open ──a request goes there──► trial
       ▲                                       ▲                                                      │
       └──success (from any state)             └────────────failure; the cooldown doubles─────────────┘

A worker is known by its `worker_id`, so that one that crashes as often as it is started stays noticed. Only errors that
blame the worker count; a client's never do. A trial whose outcome never comes ends with its cooldown.
"""

from __future__ import annotations

from dataclasses import dataclass

_MAX_DOUBLINGS = 5


@dataclass(slots=True)
class _Breaker:
    failures: int = 0
    openings: int = 0  # since the last success
    open_until: float = 0.0


class Breakers:
    """One breaker a worker; a worker without failures has none."""

    def __init__(self, threshold: int, cooldown_s: float) -> None:
        self._threshold = threshold
        self._cooldown_s = cooldown_s
        self._breakers: dict[str, _Breaker] = {}

    def is_open(self, worker_id: str, now: float) -> bool:
        breaker = self._breakers.get(worker_id)
        return breaker is not None and now < breaker.open_until

    def placed(self, worker_id: str, now: float) -> None:
        """A request goes there. If the breaker is half open, it is the one trial."""
        breaker = self._breakers.get(worker_id)
        if breaker is not None and breaker.openings and now >= breaker.open_until:
            breaker.open_until = now + self._cooldown_s

    def succeeded(self, worker_id: str) -> None:
        self._breakers.pop(worker_id, None)

    def failed(self, worker_id: str, now: float) -> None:
        """Count a failure, which may open the breaker."""
        breaker = self._breakers.setdefault(worker_id, _Breaker())
        breaker.failures += 1
        if breaker.failures < self._threshold and not breaker.openings:
            return
        breaker.open_until = now + self._cooldown_s * 2 ** min(breaker.openings, _MAX_DOUBLINGS)
        breaker.openings += 1
