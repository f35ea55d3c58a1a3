"""Which workers serve an attempt: tiny classes over a snapshot. Pure and deterministic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pdserve.types import Role


@dataclass(frozen=True, slots=True)
class Candidate:
    """A living worker at the moment of the choice. `assigned_*`: what this router has placed there itself and not
    seen the end of, which is fresher than the load the worker tells. `draining`: wants nothing new. `tripped`: its
    circuit breaker is open. `isolating`: a request is alone there that may crash it."""

    incarnation: str
    worker_id: str
    role: Role
    fingerprint: str
    assigned_requests: int
    assigned_prompt_tokens: int
    free_blocks: int
    draining: bool = False
    tripped: bool = False
    isolating: bool = False


@dataclass(frozen=True, slots=True)
class Wish:
    """What an attempt asks for. Workers in `avoid` failed it before; fingerprints are those of its first attempt."""

    avoid: frozenset[str] = frozenset()
    prompt_fingerprint: str | None = None
    output_fingerprint: str | None = None


class Policy(Protocol):
    def choose_decode(self, wish: Wish, candidates: list[Candidate]) -> str | None:
        """A worker to decode, or None where none is alive."""
        ...

    def choose_prefill(self, wish: Wish, candidates: list[Candidate]) -> str | None:
        """A prefill worker, or None where there is none but such that failed before."""
        ...


class LeastLoaded:
    """The least loaded worker of each role. One that failed the attempt before is the last choice to decode; exactness
    comes next, then health, then load. Where no decode worker is left, a prefill worker takes both roles."""

    def choose_decode(self, wish: Wish, candidates: list[Candidate]) -> str | None:
        willing = [c for c in candidates if not c.draining]
        decoders = [c for c in willing if c.role is Role.DECODE] or willing
        chosen = min(
            decoders,
            key=lambda c: (
                c.incarnation in wish.avoid,
                wish.output_fingerprint not in (None, c.fingerprint),
                c.tripped,
                c.isolating,
                c.assigned_requests,
                -c.free_blocks,
                c.worker_id,
            ),
            default=None,
        )
        return chosen.incarnation if chosen else None

    def choose_prefill(self, wish: Wish, candidates: list[Candidate]) -> str | None:
        prefillers = [
            c for c in candidates if c.role is Role.PREFILL and not c.draining and c.incarnation not in wish.avoid
        ]
        chosen = min(
            prefillers,
            key=lambda c: (
                wish.prompt_fingerprint not in (None, c.fingerprint),
                c.tripped,
                c.isolating,
                c.assigned_prompt_tokens,
                c.assigned_requests,
                -c.free_blocks,
                c.worker_id,
            ),
            default=None,
        )
        return chosen.incarnation if chosen else None
