"""Who is alive: the workers that introduced themselves and keep renewing. Pure; time comes in as an argument.

Life of an entry:  join ──renew…──► leave (its session broke) or expire (no renewal within the timeout) ──► lost

A worker is known by its incarnation; its `worker_id` only says which of its incarnations came later. Lost workers are
remembered by id until they join again, for people to see.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pdserve.types import Load, WorkerInfo

_LOST_REMEMBERED = 64


@dataclass(slots=True)
class Member:
    """A living worker as this router sees it."""

    info: WorkerInfo
    renewed_at: float
    load: Load = field(default_factory=Load)
    excused_s: float = 0.0  # of its silence, in which this router could not listen


class Membership:
    """The living workers by incarnation."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._members: dict[str, Member] = {}
        self._lost: dict[str, WorkerInfo] = {}

    def __contains__(self, incarnation: str) -> bool:
        return incarnation in self._members

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def get(self, incarnation: str) -> Member | None:
        return self._members.get(incarnation)

    def known(self, incarnation: str) -> WorkerInfo | None:
        """A member, or a worker that was one and has not come back."""
        member = self._members.get(incarnation)
        if member is not None:
            return member.info
        return next((info for info in self._lost.values() if info.incarnation == incarnation), None)

    @property
    def lost(self) -> list[WorkerInfo]:
        """Workers that were here and have not come back, the latest last."""
        return list(self._lost.values())

    def join(self, info: WorkerInfo, now: float) -> list[str]:
        """Add a worker. Returns the incarnations it replaces: they are lost."""
        replaced = [
            incarnation
            for incarnation, member in self._members.items()
            if member.info.worker_id == info.worker_id and incarnation != info.incarnation
        ]
        for incarnation in replaced:
            self.leave(incarnation)
        self._members[info.incarnation] = Member(info, now)
        self._lost.pop(info.worker_id, None)
        return replaced

    def renew(self, incarnation: str, load: Load, now: float) -> None:
        """Note a sign of life. From a worker that is not a member, it changes nothing."""
        member = self._members.get(incarnation)
        if member is not None:
            member.load = load
            member.renewed_at = now
            member.excused_s = 0.0

    def excuse(self, seconds: float) -> None:
        """This router has not been able to listen for so long: nobody's silence counts, up to a timeout more."""
        for member in self._members.values():
            member.excused_s = min(member.excused_s + seconds, self._timeout_s)

    def leave(self, incarnation: str) -> bool:
        """Remove a worker; False if it was no member."""
        member = self._members.pop(incarnation, None)
        if member is None:
            return False
        self._lost[member.info.worker_id] = member.info
        while len(self._lost) > _LOST_REMEMBERED:
            del self._lost[next(iter(self._lost))]
        return True

    def expire(self, now: float) -> list[str]:
        """Remove the workers that have not renewed within the timeout; their incarnations."""
        expired = [
            incarnation
            for incarnation, member in self._members.items()
            if now - member.renewed_at > self._timeout_s + member.excused_s
        ]
        for incarnation in expired:
            self.leave(incarnation)
        return expired
