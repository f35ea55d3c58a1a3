"""What a worker tells a router of an attempt, as values. `pdserve.rpc` has the messages that carry them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from pdserve.errors import PdserveError
from pdserve.types import Finish, Owner, SampledToken, Ticket


@dataclass(frozen=True, slots=True)
class TicketIssued:
    """Its KV may come: a prefill worker may take this ticket."""

    owner: Owner
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class PrefillsLocally:
    """A decode worker computes the rest of the prompt's KV itself."""

    owner: Owner
    reason: str


@dataclass(frozen=True, slots=True)
class TokensSampled:
    """New tokens of an output; the first of them has this position in it."""

    owner: Owner
    first_position: int
    tokens: Sequence[SampledToken]


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """The end of an owner's work at this worker. None: a prefill whose KV was handed over. `epoch`: of the ticket that
    a prefill was given; 0: it is decode's end."""

    owner: Owner
    outcome: Finish | PdserveError | None
    epoch: int = 0


Report: TypeAlias = TicketIssued | PrefillsLocally | TokensSampled | AttemptEnded
