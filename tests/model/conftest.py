from __future__ import annotations

from collections.abc import Iterator

import pytest

from kernels import Kernels
from support.kernels import IMPLEMENTATIONS, make_kernels
from support.steps import torch_threads


@pytest.fixture(params=IMPLEMENTATIONS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Every implementation that this machine can run: the contract is one for all."""
    return make_kernels(request.param)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny products gain nothing from threads, and lose much where another process wants the cores."""
    with torch_threads(1):
        yield
