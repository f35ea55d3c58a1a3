"""Which workers serve an attempt: tiny classes over a snapshot. Pure and deterministic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pdserve.types import Role


@dataclass(frozen=True, slots=True)
class Candidate:
    """A living worker at the moment of the choice. `assigned_*`: what this router has placed there itself and not
    seen the end of, which is fresher than the load the worker tells."""

    incarnation: str
    worker_id: str
    role: Role
    fingerprint: str
    assigned_requests: int
    assigned_prompt_tokens: int
    free_blocks: int


@dataclass(frozen=True, slots=True)
class Wish:
    """What an attempt asks for. Workers in `avoid` failed it before; fingerprints are those of its first attempt."""

    avoid: frozenset[str] = frozenset()
    prompt_fingerprint: str | None = None
    output_fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """A decode worker, and the prefill worker that sends it the KV. None: the decode worker prefills itself."""

    decode: str
    prefill: str | None


class Policy(Protocol):
    def choose(self, wish: Wish, candidates: list[Candidate]) -> Placement | None:
        """A placement, or None where no decode worker is alive."""
        ...


class LeastLoaded:
    """The least loaded decode and prefill worker. Exactness first: one that failed the attempt before is the last
    choice, one of another fingerprint the last but one."""

    def choose(self, wish: Wish, candidates: list[Candidate]) -> Placement | None:
        decoders = [c for c in candidates if c.role is Role.DECODE]
        if not decoders:
            return None
        decode = min(
            decoders,
            key=lambda c: (
                c.incarnation in wish.avoid,
                wish.output_fingerprint not in (None, c.fingerprint),
                c.assigned_requests,
                -c.free_blocks,
                c.worker_id,
            ),
        )
        prefillers = [c for c in candidates if c.role is Role.PREFILL and c.incarnation not in wish.avoid]
        if not prefillers:
            return Placement(decode.incarnation, None)
        prefill = min(
            prefillers,
            key=lambda c: (
                wish.prompt_fingerprint not in (None, c.fingerprint),
                c.assigned_prompt_tokens,
                c.assigned_requests,
                -c.free_blocks,
                c.worker_id,
            ),
        )
        return Placement(decode.incarnation, prefill.incarnation)
