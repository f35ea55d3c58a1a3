"""`pdserve bench kernels`: each operation of the CPU kernels in the embedded model's shapes.

A row's time is the median of runs that alternate with torch's, in the same dtype and in float32 (which is its faster
one on a machine without bf16 instructions), so that what else the machine does meets all. The limits are measured in
the same run with the same threads. A linear goes round copies of its weight that together are as large as the model's,
as a decode step does: otherwise a cache would hold it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListLike
from dataclasses import dataclass

import torch

from bench.machine import Limits, measure_limits
from kernels.cpu.table import CpuCache, CpuKernels
from kernels.ops import CacheShape, SequenceRows, item_of, slots_of
from pdserve.kv_format import KVFormat

HIDDEN, INTERMEDIATE, VOCABULARY = 576, 1536, 49152
HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
LINEARS = {  # [outputs, inputs]
    "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    "o": (HIDDEN, HEADS * HEAD_DIM),
    "gate_up": (2 * INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
    "head": (VOCABULARY, HIDDEN),
}
LINEAR_ROWS = (1, 8, 32, 128, 512)
HEAD_ROWS = (1, 8, 32)
PREFILL_TOKENS = (1024, 4096)
DECODE_CONTEXT, DECODE_BATCHES = 512, (1, 32)
BLOCK_TOKENS = 32
MODEL_BYTES = 269_000_000
RUNS = 11

Measured = Callable[[], object]


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One operation in one shape. `spread_ms`: the fastest and the slowest run. `torch_ratio`: torch's time by ours, in
    the same dtype; `torch_float32_ratio`: in float32."""

    name: str
    shape: str
    threads: int
    time_ms: float
    spread_ms: tuple[float, float]
    gb_per_s: float
    bandwidth_share: float
    gflop_per_s: float
    peak_share: float
    torch_ratio: float
    torch_float32_ratio: float


def bench_kernels(threads: ListLike[int] = (1, 2), dtype: torch.dtype = torch.bfloat16) -> list[KernelRow]:
    """All rows for each thread count. Raises ConfigError where the CPU kernels are not built."""
    kernels = CpuKernels()
    rows: list[KernelRow] = []
    for count in threads:
        torch.set_num_threads(count)
        limits = measure_limits(kernels, count, MODEL_BYTES, dtype)
        for name in LINEARS:
            rows += _linear(kernels, limits, name, dtype)
        rows += [_prefill_attention(kernels, limits, tokens, dtype) for tokens in PREFILL_TOKENS]
        rows += [_decode_attention(kernels, limits, batch, dtype) for batch in DECODE_BATCHES]
        rows += _pointwise(kernels, limits)
    return rows


def _linear(kernels: CpuKernels, limits: Limits, name: str, dtype: torch.dtype) -> Iterator[KernelRow]:
    outputs, inputs = LINEARS[name]
    weight = torch.randn(outputs, inputs).to(dtype)
    copies = max(1, MODEL_BYTES // weight.nbytes)
    packed = [kernels.pack(weight, None) for _ in range(copies)]
    theirs = [weight.clone() for _ in range(copies)]
    theirs_float32 = [weight.float() for _ in range(max(1, copies // 2))]  # twice the bytes each
    for rows in HEAD_ROWS if name == "head" else LINEAR_ROWS:
        x = torch.randn(rows, inputs)
        ours = _around(packed, x, kernels.linear)
        torchs = (
            _around(theirs, x.to(dtype), torch.nn.functional.linear),
            _around(theirs_float32, x, torch.nn.functional.linear),
        )
        moved = packed[0].nbytes + x.nbytes + rows * outputs * 4
        yield _row(
            limits, "linear " + name, f"{rows} x {inputs} x {outputs}", ours, torchs, moved, 2.0 * rows * weight.numel()
        )


def _around(weights: list, x: torch.Tensor, product: Callable) -> Measured:
    """Multiply with the next weight at each call."""
    state = {"next": 0}

    def call() -> object:
        state["next"] = (state["next"] + 1) % len(weights)
        return product(x, weights[state["next"]])

    return call


def _prefill_attention(kernels: CpuKernels, limits: Limits, tokens: int, dtype: torch.dtype) -> KernelRow:
    cache, sequences = _filled_cache(kernels, 1, tokens, dtype, rows=tokens)
    q, k, v = torch.randn(tokens, HEADS, HEAD_DIM), *_keys_and_values(1, tokens)
    theirs = [tensor.transpose(0, 1).unsqueeze(0).contiguous() for tensor in (q, k[0], v[0])]
    return _row(
        limits,
        "attention prefill",
        f"{tokens} tokens",
        lambda: kernels.attention(q, cache, 0, sequences, HEAD_DIM**-0.5),
        (_torch_attention(theirs, dtype, is_causal=True), _torch_attention(theirs, torch.float32, is_causal=True)),
        _kv_format(dtype).payload_bytes(tokens) + 2 * q.nbytes,
        2.0 * HEADS * HEAD_DIM * tokens * (tokens + 1),
    )


def _decode_attention(kernels: CpuKernels, limits: Limits, batch: int, dtype: torch.dtype) -> KernelRow:
    cache, sequences = _filled_cache(kernels, batch, DECODE_CONTEXT, dtype, rows=1)
    q, (k, v) = torch.randn(batch, HEADS, HEAD_DIM), _keys_and_values(batch, DECODE_CONTEXT)
    theirs = [q.unsqueeze(2), k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()]
    return _row(
        limits,
        "attention decode",
        f"{batch} at {DECODE_CONTEXT}",
        lambda: kernels.attention(q, cache, 0, sequences, HEAD_DIM**-0.5),
        (_torch_attention(theirs, dtype, is_causal=False), _torch_attention(theirs, torch.float32, is_causal=False)),
        _kv_format(dtype).payload_bytes(batch * DECODE_CONTEXT) + 2 * q.nbytes,
        4.0 * batch * HEADS * HEAD_DIM * DECODE_CONTEXT,
    )


def _torch_attention(tensors: list[torch.Tensor], dtype: torch.dtype, is_causal: bool) -> Measured:
    q, k, v = (tensor.to(dtype) for tensor in tensors)
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)


def _kv_format(dtype: torch.dtype) -> KVFormat:
    return KVFormat(1, KV_HEADS, HEAD_DIM, item_of(dtype))


def _keys_and_values(batch: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, tokens, KV_HEADS, HEAD_DIM), torch.randn(batch, tokens, KV_HEADS, HEAD_DIM)


def _filled_cache(
    kernels: CpuKernels, batch: int, tokens: int, dtype: torch.dtype, rows: int
) -> tuple[CpuCache, tuple[SequenceRows, ...]]:
    """A cache with `batch` sequences of `tokens`, and a step over the last `rows` of each."""
    blocks = -(-tokens // BLOCK_TOKENS)
    cache = kernels.make_cache(CacheShape(_kv_format(dtype), batch * blocks, BLOCK_TOKENS))
    sequences = []
    for index in range(batch):
        table = range(index * blocks, (index + 1) * blocks)
        k, v = _keys_and_values(1, tokens)
        kernels.write_kv(cache, 0, slots_of(table, 0, tokens, BLOCK_TOKENS), k[0], v[0])
        sequences.append(SequenceRows(index * rows, rows, tokens - rows, table))
    return cache, tuple(sequences)


def _pointwise(kernels: CpuKernels, limits: Limits) -> Iterator[KernelRow]:
    rows = 512
    x, gate_up = torch.randn(rows, HIDDEN), torch.randn(rows, 2 * INTERMEDIATE)
    weight = torch.ones(HIDDEN)

    def torch_silu_mul() -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def torch_norm() -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (HIDDEN,), weight, 1e-5)

    yield _row(
        limits,
        "rms_norm",
        f"{rows} x {HIDDEN}",
        lambda: kernels.rms_norm(x, weight, 1e-5),
        (torch_norm, torch_norm),  # activations are float32 everywhere
        2 * x.nbytes,
        4.0 * x.numel(),
    )
    yield _row(
        limits,
        "silu_mul",
        f"{rows} x {INTERMEDIATE}",
        lambda: kernels.silu_mul(gate_up),
        (torch_silu_mul, torch_silu_mul),
        gate_up.nbytes * 3 // 2,
        10.0 * rows * INTERMEDIATE,
    )


def _row(
    limits: Limits,
    name: str,
    shape: str,
    ours: Measured,
    torchs: tuple[Measured, Measured],
    moved_bytes: int,
    operations: float,
) -> KernelRow:
    times, same, float32 = _alternate((ours, *torchs))
    median = statistics.median(times)
    return KernelRow(
        name=name,
        shape=shape,
        threads=limits.threads,
        time_ms=median * 1e3,
        spread_ms=(min(times) * 1e3, max(times) * 1e3),
        gb_per_s=moved_bytes / median / 1e9,
        bandwidth_share=moved_bytes / median / limits.read_rate,
        gflop_per_s=operations / median / 1e9,
        peak_share=operations / median / limits.product_rate,
        torch_ratio=statistics.median(same) / median,
        torch_float32_ratio=statistics.median(float32) / median,
    )


def _alternate(calls: tuple[Measured, ...]) -> list[list[float]]:
    """Seconds of RUNS runs of each, taking turns, after one of each that is not counted."""
    times: list[list[float]] = [[] for _ in calls]
    for run in range(RUNS + 1):
        for call, seconds in zip(calls, times, strict=True):
            began = time.perf_counter()
            call()
            if run:
                seconds.append(time.perf_counter() - began)
    return times
