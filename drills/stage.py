"""One drill's course: rounds of load with faults in them, and the evidence that they leave.

A round: everything is ready -> the undisturbed answers, one request at a time -> the same requests all at once, with
the faults -> every request has ended -> everything is ready again, nothing in flight -> what leaked.

Answers to equal requests are equal on any cluster of the model, so undisturbed ones are kept for later rounds.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from drills.arena import Arena
from drills.faults import Injected, Injector
from drills.load import Ask, LoadRun, Output, Recording, Scale
from drills.verdict import Answer, Evidence, Exchange
from pdserve.client import Client, Result
from pdserve.errors import DeadlineExceeded

_STALL_REACH_S = 3.0  # a wait that begins so long after a fault still belongs to it


@dataclass(frozen=True, slots=True)
class Settings:
    """How drills are held."""

    seed: int = 0
    duration_s: float = 60.0  # of drills that go on for as long as one likes
    streams: int = 5  # at once, beside the one that faults are aimed at
    scale: Scale = field(default_factory=Scale)
    request_timeout_s: float = 60.0
    recover_timeout_s: float = 60.0
    quiet_timeout_s: float = 10.0


class Progress(Protocol):
    """Whoever watches."""

    def say(self, text: str) -> None: ...

    def watch(self, run: LoadRun | None) -> None: ...


class References:
    """Undisturbed answers, kept by request."""

    def __init__(self) -> None:
        self._results: dict[str, Result] = {}

    def get(self, ask: Ask) -> Result:
        return self._results[ask.key]

    def fill(self, addresses: Sequence[str], asks: Iterable[Ask], timeout_s: float) -> None:
        """Ask for what is missing, one request at a time. Raises PdserveError."""
        with Client(addresses) as client:
            for ask in asks:
                if ask.key not in self._results:
                    self._results[ask.key] = client.complete(ask.prompt, timeout_s=timeout_s, **ask.options)


@dataclass(frozen=True, slots=True)
class Round:
    """A round in progress, for whoever injects its faults."""

    title: str
    run: LoadRun
    injector: Injector

    def missed(self, aimed: Iterable[Injected]) -> bool:
        """Afterwards: none of these faults hit its phase and no request failed, so another round may show more."""
        hit = any(injected.hit for injected in aimed)
        return not hit and not any(recording.error for recording in self.run.recordings)


class Stage:
    """Where a drill is held; collects its evidence."""

    def __init__(self, name: str, arena: Arena, settings: Settings, references: References, progress: Progress) -> None:
        self.arena = arena
        self.settings = settings
        self.progress = progress
        self.rounds: list[Round] = []
        self.recordings: list[Recording] = []
        self.problems: list[str] = []
        self.watched: dict[str, str] = {}
        self.begin_s = time.monotonic()
        self._references = references
        self._leaked = 0
        self._tag = f"{name}-{secrets.token_hex(3)}"

    def play(
        self, title: str, asks: Sequence[Ask], disturb: Callable[[Round], None], at_once: int | None = None
    ) -> Round:
        """One round. `disturb` injects its faults while the load runs, and returns when it has. `at_once` is as for
        LoadRun."""
        if not self.arena.wait_ready(self.settings.recover_timeout_s):
            self.problems.append(f"not every worker was ready before the round {title!r}")
        self.progress.say(f"{title}: the undisturbed answers")
        self._references.fill(self.arena.addresses, asks, self.settings.request_timeout_s)
        self.progress.say(title)
        tag = f"{self._tag}-{len(self.rounds) + 1}"
        run = LoadRun(self.arena.addresses, asks, tag, self.settings.request_timeout_s, at_once)
        self.progress.watch(run)
        with Injector(self.arena) as injector:
            round_ = Round(title, run, injector)
            self.rounds.append(round_)
            run.start()
            try:
                disturb(round_)
            finally:
                self.recordings += run.wait()
            injector.thaw()
            self._recover(title, injector)
        self.progress.watch(None)
        return round_

    @property
    def injected(self) -> list[Injected]:
        return [injected for round_ in self.rounds for injected in round_.injector.injected]

    def evidence(self) -> Evidence:
        moved = self.arena.moved_requests()
        return Evidence(
            exchanges=tuple(self._exchange(recording, moved) for recording in self.recordings),
            marks=tuple(injected.mark() for injected in self.injected),
            leaked_blocks=self._leaked,
            problems=tuple(self.problems),
            watched=self.watched,
        )

    def failed_over(self, recording: Recording, moved: frozenset[str] | None = None) -> bool:
        """Whether the request went on elsewhere: at another worker, router or sender. `moved`: the ids that the logs
        tell of, where they have been read already."""
        result = recording.result
        if result is not None and (result.attempts > 1 or result.resumptions > 0):
            return True
        return recording.request_id in (self.arena.moved_requests() if moved is None else moved)

    def _recover(self, title: str, injector: Injector) -> None:
        self.progress.say(f"{title}: recovering")
        if not self.arena.wait_ready(self.settings.recover_timeout_s):
            self.problems.append(f"not everything was back {self.settings.recover_timeout_s:g} s after {title!r}")
        self._leaked += self.arena.wait_quiet(self.settings.quiet_timeout_s)
        injector.settle()

    def _exchange(self, recording: Recording, moved: frozenset[str]) -> Exchange:
        reference = self._references.get(recording.ask)
        failed_over = self.failed_over(recording, moved)
        error = recording.error
        return Exchange(
            request_id=recording.request_id,
            wish=recording.ask.wish,
            expected=_answers(reference),
            received=_answers_of(recording),
            terminal=_terminal(recording),
            error_code=None if error is None else error.code,
            error="" if error is None else str(error),
            exact=recording.result is None or recording.result.exact,
            failed_over=failed_over,
            stalls_s=tuple(self._stalls(recording, reference)) if failed_over else (),
        )

    def _stalls(self, recording: Recording, reference: Result) -> list[float]:
        """For each output, its longest wait for tokens that a fault fell into. The wait for the first token is a stall
        by as much as it is longer than undisturbed."""
        times = [injected.at_s for injected in self.injected]
        stalls = []
        for output in recording.outputs.values():
            arrivals = [recording.started_s, *(at_s for at_s, _ in output.arrivals)]
            waits = [
                (later - earlier) - (0.0 if index else (reference.ttft_ms or 0.0) / 1e3)
                for index, (earlier, later) in enumerate(itertools.pairwise(arrivals))
                if any(earlier - _STALL_REACH_S < at_s < later for at_s in times)
            ]
            if waits:
                stalls.append(max(0.0, *waits))
        return stalls


def _answers(result: Result) -> tuple[Answer, ...]:
    """Each output; the request's usage belongs to all of them."""
    usage = (result.usage.prompt_tokens, result.usage.completion_tokens)
    return tuple(
        Answer(each.token_ids, each.text, each.logprobs, (each.finish_reason.value, each.stop, *usage))
        for each in result.outputs
    )


def _answers_of(recording: Recording) -> tuple[Answer, ...]:
    if recording.result is not None:
        return _answers(recording.result)
    count = 1 + max(recording.outputs, default=-1)
    outputs = [recording.outputs.get(index, Output()) for index in range(count)]
    return tuple(Answer(tuple(output.token_ids), output.text, tuple(output.logprobs)) for output in outputs)


def _terminal(recording: Recording) -> bool:
    """A deadline that the client had to keep itself is nobody's terminal event."""
    error = recording.error
    return recording.result is not None or (error is not None and not isinstance(error, DeadlineExceeded))
