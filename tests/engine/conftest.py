"""Checkpoints shared by the engine's tests: one of each family."""

import pytest

from support.checkpoints import TinyShape, write_tiny_checkpoint

SHAPES = {
    "llama": TinyShape(heads=3, kv_heads=1, hidden_size=48),
    "qwen2": TinyShape(heads=4, kv_heads=2),
    "qwen3": TinyShape(heads=4, kv_heads=4, head_dim=24),
}


@pytest.fixture(scope="session", params=sorted(SHAPES))
def checkpoint(request, tmp_path_factory):
    """A tiny random checkpoint; a test that asks for it runs for each family."""
    directory = tmp_path_factory.mktemp("checkpoints") / request.param
    return write_tiny_checkpoint(directory, request.param, shape=SHAPES[request.param])
