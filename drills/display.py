"""What a person sees of a drill: a line that lives while it runs, then its verdict and its picture."""

from __future__ import annotations

import threading
from types import TracebackType

from rich.console import Console
from rich.status import Status as Spinner

from drills.load import LoadRun
from drills.run import Outcome
from drills.timeline import draw
from drills.verdict import Status

_REFRESH_S = 0.2
_COLOURS = {Status.PASS: "green", Status.FAIL: "red", Status.SKIPPED: "yellow"}
_FIGURES = (
    ("requests", "requests"),
    ("tokens", "tokens"),
    ("failed_over", "failed over"),
    ("lost", "lost"),
    ("repeated", "repeated"),
    ("changed", "changed"),
    ("without_terminal", "no end"),
    ("leaked_blocks", "leaked"),
    ("detection_ms", "detection ms"),
    ("stall_p50_ms", "stall p50 ms"),
    ("stall_p99_ms", "stall p99 ms"),
    ("recovery_ms", "recovery ms"),
)


class SilentProgress:
    """For programs, which read the verdicts."""

    def __enter__(self) -> SilentProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def watch(self, run: LoadRun | None) -> None:
        pass

    def pause(self) -> None:
        pass


class LiveProgress:
    """One line: what is going on, and how far the requests are."""

    def __init__(self, console: Console) -> None:
        self._spinner = Spinner("", console=console)
        self._text = ""
        self._run: LoadRun | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="drill-progress", daemon=True)

    def __enter__(self) -> LiveProgress:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self._spinner.stop()

    def say(self, text: str) -> None:
        self._text = text
        self._spinner.start()

    def watch(self, run: LoadRun | None) -> None:
        self._run = run

    def pause(self) -> None:
        """Leave the terminal to others until there is something to say again."""
        self._spinner.stop()

    def _refresh(self) -> None:
        while not self._done.wait(_REFRESH_S):
            self._spinner.update(self._text + _counts(self._run))


def _counts(run: LoadRun | None) -> str:
    if run is None:
        return ""
    live = sum(recording.live for recording in run.recordings)
    ended = sum(recording.ended_s is not None for recording in run.recordings)
    tokens = sum(recording.token_count for recording in run.recordings)
    return f": {live} streams flow, {ended} have ended, {tokens} tokens"


def print_outcome(console: Console, outcome: Outcome) -> None:
    """The verdict in words and figures, over the timeline."""
    verdict = outcome.verdict
    colour = _COLOURS[verdict.status]
    console.print(f"[bold]{verdict.drill}[/bold] [bold {colour}]{verdict.status}[/bold {colour}]", end="")
    console.print(f" in {verdict.seconds:g} s, seed {verdict.seed}" if verdict.seconds else "")
    for reason in verdict.reasons:
        console.print(f"  {reason}", style=colour, markup=False)
    if verdict.status is Status.SKIPPED:
        return
    for line in draw(outcome.picture, console.width):
        console.print(line, markup=False, soft_wrap=True)
    figures = [(title, getattr(verdict, name)) for name, title in _FIGURES]
    console.print(", ".join(f"{title} {'-' if value is None else f'{value:g}'}" for title, value in figures))
    hits = ", ".join(f"{phase} {count}" for phase, count in verdict.phase_hits.items())
    console.print(f"phases hit: {hits or '-'}")
    for name, trend in verdict.watched.items():
        console.print(f"{name}: {trend}")
    console.print()
