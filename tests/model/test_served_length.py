"""What a model is built with follows from what is served, and shows in no bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels import select
from model.build import build_model
from model.config import RopeConfig
from model.decoder import Decoder
from model.rotary import rotary_tables
from pdserve.config import EngineConfig
from pdserve.errors import ConfigError, InternalError
from support.checkpoints import TinyShape, write_tiny_checkpoint
from support.steps import Chunk, step

PROMISED = 4 * 2**20  # positions, as a config of a long-context model has them


@pytest.fixture(scope="module")
def long_context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("long")
    return write_tiny_checkpoint(directory, "llama", shape=TinyShape(max_position=PROMISED))


def test_rotary_tables_are_as_long_as_what_is_served(long_context: Path) -> None:
    config = EngineConfig(kv_cache_mb=1, threads=1)
    by_memory = build_model(long_context, "auto", "auto", config)
    pool_tokens = by_memory.executor.capacity.pool_tokens
    assert by_memory.max_model_len == PROMISED
    assert by_memory.executor.decoder.max_position == pool_tokens < PROMISED
    by_setting = build_model(
        long_context, "auto", "auto", EngineConfig(kv_cache_mb=1, threads=1, max_model_len=pool_tokens // 2)
    )
    assert by_setting.executor.decoder.max_position == pool_tokens // 2
    shortest = build_model(long_context, "auto", "auto", EngineConfig(kv_cache_mb=1, threads=1, max_model_len=2))
    assert by_memory.fingerprint == by_setting.fingerprint == shortest.fingerprint


@pytest.mark.parametrize(
    "rope", [RopeConfig(), RopeConfig("linear", factor=3.0), RopeConfig("llama3", 5e5, 8.0, 1.0, 4.0, 8192)]
)
def test_a_shorter_table_has_the_bits_of_a_longer_one(rope: RopeConfig) -> None:
    cos, sin = rotary_tables(rope, 64, 4099)
    for length in (1, 2, 7, 40, 1000, 4098):
        shorter = rotary_tables(rope, 64, length)
        assert torch.equal(shorter[0], cos[:length])
        assert torch.equal(shorter[1], sin[:length])


def test_a_position_beyond_the_tables_is_an_error_and_no_read(long_context: Path) -> None:
    for name in ("reference", "auto"):
        decoder = Decoder.load(long_context, select(name), torch.float32, 8)
        cache = decoder.kernels.make_cache(decoder.cache_shape(1, 16))
        decoder.forward(step(Chunk(list(range(8)), 0, [0])), cache)
        with pytest.raises(InternalError, match="position 8: 8 can be computed"):
            decoder.forward(step(Chunk([1], 8, [0])), cache)


def test_a_length_beyond_the_models_is_refused_before_its_weights_are_read(long_context: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((long_context / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=r"engine\.max_model_len = 4194305: the model was trained for 4194304"):
        build_model(tmp_path, "auto", "auto", EngineConfig(max_model_len=PROMISED + 1))
    with pytest.raises(ConfigError, match=r"engine\.kv_cache_mb = 1: holds 0 blocks"):
        build_model(tmp_path, "auto", "auto", EngineConfig(kv_cache_mb=1, block_tokens=8192))
