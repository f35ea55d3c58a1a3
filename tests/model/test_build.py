"""An executor made from settings: its memory plan and its fingerprint follow from the KV format."""

from __future__ import annotations

from pathlib import Path

import pytest

from model.build import BuiltModel, build_model
from pdserve.config import EngineConfig
from pdserve.errors import ConfigError
from pdserve.kv_format import KVFormat


def build(directory: Path, dtype: str = "float32", **settings: int) -> BuiltModel:
    return build_model(directory, "reference", dtype, EngineConfig(**{"threads": 1, "kv_cache_mb": 1, **settings}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_as_many_blocks_as_the_memory_holds_and_no_more(llama: Path, dtype: str) -> None:
    executor = build(llama, dtype, block_tokens=24).executor
    assert executor.format.item == dtype
    block_bytes = 24 * executor.format.token_bytes
    assert executor.capacity.block_count * block_bytes <= 2**20 < (executor.capacity.block_count + 1) * block_bytes
    assert executor.capacity.pool_tokens == executor.capacity.block_count * 24


def test_memory_for_fewer_than_two_blocks_is_refused_with_what_is_needed(llama: Path) -> None:
    token_bytes = build(llama).executor.format.token_bytes
    with pytest.raises(ConfigError, match=r"holds 0 blocks of .* at least \d+ are needed"):
        build(llama, block_tokens=2**20 // token_bytes + 1)


def test_the_kv_format_is_part_of_the_fingerprint(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, again = build(llama).fingerprint, build(llama).fingerprint
    monkeypatch.setattr(KVFormat, "identity", property(lambda self: "another"))
    assert plain == again != build(llama).fingerprint
