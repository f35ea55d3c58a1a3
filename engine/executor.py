"""The port below the engine: what computes its plans and holds the KV.

The engine decides what is computed and who holds which blocks; an executor has the model, the memory of the blocks and
the arithmetic. The model over the CPU kernels is one (`model.executor`), the simulation's tags are another; a GPU or a
group of processes would be others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.plan import Slice, StepPlan
from engine.sequence import Sequence, SequenceKV
from pdserve.errors import Uncomputable
from pdserve.kv_format import KVFormat
from pdserve.types import SampledToken


@dataclass(frozen=True, slots=True)
class Capacity:
    """What an executor has room for, and the model's facts that an engine needs."""

    block_count: int
    block_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    @property
    def pool_tokens(self) -> int:
        """How many tokens all blocks hold."""
        return self.block_count * self.block_tokens


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token sampled after a slice, or why this one has none."""

    slice: Slice
    token: SampledToken | Uncomputable


class Executor(Protocol):
    """Computes plans. Calls come from the engine's thread; what `sequence_kv` returns may be used on another one beside
    `run`, on other tokens."""

    @property
    def capacity(self) -> Capacity: ...

    @property
    def format(self) -> KVFormat: ...

    def run(self, plan: StepPlan) -> list[Sampled]:
        """Compute the plan's slices; the outcome of those that sample, in the plan's order.

        As soon as a layer's KV of all slices is stored, the `outlet` of each slice's sequence that has one hears
        `layer_ready`, while the rest is still computed. Raises where the whole step failed; what fails for one slice
        alone is its outcome.
        """
        ...

    def copy_block(self, source: int, target: int, tokens: int) -> None:
        """Copy the KV of the first `tokens` tokens of a block into another one, in all layers."""
        ...

    def sequence_kv(self, sequence: Sequence) -> SequenceKV:
        """A view of the KV in the blocks that the sequence has now. Valid while it holds them."""
        ...
