"""A step's plan: which tokens of which sequences one forward pass computes. A value, made by the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens [start, start + count) of a sequence. `samples`: the token after them is sampled."""

    sequence: Sequence
    start: int
    count: int
    samples: bool

    @property
    def stop(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class StepPlan:
    """`slices` in the order of their rows. `leased`: sequences that got their blocks while planning; `preempted`: those
    that lost theirs, and all KV with them."""

    slices: tuple[Slice, ...]
    leased: tuple[Sequence, ...] = ()
    preempted: tuple[Sequence, ...] = ()

    @property
    def token_count(self) -> int:
        return sum(slice_.count for slice_ in self.slices)
