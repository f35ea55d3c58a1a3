"""Which workers serve an attempt: one answer from one snapshot. Pure and deterministic."""

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
class PlacementWish:
    """What an attempt asks for. Workers in `avoid` failed it before; fingerprints are those of its first attempt.
    `beside`: where other outputs of its request are decoded, whose prompt it may share; the oldest first. `alone`: it
    may crash who computes it, so one worker shall do everything. `decode`: who decodes it is settled, and a sender of
    the prompt's KV is wanted."""

    avoid: frozenset[str] = frozenset()
    prompt_fingerprint: str | None = None
    output_fingerprint: str | None = None
    beside: tuple[str, ...] = ()
    alone: bool = False
    decode: str | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """Who serves an attempt: `decode` its tokens, `prefill` its prompt. `shares`: the prompt is another output's, whose
    KV is at `decode`."""

    decode: str
    prefill: str | None = None
    shares: bool = False

    @property
    def local(self) -> bool:
        """Whether the decode worker gets no KV from elsewhere: it computes the prompt itself, or shares it."""
        return self.prefill is None


class Policy(Protocol):
    def place(self, wish: PlacementWish, candidates: list[Candidate]) -> Placement | None:
        """None where no worker is there to decode. Workers are named by their incarnation."""
        ...


class LeastLoaded:
    """The least loaded worker of each role; exactness comes before health, and health before load.

    * An output goes beside another one of its request, where it can share the prompt.
    * One that failed the attempt before is the last choice to decode, and none to send. Where no decode worker is left,
      a prefill worker takes both roles.
    * The decode worker computes the prompt itself where it shall be alone, where it is a prefill worker, or where no
      prefill worker is left to send.
    """

    def place(self, wish: PlacementWish, candidates: list[Candidate]) -> Placement | None:
        willing = [candidate for candidate in candidates if not candidate.draining]
        if wish.decode is not None:
            return Placement(wish.decode, _sender(wish, willing))
        shared = _shared(wish, willing)
        if shared is not None:
            return Placement(shared, shares=True)
        decode = _decoder(wish, willing)
        if decode is None:
            return None
        return Placement(decode.incarnation, None if decode.role is Role.PREFILL else _sender(wish, willing))


def _shared(wish: PlacementWish, willing: list[Candidate]) -> str | None:
    """Where a prompt can be shared."""
    if wish.alone:
        return None
    known = {candidate.incarnation for candidate in willing} - wish.avoid
    return next((worker for worker in wish.beside if worker in known), None)


def _decoder(wish: PlacementWish, willing: list[Candidate]) -> Candidate | None:
    decoders = [candidate for candidate in willing if candidate.role is Role.DECODE] or willing
    return min(
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


def _sender(wish: PlacementWish, willing: list[Candidate]) -> str | None:
    """Who computes the prompt and sends its KV; None: the decode worker shall, or has to, do without."""
    if wish.alone:
        return None
    chosen = min(
        (c for c in willing if c.role is Role.PREFILL and c.incarnation not in wish.avoid),
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
