"""The machine's own limits, measured beside whatever is held against them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.cpu.memory import map_zeros
from kernels.cpu.table import CpuKernels


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine can do with so many threads.

    `read_rate`: bytes a second of the fastest plain read (prefetched, in huge pages) of a buffer as large as the
    weights. `product_rate`: floating point operations a second of a product that stays in the nearest caches.
    """

    threads: int
    read_rate: float
    product_rate: float


def measure_limits(kernels: CpuKernels, threads: int, read_bytes: int, dtype: torch.dtype) -> Limits:
    """The limits for `threads` threads; leaves `kernels` set to them."""
    kernels.set_threads(threads)
    memory = map_zeros(read_bytes).fill_(1)
    return Limits(threads, kernels.read_rate(memory), kernels.product_rate(dtype))
