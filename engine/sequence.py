"""A sequence: one sample of a request while a worker's engine has it.

Life cycle (the names are those of `Phase`):

    WAITING ──blocks leased──► RUNNING ─────────────► ENDED
       │                          ▲                     ▲
       └─blocks leased,           │ KV delivered        │
         KV comes from outside──► RECEIVING ────────────┘  (any phase: aborted)
    RUNNING ──preempted: blocks given back, KV to be computed again──► WAITING

RUNNING covers prefill and decode alike: a step computes the KV of the next `known - computed` tokens, or a part of
them; when none is left, the token after them is sampled. A sequence whose KV a transfer may still read or write is
`pinned`: it keeps its lease even when ENDED, until it is unpinned.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from enum import Enum
from typing import Protocol

from pdserve.errors import PdserveError
from pdserve.types import Finish, Owner, SamplingParams


class Phase(Enum):
    WAITING = "waiting"
    RECEIVING = "receiving"
    RUNNING = "running"
    ENDED = "ended"


class KVSource(Enum):
    """Where the KV of the tokens known at the start comes from."""

    COMPUTED = "computed"  # this engine computes it
    DELIVERED = "delivered"  # another worker sends it


class SequenceKV(Protocol):
    """One sequence's KV by layer and token range, in canonical form (pdserve.kv_format). Used by a transfer, on its own
    thread, while the sequence is pinned."""

    def read_into(self, layer: int, start: int, stop: int, out: memoryview) -> None:
        """Copy the canonical bytes of tokens [start, stop) of a layer into `out`, which has room for just these."""
        ...

    def write(self, layer: int, start: int, stop: int, payload: memoryview) -> None:
        """Copy canonical bytes into the sequence's blocks."""
        ...


class KVOutlet(Protocol):
    """Where a sequence's KV leaves while it is computed: a prefill worker's way to the wire. Called on the engine's
    thread; must only enqueue, never block."""

    def opened(self, kv: SequenceKV) -> None:
        """Its blocks are leased, and pinned: what is ready may be read through `kv` until it is unpinned."""
        ...

    def layer_ready(self, layer: int, start: int, stop: int) -> None:
        """The KV of tokens [start, stop) of a layer is in its blocks."""
        ...


class Sequence:
    """`prompt_ids` and `output_ids` stay apart: every parameter refers to the border between them.

    `stops_after_prefill`: the sequence ends with the first sampled token (a prefill worker's). `outlet`: where its KV
    leaves while it is computed. `shares`: a sequence of the same prompt, whose KV of it this one takes over if it can.
    """

    def __init__(
        self,
        owner: Owner,
        prompt_ids: ListLike[int],
        output_ids: ListLike[int],
        params: SamplingParams,
        *,
        source: KVSource = KVSource.COMPUTED,
        stops_after_prefill: bool = False,
        outlet: KVOutlet | None = None,
        index: int = 0,
        shares: Owner | None = None,
    ) -> None:
        self.owner = owner
        self.params = params
        self.source = source
        self.stops_after_prefill = stops_after_prefill
        self.outlet = outlet
        self.index = index
        self.shares = shares
        self.followers: list[Sequence] = []  # those that wait for this one's prompt
        self.prompt_count = len(prompt_ids)
        self.token_ids = [*prompt_ids, *output_ids]
        self.phase = Phase.WAITING
        self.pinned = False
        self.blocks: list[int] = []
        self.computed = 0
        self.outcome: Finish | PdserveError | None = None

    @property
    def known(self) -> int:
        """How many tokens are known: prompt and output."""
        return len(self.token_ids)

    @property
    def pending(self) -> int:
        """How many known tokens have no KV yet. 1: it decodes."""
        return len(self.token_ids) - self.computed

    @property
    def prompt_ready(self) -> bool:
        """Whether the KV of its whole prompt is in its blocks."""
        return self.phase is Phase.RUNNING and self.computed >= self.prompt_count

    @property
    def output_count(self) -> int:
        return len(self.token_ids) - self.prompt_count

    def accept(self, token_id: int, eos_token_ids: ListLike[int]) -> Finish | None:
        """Append a token to the output; the regular end it brings, or None."""
        self.token_ids.append(token_id)
        return self.params.end_of(self.token_ids[self.prompt_count :], eos_token_ids)

    def __repr__(self) -> str:
        return f"<Sequence {self.owner} {self.phase.value} {self.computed}/{self.known}>"
