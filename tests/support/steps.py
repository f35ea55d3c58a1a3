"""Builds the batches of forward passes in tests, without an engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kernels.ops import SequenceRows, StepBatch


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence's rows in a step: `tokens` stand at positions start, start + 1, ..."""

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]


def step(*chunks: Chunk) -> StepBatch:
    """A step over `chunks`, in this order, that wants the logits of every row."""
    sequences: list[SequenceRows] = []
    token_ids: list[int] = []
    for chunk in chunks:
        sequences.append(SequenceRows(len(token_ids), len(chunk.tokens), chunk.start, chunk.blocks))
        token_ids += chunk.tokens
    return StepBatch(token_ids, tuple(sequences), range(len(token_ids)))


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use `count` threads, and then as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
