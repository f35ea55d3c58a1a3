"""The engine's benchmark measures what its rows say. Figures come from the command, not from here."""

from __future__ import annotations

from pathlib import Path

import torch

from bench.engine import bench_engine
from kernels.cpu.table import CpuKernels
from support.checkpoints import TinyShape, write_tiny_checkpoint


def test_rows_name_each_batch_and_share_of_the_machine(tmp_path: Path) -> None:
    shape = TinyShape(hidden_size=32, intermediate_size=64, layers=2, max_position=2048)
    model = write_tiny_checkpoint(tmp_path / "tiny", "llama", shape=shape)

    rows = bench_engine(model, "cpu", "bfloat16", threads=[1], under_load=True)

    assert [(row.name, row.batch, row.under_load) for row in rows] == [
        (name, batch, loaded)
        for loaded in (False, True)
        for name, batch in (("decode", 1), ("decode", 8), ("decode", 32), ("prefill", 1))
    ]
    for row in rows:
        assert row.step_ms > 0
        assert row.tokens_per_s > 0
        assert (row.bandwidth_share is not None) == (row.name == "decode" and row.batch == 1)
        assert row.outside_share is None or 0 < row.outside_share < 1


def test_the_read_limit_is_the_same_memory_at_a_plausible_rate() -> None:
    kernels = CpuKernels()
    kernels.set_threads(1)
    memory = torch.ones(64 * 2**20, dtype=torch.uint8)

    assert 1e8 < kernels.read_rate(memory, repeats=2) < 1e12
    assert kernels.product_rate(torch.float32, repeats=2) > 1e8
