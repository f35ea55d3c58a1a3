"""What the decode role wants done: commands to the engine, to the link's receiving side, and reports to the router."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from engine.commands import EngineCommand
from engine.sequence import SequenceKV
from pdserve.errors import PdserveError
from pdserve.reports import Report
from pdserve.types import Owner


@dataclass(frozen=True, slots=True)
class ExpectKV:
    """Promise to receive the KV of `token_ids`. Answered by `ticket_issued` or `ticket_refused`."""

    owner: Owner
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class OpenBlocks:
    """Every expected token has a place behind `kv`: let the sender begin."""

    transfer_id: bytes
    kv: SequenceKV


@dataclass(frozen=True, slots=True)
class GiveUpSender:
    """The sender of this epoch is gone, as somebody else knows."""

    transfer_id: bytes
    epoch: int
    error: PdserveError


@dataclass(frozen=True, slots=True)
class RenewTicket:
    """Expect another sender. Answered by `epoch_opened`, unless the transfer has ended meanwhile."""

    owner: Owner
    transfer_id: bytes


@dataclass(frozen=True, slots=True)
class WantNoMore:
    """End the transfer with what is there."""

    transfer_id: bytes


@dataclass(frozen=True, slots=True)
class AbortReceive:
    transfer_id: bytes
    error: PdserveError


DecodeAction: TypeAlias = (
    EngineCommand | ExpectKV | OpenBlocks | GiveUpSender | RenewTicket | WantNoMore | AbortReceive | Report
)
