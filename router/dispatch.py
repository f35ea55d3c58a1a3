"""The attempt loop: serves every request by attempts until it has ended. Pure: events in, actions out.

It owns a request from `submit` to its `End` action. What it knows of an attempt:

    PLACING ──pair chosen──► TICKET ──Ticket──► PREFILL ──first token──► DECODE ──Terminal──► End
       ▲                       │                   │                       │
       └───────────────────────┴───────────────────┴───────────────────────┘
        a worker of the attempt is lost, fails it, or lets a deadline pass: its leases are aborted, and the next attempt
        goes on from the tokens already accepted

A token is accepted once: when it comes from the decode worker of the current attempt, at the next output position.
Everything that an older attempt still says is fenced off by its owner. With `local_prefill` the decode worker computes
the prompt itself, and TICKET is skipped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from pdserve.config import RouterConfig
from pdserve.errors import (
    AlreadyExists,
    Cancelled,
    PdserveError,
    ProtocolError,
    ResourceExhausted,
    TransferError,
    Unavailable,
)
from pdserve.types import Finish, Owner, SampledToken, SamplingParams, Ticket
from router.membership import Membership
from router.policies import Candidate, Policy, Wish


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asked for, validated and tokenised."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    tenant: str = "default"


@dataclass(frozen=True, slots=True)
class StartDecode:
    worker: str
    owner: Owner
    request: Request
    output_ids: tuple[int, ...]
    local_prefill: bool


@dataclass(frozen=True, slots=True)
class StartPrefill:
    worker: str
    owner: Owner
    request: Request
    output_ids: tuple[int, ...]
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Abort:
    """A worker shall drop everything it holds for this owner."""

    worker: str
    owner: Owner


@dataclass(frozen=True, slots=True)
class Accept:
    """Tokens for the client, in order, each exactly once."""

    request_id: str
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class Retry:
    """For the log: an attempt failed and another will be made."""

    owner: Owner
    phase: str
    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """The one terminal event of a request."""

    request_id: str
    outcome: Finish | PdserveError
    attempts: int
    exact: bool


Action = StartDecode | StartPrefill | Abort | Accept | Retry | End


class Phase(Enum):
    PLACING = "placing"
    TICKET = "ticket"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True)
class _Attempt:
    owner: Owner
    decode: str
    prefill: str | None
    prefill_delivered: bool = False

    def workers(self) -> list[str]:
        """The workers that still hold something for this attempt."""
        return [self.decode] if self.prefill is None or self.prefill_delivered else [self.decode, self.prefill]


@dataclass(slots=True)
class _InFlight:
    request: Request
    phase: Phase = Phase.PLACING
    deadline: float | None = None
    attempt: _Attempt | None = None
    attempts: int = 0
    output_ids: list[int] = field(default_factory=list)
    avoid: set[str] = field(default_factory=set)
    eos_token_ids: tuple[int, ...] = ()
    prompt_fingerprint: str | None = None
    output_fingerprint: str | None = None
    exact: bool = True


class Dispatch:
    """All requests of one router. `incarnation` is the router's, and fences its work against a former life's."""

    def __init__(self, incarnation: str, membership: Membership, policy: Policy, config: RouterConfig) -> None:
        self._incarnation = incarnation
        self._membership = membership
        self._policy = policy
        self._config = config
        self._requests: dict[str, _InFlight] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def assigned(self, incarnation: str) -> int:
        """How many attempts hold something at a worker."""
        return sum(1 for entry in self._requests.values() if entry.attempt and incarnation in entry.attempt.workers())

    # Events.

    def submit(self, request: Request, now: float) -> list[Action]:
        """Take a request over. Raises AlreadyExists or ResourceExhausted, and then has not taken it."""
        if request.request_id in self._requests:
            raise AlreadyExists(f"request_id: {request.request_id!r} is in flight at this router; choose another")
        if len(self._requests) >= self._config.max_requests:
            raise ResourceExhausted(f"{len(self._requests)} requests are in flight, the most this router takes")
        entry = _InFlight(request)
        self._requests[request.request_id] = entry
        return self._place(entry, now)

    def on_ticket(self, worker: str, owner: Owner, ticket: Ticket, now: float) -> list[Action]:
        entry = self._current(owner)
        if entry is None or entry.attempt is None or entry.phase is not Phase.TICKET or worker != entry.attempt.decode:
            return []
        assert entry.attempt.prefill is not None
        entry.phase = Phase.PREFILL
        entry.deadline = None
        return [StartPrefill(entry.attempt.prefill, owner, entry.request, tuple(entry.output_ids), ticket)]

    def on_tokens(
        self, worker: str, owner: Owner, first_position: int, tokens: tuple[SampledToken, ...], now: float
    ) -> list[Action]:
        entry = self._current(owner)
        if entry is None or entry.attempt is None or worker != entry.attempt.decode:
            return []
        if first_position != len(entry.output_ids):
            gap = ProtocolError(f"{worker} sent output token {first_position} where {len(entry.output_ids)} is next")
            return self._fail_attempt(entry, gap, worker, now)
        entry.phase = Phase.DECODE
        entry.attempt.prefill_delivered = True
        entry.output_ids.extend(token.token_id for token in tokens)
        return [Accept(entry.request.request_id, tokens)]

    def on_terminal(self, worker: str, owner: Owner, outcome: Finish | PdserveError | None, now: float) -> list[Action]:
        """A worker's work for an owner has ended. None: a prefill that was delivered."""
        entry = self._current(owner)
        if entry is None or entry.attempt is None:
            return []
        if isinstance(outcome, PdserveError):
            if worker == entry.attempt.prefill and entry.attempt.prefill_delivered:
                return []
            return self._fail_attempt(entry, outcome, worker, now)
        if worker == entry.attempt.decode and outcome is not None:
            entry.attempt = None
            return self._end(entry, outcome)
        if worker == entry.attempt.prefill:
            entry.attempt.prefill_delivered = True
        return []

    def on_worker_lost(self, worker: str, now: float) -> list[Action]:
        """A member has left. Attempts that still need it are made anew elsewhere."""
        actions: list[Action] = []
        for entry in list(self._requests.values()):
            if entry.attempt and worker in entry.attempt.workers():
                lost = Unavailable(f"worker {worker} was lost")
                actions += self._fail_attempt(entry, lost, worker, now)
        return actions

    def on_worker_joined(self, now: float) -> list[Action]:
        """A member was added: requests that wait for a place may get one."""
        waiting = [entry for entry in self._requests.values() if entry.phase is Phase.PLACING]
        return [action for entry in waiting for action in self._place(entry, now)]

    def cancel(self, request_id: str, error: PdserveError | None = None) -> list[Action]:
        """End a request with an error; unknown ids are no error."""
        entry = self._requests.get(request_id)
        if entry is None:
            return []
        return self._end(entry, error or Cancelled(f"request {request_id} was cancelled"))

    def finish(self, request_id: str, finish: Finish) -> list[Action]:
        """End a request regularly from here: a stop string matched in its text."""
        entry = self._requests.get(request_id)
        return [] if entry is None else self._end(entry, finish)

    def tick(self, now: float) -> list[Action]:
        """Act on deadlines that have passed."""
        actions: list[Action] = []
        for entry in list(self._requests.values()):
            if entry.deadline is None or now < entry.deadline:
                continue
            if entry.phase is Phase.PLACING:
                waited_s = self._config.placement_timeout_ms / 1000
                actions += self._end(entry, Unavailable(f"no decode worker is alive (waited {waited_s:g} s)"))
            elif entry.attempt is not None:
                silent = TransferError(f"{entry.attempt.decode} issued no ticket in time")
                actions += self._fail_attempt(entry, silent, entry.attempt.decode, now)
        return actions

    # What they have in common.

    def _current(self, owner: Owner) -> _InFlight | None:
        """The request whose current attempt this owner is. Anything else is fenced off."""
        entry = self._requests.get(owner.request_id)
        if entry is None or entry.attempt is None or entry.attempt.owner != owner:
            return None
        return entry

    def _place(self, entry: _InFlight, now: float) -> list[Action]:
        """Start the next attempt, or wait for a worker to place it on."""
        wish = Wish(frozenset(entry.avoid), entry.prompt_fingerprint, entry.output_fingerprint)
        placement = self._policy.choose(wish, list(self._candidates()))
        if placement is None:
            entry.phase = Phase.PLACING
            if entry.deadline is None:
                entry.deadline = now + self._config.placement_timeout_ms / 1000
            return []
        entry.attempts += 1
        owner = Owner(entry.request.tenant, entry.request.request_id, self._incarnation, entry.attempts)
        entry.attempt = _Attempt(owner, placement.decode, placement.prefill)
        self._note_fingerprints(entry, placement.prefill or placement.decode, placement.decode)
        local = placement.prefill is None
        entry.phase = Phase.PREFILL if local else Phase.TICKET
        entry.deadline = None if local else now + self._config.ticket_timeout_ms / 1000
        return [StartDecode(placement.decode, owner, entry.request, tuple(entry.output_ids), local)]

    def _candidates(self) -> Iterable[Candidate]:
        requests: dict[str, int] = {}
        prompt_tokens: dict[str, int] = {}
        for entry in self._requests.values():
            for worker in entry.attempt.workers() if entry.attempt else ():
                requests[worker] = requests.get(worker, 0) + 1
                tokens = len(entry.request.prompt_ids) + len(entry.output_ids)
                prompt_tokens[worker] = prompt_tokens.get(worker, 0) + tokens
        for member in self._membership:
            info = member.info
            yield Candidate(
                incarnation=info.incarnation,
                worker_id=info.worker_id,
                role=info.role,
                fingerprint=info.fingerprint,
                assigned_requests=requests.get(info.incarnation, 0),
                assigned_prompt_tokens=prompt_tokens.get(info.incarnation, 0),
                free_blocks=member.load.blocks.free,
            )

    def _note_fingerprints(self, entry: _InFlight, prefill: str, decode: str) -> None:
        """The first attempt decides which fingerprint each range belongs to; a later one that differs is not exact."""
        prefill_member, decode_member = self._membership.get(prefill), self._membership.get(decode)
        assert prefill_member is not None
        assert decode_member is not None
        prefill_print, decode_print = prefill_member.info.fingerprint, decode_member.info.fingerprint
        entry.eos_token_ids = decode_member.info.eos_token_ids
        if entry.prompt_fingerprint is None or entry.output_fingerprint is None:
            entry.prompt_fingerprint, entry.output_fingerprint = prefill_print, decode_print
            return
        recomputed_output = bool(entry.output_ids) and prefill_print != entry.output_fingerprint
        if prefill_print != entry.prompt_fingerprint or decode_print != entry.output_fingerprint or recomputed_output:
            entry.exact = False

    def _fail_attempt(self, entry: _InFlight, error: PdserveError, worker: str, now: float) -> list[Action]:
        """Abort what is left of the current attempt and go on: another attempt, or the end."""
        assert entry.attempt is not None
        actions = self._abort_attempt(entry, except_worker=worker if worker not in self._membership else None)
        owner, phase = entry.attempt.owner, entry.phase.value
        entry.attempt = None
        entry.deadline = None
        finish = entry.request.params.end_of(entry.output_ids, entry.eos_token_ids)
        if finish is not None:  # only the worker's Terminal was lost
            return [*actions, *self._end(entry, finish)]
        if not error.retryable:
            return [*actions, *self._end(entry, error)]
        if entry.attempts >= self._config.max_attempts:
            full = isinstance(error, ResourceExhausted)
            gave_up = error if full else Unavailable(f"gave up after {entry.attempts} attempts; the last one: {error}")
            return [*actions, *self._end(entry, gave_up)]
        entry.avoid.add(worker)
        return [*actions, Retry(owner, phase, str(error)), *self._place(entry, now)]

    def _abort_attempt(self, entry: _InFlight, except_worker: str | None = None) -> list[Action]:
        assert entry.attempt is not None
        owner = entry.attempt.owner
        return [Abort(worker, owner) for worker in entry.attempt.workers() if worker != except_worker]

    def _end(self, entry: _InFlight, outcome: Finish | PdserveError) -> list[Action]:
        """Forget the request, drop what workers hold for it, and say how it ended: once."""
        aborts = self._abort_attempt(entry) if entry.attempt else []
        del self._requests[entry.request.request_id]
        return [*aborts, End(entry.request.request_id, outcome, entry.attempts, entry.exact)]
