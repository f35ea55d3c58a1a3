"""What an engine is told, as values: for who decides it and has somebody else tell the engine.

Each is one of the engine's commands, under its own name there.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import TypeAlias

from engine.sequence import Sequence
from pdserve.errors import PdserveError
from pdserve.types import Owner, SampledToken


@dataclass(frozen=True, slots=True)
class SubmitSequence:
    sequence: Sequence


@dataclass(frozen=True, slots=True)
class ExpectSequence:
    owner: Owner


@dataclass(frozen=True, slots=True)
class ForgetSequence:
    owner: Owner


@dataclass(frozen=True, slots=True)
class AbortSequence:
    owner: Owner
    error: PdserveError


@dataclass(frozen=True, slots=True)
class DeliverTokens:
    """All KV of a receiving sequence is there; these tokens follow."""

    owner: Owner
    tokens: ListLike[SampledToken]


@dataclass(frozen=True, slots=True)
class TakeOverSequence:
    """The first `computed` tokens' KV of a receiving sequence is there; the rest is computed here."""

    owner: Owner
    computed: int


@dataclass(frozen=True, slots=True)
class UnpinSequence:
    owner: Owner


EngineCommand: TypeAlias = (
    SubmitSequence | ExpectSequence | ForgetSequence | AbortSequence | DeliverTokens | TakeOverSequence | UnpinSequence
)
