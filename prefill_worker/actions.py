"""What the prefill role wants done: commands to the engine, to the link's sending side, and reports to the router."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from engine.commands import EngineCommand
from pdserve.errors import PdserveError
from pdserve.reports import Report
from pdserve.types import Owner, SampledToken, Ticket


@dataclass(frozen=True, slots=True)
class OpenSend:
    """Take up a ticket: send the KV of `token_ids` once it is computed. Answered by `send_opened` or `send_refused`."""

    owner: Owner
    ticket: Ticket
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class CommitSend:
    """All KV is given to the link, and these tokens follow it."""

    transfer_id: bytes
    tokens: Sequence[SampledToken]


@dataclass(frozen=True, slots=True)
class AbortSend:
    transfer_id: bytes
    error: PdserveError


PrefillAction: TypeAlias = EngineCommand | OpenSend | CommitSend | AbortSend | Report
