"""Drills at the scale of the small random checkpoint, and nobody who watches."""

from __future__ import annotations

from drills.load import LoadRun, Scale
from drills.stage import Settings

SMALL = Settings(
    streams=4,
    scale=Scale(output_tokens=160, probe_words=1500, probe_tokens=30),
    request_timeout_s=15.0,
    recover_timeout_s=60.0,
)


class Quiet:
    """Progress that nobody looks at."""

    def say(self, text: str) -> None:
        pass

    def watch(self, run: LoadRun | None) -> None:
        pass
