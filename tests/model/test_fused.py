"""The pass in one native call has the bits of the pass over the table's operations, for every shape of decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import CacheShape, Kernels
from kernels.ops import slots_of
from model.decoder import Decoder
from support.checkpoints import Family, TinyShape, write_tiny_checkpoint
from support.kernels import make_kernels, make_stalling
from support.steps import Chunk, step

LENGTH = 700  # two whole segments of attention and a part of one
PROMPT = torch.randint(0, 257, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()
MORE_THREADS = {250: 2, 265: 1, 505: 3, 520: 1}  # from which decode step on, so many
DTYPES = [torch.float32, torch.bfloat16]
CPU = ["cpu-portable", "cpu-avx2", "cpu-avx512", "cpu-amx"]


@dataclass(frozen=True, slots=True)
class Variation:
    family: Family
    shape: TinyShape
    tied: bool = False


VARIATIONS = {
    "llama, three query heads a group, tied": Variation(
        "llama", TinyShape(hidden_size=96, heads=6, kv_heads=2, intermediate_size=128), tied=True
    ),
    "llama, no groups, attention bias": Variation("llama", TinyShape(kv_heads=4, attention_bias=True)),
    "llama, odd sizes": Variation("llama", TinyShape(hidden_size=72, intermediate_size=100, heads=6, head_dim=20)),
    "qwen2, one group of four": Variation("qwen2", TinyShape(kv_heads=1, head_dim=64)),
    "qwen3, head size 80": Variation("qwen3", TinyShape(head_dim=80), tied=True),
    "qwen3, head size 128": Variation("qwen3", TinyShape(head_dim=128, heads=2, kv_heads=1)),
}


def load(kernels: Kernels, directory: Path, name: str, dtype: torch.dtype) -> Decoder:
    variation = VARIATIONS[name]
    write_tiny_checkpoint(directory, variation.family, tied=variation.tied, shape=variation.shape)
    return Decoder.load(directory, kernels, dtype)


def poisoned_cache(decoder: Decoder, block_count: int, block_tokens: int) -> Any:
    """A cache that holds NaN in every slot."""
    shape: CacheShape = decoder.cache_shape(block_count, block_tokens)
    cache, slots = decoder.kernels.make_cache(shape), torch.arange(block_count * block_tokens)
    poison = torch.full((len(slots), shape.kv_heads, shape.head_dim), float("nan"))
    for layer in range(shape.layer_count):
        decoder.kernels.write_kv(cache, layer, slots, poison, poison)
    return cache


def kv(decoder: Decoder, cache: Any, blocks: Sequence[int], count: int) -> torch.Tensor:
    slots = slots_of(blocks, 0, count, cache.shape.block_tokens)
    return torch.stack([decoder.kernels.read_kv(cache, layer, slots) for layer in range(decoder.config.layer_count)])


@pytest.mark.parametrize("path", CPU)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", VARIATIONS)
def test_one_call_equals_the_operations_one_by_one(tmp_path: Path, path: str, dtype: torch.dtype, name: str) -> None:
    decoder = load(make_kernels(path), tmp_path, name, dtype)
    first, second = list(range(10, -1, -1)), list(range(11, 22))
    passes = [
        step(Chunk(PROMPT[:300], 0, first), Chunk(PROMPT[7:8], 0, second)),
        step(Chunk(PROMPT[300:301], 300, first), Chunk(PROMPT[8:60], 1, second)),
        step(Chunk(PROMPT[301:302], 301, first)),
    ]
    caches = [poisoned_cache(decoder, 22, 32) for _ in range(2)]
    for batch in passes:
        fused = decoder.forward(batch, caches[0])
        assert torch.equal(fused, decoder.forward_by_operations(batch, caches[1]))
        assert len(fused.unique()) > 100, "a constant result would prove nothing"
    for blocks, count in ((first, 302), (second, 53)):
        assert torch.equal(kv(decoder, caches[0], blocks, count), kv(decoder, caches[1], blocks, count))


@pytest.mark.parametrize("path", CPU)
@pytest.mark.parametrize(
    ("dtype", "block_tokens"), [(torch.float32, 32), (torch.bfloat16, 32), (torch.bfloat16, 16), (torch.bfloat16, 40)]
)
def test_seven_hundred_decode_steps_give_the_bits_of_one_prefill(
    tmp_path: Path, path: str, dtype: torch.dtype, block_tokens: int
) -> None:
    kernels = make_kernels(path)
    decoder = load(kernels, tmp_path, "llama, three query heads a group, tied", dtype)
    count = -(-LENGTH // block_tokens)
    whole = poisoned_cache(decoder, 22, 32)
    wanted = decoder.forward(step(Chunk(PROMPT, 0, range(22))), whole)
    cache, blocks = poisoned_cache(decoder, count, block_tokens), list(range(count))[::-1]
    for position in range(LENGTH):
        if position in MORE_THREADS:
            kernels.set_threads(MORE_THREADS[position])
        logits = decoder.forward(step(Chunk(PROMPT[position : position + 1], position, blocks)), cache)
        assert torch.equal(logits, wanted[position : position + 1]), f"position {position}"
    assert torch.equal(kv(decoder, cache, blocks, LENGTH), kv(decoder, whole, range(22), LENGTH))


@pytest.mark.parametrize("name", ["llama, three query heads a group, tied", "llama, odd sizes"])
def test_a_thread_that_stops_in_its_work_is_overtaken_without_a_trace(tmp_path: Path, name: str) -> None:
    """Others compute its pieces again and go on; what it makes later of memory that has changed must not show."""
    kernels = make_stalling()
    decoder = load(kernels, tmp_path, name, torch.bfloat16)
    results = []
    for threads in (1, 3):
        kernels.set_threads(threads)
        cache = poisoned_cache(decoder, 22, 32)
        logits = [decoder.forward(step(Chunk(PROMPT[:290], 0, range(22))), cache)]
        for position in range(290, 330, 2):
            batch = step(Chunk(PROMPT[position : position + 2], position, range(22)))
            logits.append(decoder.forward(batch, cache))
        results.append((torch.cat(logits), kv(decoder, cache, range(22), 330)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("path", CPU)
def test_what_a_layers_listener_raises_ends_the_pass_and_comes_out(tmp_path: Path, path: str) -> None:
    kernels = make_kernels(path)
    kernels.set_threads(2)
    decoder = load(kernels, tmp_path, "qwen2, one group of four", torch.bfloat16)
    cache, heard = decoder.kernels.make_cache(decoder.cache_shape(2, 32)), []

    def after_layer(layer: int) -> None:
        heard.append(layer)
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        decoder.forward(step(Chunk(PROMPT[:9], 0, [0, 1])), cache, after_layer)
    assert heard == [0]
    assert decoder.forward(step(Chunk(PROMPT[:9], 0, [0, 1])), cache).isfinite().all(), "the next pass is not harmed"


@pytest.mark.parametrize("path", CPU)
def test_the_float32_bits_are_the_same_on_every_path(tmp_path: Path, path: str) -> None:
    portable, other = (
        load(make_kernels(name), tmp_path / name, "llama, odd sizes", torch.float32) for name in ("cpu-portable", path)
    )
    batch = step(Chunk(PROMPT[:300], 0, range(10)))
    results = [each.forward(batch, poisoned_cache(each, 10, 32)) for each in (portable, other)]
    assert torch.equal(*results)


def test_one_call_tells_which_rows_are_not_finite(tmp_path: Path) -> None:
    decoder = load(make_kernels("cpu-portable"), tmp_path, "llama, odd sizes", torch.bfloat16)
    cache = poisoned_cache(decoder, 2, 32)
    _, finite = decoder.forward_checked(step(Chunk([5], 0, [0]), Chunk([5, 6], 3, [1])), cache)
    assert finite.tolist() == [True, False, False]
