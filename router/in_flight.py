"""What the router knows of an output while it is served. Values and their rules; `router.dispatch` decides."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from pdserve.types import Owner
from router.actions import Request, ResumeState
from router.suspicion import Suspicion


class AttemptPhase(Enum):
    PLACING = "placing"
    TICKET = "ticket"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True)
class Attempt:
    """Workers are named as long as they hold something for it."""

    owner: Owner
    decode: str | None
    prefill: str | None = None
    epoch: int = 0  # of the latest ticket
    shares: bool = False  # its prompt's KV is another output's

    def workers(self) -> list[str]:
        return [worker for worker in (self.decode, self.prefill) if worker is not None]


@dataclass(slots=True)
class _Prompt:
    """What the outputs of a request have in common."""

    fingerprint: str | None = None


@dataclass(slots=True)
class InFlight:
    """One output of a request."""

    request: Request
    output: int
    prompt: _Prompt
    phase: AttemptPhase = AttemptPhase.PLACING
    deadline: float | None = None
    attempt: Attempt | None = None
    attempts: int = 0
    fruitless: int = 0  # attempts in a row that brought no token
    unplaced_since: float | None = None  # no worker was there for it, or every one was full
    output_ids: list[int] = field(default_factory=list)
    suspicion: Suspicion = field(default_factory=Suspicion)
    avoid: set[str] = field(default_factory=set)
    eos_token_ids: tuple[int, ...] = ()
    output_fingerprint: str | None = None
    exact: bool = True
    told: ResumeState = field(default_factory=ResumeState)  # what the client knows of it

    @property
    def resume_state(self) -> ResumeState:
        return ResumeState(
            self.prompt.fingerprint or "",
            self.output_fingerprint or "",
            self.exact,
            self.suspicion.crashes,
            self.suspicion.output_count,
        )

    @property
    def alone(self) -> bool:
        """It may crash who computes it: one worker shall do everything, with no other such request beside it."""
        return self.suspicion.isolated

    @property
    def recovering(self) -> bool:
        """A later attempt is being made and has brought no token yet."""
        return self.attempts > 1 and self.phase in (AttemptPhase.TICKET, AttemptPhase.PREFILL)

    # The first worker to compute a range decides its fingerprint; another one's makes the stream inexact.

    def prompt_computed_by(self, fingerprint: str) -> None:
        """Such a worker computes the KV of the prompt and of what was accepted of the output."""
        self.prompt.fingerprint = self.prompt.fingerprint or fingerprint
        of_output = self.output_fingerprint if self.output_ids else fingerprint
        if fingerprint != self.prompt.fingerprint or fingerprint != of_output:
            self.exact = False

    def output_computed_by(self, fingerprint: str) -> None:
        """Such a worker computes what comes next of the output."""
        self.output_fingerprint = self.output_fingerprint or fingerprint
        if fingerprint != self.output_fingerprint:
            self.exact = False


def entries_of(request: Request) -> list[InFlight]:
    """The outputs of a request, as they stand."""
    states = request.resume_states or (ResumeState(),) * request.n
    known = next((state.prompt_fingerprint for state in states if state.prompt_fingerprint), None)
    prompt = _Prompt(known)
    entries: list[InFlight] = []
    for output, (ids, state) in enumerate(zip(request.received_ids, states, strict=True)):
        suspicion = Suspicion(state.crashes, state.crashed_at)
        suspicion.progressed(len(ids))
        entry = InFlight(request, output, prompt, output_ids=list(ids), suspicion=suspicion, exact=state.exact)
        entry.output_fingerprint = state.output_fingerprint or None
        entry.told = entry.resume_state
        entries.append(entry)
    return entries
