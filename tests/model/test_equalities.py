"""The decoder's bits: K, V and logits at a position are the same however it is reached."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import Kernels
from kernels.ops import StepBatch, slots_of
from model.decoder import Decoder
from support.checkpoints import Family, TinyShape, write_tiny_checkpoint
from support.steps import Chunk, step

LENGTH = 300  # more than one tile of attention
PROMPT = torch.randint(0, 257, (LENGTH,), generator=torch.Generator().manual_seed(9)).tolist()
DTYPES = [torch.float32, torch.bfloat16]


def load(kernels: Kernels, directory: Path, dtype: torch.dtype, family: Family = "qwen3") -> Decoder:
    # Three query heads a group, a head size that is not hidden size / heads, no dimension a multiple of 16.
    shape = TinyShape(hidden_size=72, intermediate_size=100, heads=6, kv_heads=2, head_dim=20)
    return Decoder.load(write_tiny_checkpoint(directory, family, shape=shape), kernels, dtype)


class Sequences:
    """A decoder's cache, NaN wherever nothing has been written, for sequences of up to LENGTH tokens."""

    def __init__(self, decoder: Decoder, *, block_tokens: int = 32, count: int = 1) -> None:
        self.decoder = decoder
        self.block_tokens = block_tokens
        per_sequence = -(-LENGTH // block_tokens)
        shape = decoder.cache_shape(per_sequence * count + 2, block_tokens)
        self.cache: Any = decoder.kernels.make_cache(shape)
        slots = torch.arange(shape.block_count * block_tokens)
        poison = torch.full((len(slots), shape.kv_heads, shape.head_dim), float("nan"), dtype=shape.dtype)
        for layer in range(shape.layer_count):
            decoder.kernels.write_kv(self.cache, layer, slots, poison, poison)
        order = torch.randperm(shape.block_count, generator=torch.Generator().manual_seed(block_tokens))
        self.blocks = order[: per_sequence * count].view(count, per_sequence).tolist()

    def chunk(self, start: int, stop: int, sequence: int = 0, prompt: Sequence[int] = PROMPT) -> Chunk:
        return Chunk(prompt[start:stop], start, self.blocks[sequence])

    def forward(self, *chunks: Chunk) -> torch.Tensor:
        return self.decoder.forward(step(*chunks), self.cache)

    def kv(self, start: int, stop: int, sequence: int = 0) -> torch.Tensor:
        """[layer, 2, tokens, Hkv, D]."""
        slots = slots_of(self.blocks[sequence], start, stop - start, self.block_tokens)
        layers = range(self.decoder.config.layer_count)
        return torch.stack([self.decoder.kernels.read_kv(self.cache, layer, slots) for layer in layers])


def whole(decoder: Decoder, prompt: Sequence[int] = PROMPT) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and KV of a prefill in one pass."""
    sequences = Sequences(decoder)
    logits = sequences.forward(sequences.chunk(0, LENGTH, prompt=prompt))
    return logits, sequences.kv(0, LENGTH)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [1, 7, 64, 133])
def test_chunks_give_the_bits_of_the_whole_prompt(
    kernels: Kernels, tmp_path: Path, chunk: int, dtype: torch.dtype
) -> None:
    decoder = load(kernels, tmp_path, dtype)
    wanted, wanted_kv = whole(decoder)
    sequences = Sequences(decoder)
    for start in range(0, LENGTH, chunk):
        stop = min(start + chunk, LENGTH)
        logits = sequences.forward(sequences.chunk(start, stop))
        assert torch.equal(logits, wanted[start:stop]), f"logits of [{start}, {stop})"
    assert torch.equal(sequences.kv(0, LENGTH), wanted_kv)


@pytest.mark.parametrize("block_tokens", [1, 16])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_neither_block_size_nor_threads_show(kernels: Kernels, tmp_path: Path, block_tokens: int, threads: int) -> None:
    decoder = load(kernels, tmp_path, torch.float32)
    wanted, wanted_kv = whole(decoder)
    sequences = Sequences(decoder, block_tokens=block_tokens)
    kernels.set_threads(threads)
    logits = sequences.forward(sequences.chunk(0, 290))
    decoded = [sequences.forward(sequences.chunk(p, p + 1)) for p in range(290, LENGTH)]
    assert torch.equal(torch.cat([logits, *decoded]), wanted)
    assert torch.equal(sequences.kv(0, LENGTH), wanted_kv)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_sequence_in_a_mixed_batch_has_the_bits_it_has_alone(
    kernels: Kernels, tmp_path: Path, family: Family, dtype: torch.dtype
) -> None:
    decoder = load(kernels, tmp_path, dtype, family)
    ranges = [(299, 300), (0, 40), (255, 257), (256, 257), (70, 203), (0, 1)]
    prompts = [PROMPT[index:] + PROMPT[:index] for index in range(len(ranges))]
    sequences = Sequences(decoder, count=len(ranges))
    for index, (start, _) in enumerate(ranges):
        if start:
            sequences.forward(sequences.chunk(0, start, index, prompts[index]))
    mixed = sequences.forward(
        *(sequences.chunk(start, stop, index, prompts[index]) for index, (start, stop) in enumerate(ranges))
    )
    row = 0
    for index, (start, stop) in enumerate(ranges):
        logits, kv = whole(decoder, prompts[index])
        assert torch.equal(mixed[row : row + stop - start], logits[start:stop]), f"[{start}, {stop})"
        assert torch.equal(sequences.kv(0, stop, index), kv[:, :, :stop])
        row += stop - start


def test_only_the_wanted_rows_have_logits(kernels: Kernels, tmp_path: Path) -> None:
    decoder = load(kernels, tmp_path, torch.float32)
    sequences = Sequences(decoder)
    wanted = sequences.forward(sequences.chunk(0, 50))
    batch = step(sequences.chunk(0, 50))
    for rows in ([49], [0, 7, 33], []):
        some = StepBatch(batch.token_ids, batch.sequences, rows)
        assert torch.equal(decoder.forward(some, sequences.cache), wanted[rows])


def test_a_layer_is_announced_when_its_kv_is_complete_and_before_the_next(kernels: Kernels, tmp_path: Path) -> None:
    decoder = load(kernels, tmp_path, torch.float32)
    _, wanted = whole(decoder)
    sequences = Sequences(decoder)
    heard: list[tuple[int, bool, bool]] = []

    def after_layer(layer: int) -> None:
        kv = sequences.kv(0, LENGTH)
        later_untouched = bool(kv[layer + 1 :].isnan().all())
        heard.append((layer, torch.equal(kv[layer], wanted[layer]), later_untouched))

    batch = step(sequences.chunk(0, LENGTH))
    decoder.forward(batch, sequences.cache, after_layer)
    assert heard == [(0, True, True), (1, True, True)]


def test_logits_that_are_not_finite_harm_no_other_row(kernels: Kernels, tmp_path: Path) -> None:
    sequences = Sequences(load(kernels, tmp_path, torch.float32), count=2)
    sequences.forward(sequences.chunk(0, 8), sequences.chunk(0, 4, 1))
    slot = torch.tensor([32 * sequences.blocks[1][0]])
    poison = torch.full((1, 2, 20), float("inf"))
    sequences.decoder.kernels.write_kv(sequences.cache, 0, slot, poison, poison)
    alone = sequences.forward(sequences.chunk(8, 10))
    both = step(sequences.chunk(8, 10), sequences.chunk(4, 6, 1))
    logits, finite = sequences.decoder.forward_checked(both, sequences.cache)
    assert finite.tolist() == [True, True, False, False]
    assert torch.equal(logits[:2], alone)
