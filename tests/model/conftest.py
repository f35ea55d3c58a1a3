from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.steps import torch_threads


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny products gain nothing from threads, and lose much where another process wants the cores."""
    with torch_threads(1):
        yield
