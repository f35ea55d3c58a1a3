"""What an engine tells the one who listens to it: values, in the order in which they came about.

A sequence is named by its owner. Each one that was submitted has exactly one `Ended`, after all its `Tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from engine.sequence import SequenceKV
from pdserve.errors import PdserveError
from pdserve.types import Finish, Load, Owner, SampledToken


@dataclass(frozen=True, slots=True)
class Leased:
    """A receiving sequence has its blocks, and is pinned: KV may be written through `kv` until it is unpinned."""

    owner: Owner
    kv: SequenceKV


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens were appended to its output; the first of them has this position in it."""

    owner: Owner
    first_position: int
    tokens: ListLike[SampledToken]


@dataclass(frozen=True, slots=True)
class Preempted:
    """It has lost its blocks; all its KV will be computed again, here."""

    owner: Owner


@dataclass(frozen=True, slots=True)
class Aborting:
    """It was aborted but is pinned: bring its transfer to an end, then unpin it."""

    owner: Owner
    error: PdserveError


@dataclass(frozen=True, slots=True)
class Ended:
    """It has ended and its lease is returned. None: a prefill whose KV was handed over."""

    owner: Owner
    outcome: Finish | PdserveError | None


EngineEvent: TypeAlias = Leased | Tokens | Preempted | Aborting | Ended


class EngineListener(Protocol):
    """Listens to one engine."""

    def on_engine(self, events: tuple[EngineEvent, ...], load: Load) -> None:
        """All events since the last call, in their order, and the load after them. Called on the engine's thread: must
        only note or enqueue, never block.

        It comes at the end of every step and inbox round, even without events; and right after planning, before the
        step is computed, if a Leased or Preempted is among them, so that a transfer need not wait for the step.
        """
        ...
