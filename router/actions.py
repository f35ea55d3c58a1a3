"""What the attempt loop decides: a request goes in, these come out, and the router's shell carries them out."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.errors import PdserveError
from pdserve.types import Finish, Owner, SampledToken, SamplingParams, Ticket


@dataclass(frozen=True, slots=True)
class ResumeState:
    """What another router has to know of an output, beyond its tokens, to go on with it. Empty fingerprints: nobody has
    computed anything yet. `crashed_at`: how many tokens it had when the last of `crashes` workers crashed under it."""

    prompt_fingerprint: str = ""
    output_fingerprint: str = ""
    exact: bool = True
    crashes: int = 0
    crashed_at: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asked for, validated and tokenised."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    received_ids: tuple[tuple[int, ...], ...] = ((),)  # of each output, what the client has from another router
    tenant: str = "default"  # see Owner
    resume_states: tuple[ResumeState, ...] = ()  # of each output at the other router, where that is known

    @property
    def n(self) -> int:
        """How many outputs it has."""
        return len(self.received_ids)

    @property
    def resumed(self) -> bool:
        """Whether another router had it before."""
        return bool(self.resume_states)


@dataclass(frozen=True, slots=True)
class StartDecode:
    worker: str
    owner: Owner
    request: Request
    output_ids: tuple[int, ...]
    local_prefill: bool
    share: Owner | None = None  # another output, whose prompt KV at that worker it shares


@dataclass(frozen=True, slots=True)
class StartPrefill:
    worker: str
    owner: Owner
    request: Request
    output_ids: tuple[int, ...]
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class DropSender:
    """A decode worker shall not wait for the sender of this epoch any longer."""

    worker: str
    owner: Owner
    epoch: int
    error: PdserveError


@dataclass(frozen=True, slots=True)
class PrefillLocally:
    """There is no prefill worker for this decode worker's ticket."""

    worker: str
    owner: Owner


@dataclass(frozen=True, slots=True)
class Fallback:
    """For the log and the metrics: an attempt goes on without its prefill worker."""

    owner: Owner
    rung: str
    reason: str


@dataclass(frozen=True, slots=True)
class AbortAttempt:
    """A worker shall drop everything it holds for this owner."""

    worker: str
    owner: Owner


@dataclass(frozen=True, slots=True)
class Accept:
    """Tokens of an output for the client, in order, each exactly once."""

    request_id: str
    output: int
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class StateChanged:
    """An output's resume state is another one now: for the client to pass on, should it lose this router."""

    request_id: str
    output: int
    state: ResumeState


@dataclass(frozen=True, slots=True)
class Retry:
    """For the log: an attempt failed and another will be made."""

    owner: Owner
    phase: str
    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """The one terminal event of an output."""

    request_id: str
    output: int
    outcome: Finish | PdserveError
    attempts: int
    exact: bool


Action = (
    StartDecode
    | StartPrefill
    | DropSender
    | PrefillLocally
    | AbortAttempt
    | Accept
    | StateChanged
    | Fallback
    | Retry
    | End
)
StreamEvent = Accept | StateChanged | End
