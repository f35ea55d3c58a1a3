"""The seeds of a simulation's test. A failure says how to replay the one it came under (see conftest.py)."""

from __future__ import annotations

from collections.abc import Iterator


class Seeds:
    """All that a test asks for, or the one of --seed alone. `current`: the one being run."""

    def __init__(self, only: int | None) -> None:
        self.current: int | None = None
        self._only = only

    @property
    def all(self) -> bool:
        """Whether the test sees every seed, so that it may ask what they showed together."""
        return self._only is None

    def __call__(self, count: int) -> Iterator[int]:
        """The seeds 0 to count - 1, one after the other."""
        for seed in range(count) if self._only is None else (self._only,):
            self.current = seed
            yield seed
        self.current = None
