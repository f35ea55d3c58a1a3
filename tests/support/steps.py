"""Builds the batches of forward passes in tests, without an engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kernels.ops import SequenceRows, StepBatch


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence's rows in a step: `tokens` stand at positions start, start + 1, ..."""

    tokens: Sequence[int]
    start: int
    blocks: torch.Tensor


def slots_of(blocks: torch.Tensor, positions: torch.Tensor, block_tokens: int) -> torch.Tensor:
    """The slots of a sequence's positions."""
    return blocks[positions // block_tokens] * block_tokens + positions % block_tokens


def step(*parts: Part, block_tokens: int) -> StepBatch:
    """A step over `parts`, in this order, that wants the logits of every row."""
    sequences, positions, slots, row = [], [], [], 0
    for part in parts:
        sequences.append(SequenceRows(row, len(part.tokens), part.start, part.blocks))
        positions.append(torch.arange(part.start, part.start + len(part.tokens)))
        slots.append(slots_of(part.blocks, positions[-1], block_tokens))
        row += len(part.tokens)
    token_ids = torch.tensor([token for part in parts for token in part.tokens])
    return StepBatch(token_ids, torch.cat(positions), torch.cat(slots), tuple(sequences), torch.arange(row))


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use `count` threads, and then as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
