from __future__ import annotations

import pytest

from kernels import Kernels, select


@pytest.fixture(params=["reference"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Every implementation that this machine can run: the contract is one for all."""
    return select(request.param)
