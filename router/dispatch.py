"""The attempt loop: serves every request by attempts until it has ended. Pure: events in, actions out.

It owns a request's outputs from `submit` to their `End` actions; each has its own attempts. The first one placed gets
the prompt's KV; the others are placed beside it and share its blocks. What it knows of an attempt:

    PLACING ──decode chosen──► TICKET ──Ticket, prefill chosen──► PREFILL ──first token──► DECODE ──Terminal──► End
       ▲                         │                                │     ▲                    │
       │                         │             Ticket of the next epoch, another prefill     │
       │                         │                                └─────┘                    │
       └─────────────────────────┴────────────────────────────────┴──────────────────────────┘
        the decode worker of the attempt is lost, fails it, or lets a deadline pass: what is held for it is aborted, and
        the next attempt goes on from the tokens already accepted

A prefill worker that is lost or fails does not end the attempt: the decode worker keeps what it received, and issues a
ticket for another one or computes the rest itself.

Attempts go on as long as they bring tokens; `max_attempts` in a row without one end the request. After a worker's loss
its requests are placed again a few at a time, the oldest first, so that they do not crowd out everybody else. A worker
that takes no more is asked again when one of its requests has ended, or after a pause; a request that it refused waits.

A token is accepted once: when it comes from the decode worker of the current attempt, at the next output position.
Everything that an older attempt still says is fenced off by its owner.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdserve.config import RouterConfig
from pdserve.errors import (
    AlreadyExists,
    Cancelled,
    FailedPrecondition,
    InternalError,
    PdserveError,
    ProtocolError,
    ResourceExhausted,
    TransferError,
    Unavailable,
)
from pdserve.types import Finish, Owner, SampledToken, Ticket
from router.actions import (
    AbortAttempt,
    Accept,
    Action,
    DropSender,
    End,
    Fallback,
    PrefillLocally,
    Request,
    Retry,
    StartDecode,
    StartPrefill,
    StateChanged,
)
from router.breaker import Breakers
from router.in_flight import Attempt, AttemptPhase, InFlight, entries_of
from router.membership import Membership
from router.policies import Candidate, PlacementWish, Policy
from router.suspicion import Refusals

_FULL_PAUSE_S = 0.25  # before a worker that took no more is asked again


class Dispatch:
    """All requests of one router. `incarnation` is the router's, and fences its work against a former life's."""

    def __init__(self, incarnation: str, membership: Membership, policy: Policy, config: RouterConfig) -> None:
        self._incarnation = incarnation
        self._membership = membership
        self._policy = policy
        self._config = config
        self._breakers = Breakers(config.breaker_failures, config.breaker_cooldown_ms / 1000)
        self._refusals = Refusals(config.poison_refusal_ms / 1000)
        self._requests: dict[tuple[str, int], InFlight] = {}  # by request id and output; the oldest first
        self._full_until: dict[str, float] = {}  # workers that took no more; others' requests end meanwhile
        self._attempts = 0  # made so far, of all requests: a request id may come again, an owner may not

    def __len__(self) -> int:
        return len(self._requests)

    def assigned(self, incarnation: str) -> int:
        """How many attempts hold something at a worker."""
        return sum(1 for entry in self._requests.values() if entry.attempt and incarnation in entry.attempt.workers())

    def entry(self, request_id: str, output: int) -> InFlight | None:
        """One output in flight, to look at."""
        return self._requests.get((request_id, output))

    def entries(self) -> Iterable[InFlight]:
        """All outputs in flight, the oldest first, to look at."""
        return self._requests.values()

    # Events.

    def submit(self, request: Request, now: float) -> list[Action]:
        """Take a request over. Raises AlreadyExists, ResourceExhausted or, for a prompt that crashed workers,
        FailedPrecondition, and then has not taken it."""
        if self._outputs(request.request_id):
            raise AlreadyExists(f"request_id: {request.request_id!r} is in flight at this router; choose another")
        limit = self._config.max_requests * (2 if request.resumed else 1)  # another router may have had as many
        if len(self._requests) + request.n > limit:
            raise ResourceExhausted(
                f"{len(self._requests)} outputs are in flight and {request.n} more are asked for: "
                f"this router takes {limit}"
            )
        refused_s = self._refusals.remaining_s(request.tenant, request.prompt_ids, now)
        if refused_s > 0:
            raise FailedPrecondition(
                f"this prompt crashed several workers; it is refused for another {refused_s:.0f} s"
            )
        entries = entries_of(request)
        self._requests.update(((request.request_id, entry.output), entry) for entry in entries)
        return [action for entry in entries for action in self._place(entry, now)]

    def on_ticket(self, worker: str, owner: Owner, ticket: Ticket, now: float) -> list[Action]:
        """A decode worker expects KV: find it a sender."""
        entry = self._current(owner)
        if entry is None or entry.attempt is None or worker != entry.attempt.decode:
            return []
        if entry.phase not in (AttemptPhase.TICKET, AttemptPhase.PREFILL) or ticket.epoch <= entry.attempt.epoch:
            return []
        first = entry.phase is AttemptPhase.TICKET
        entry.phase = AttemptPhase.PREFILL
        entry.deadline = None
        entry.attempt.epoch = ticket.epoch
        placement = self._policy.place(self._wish(entry, worker), self._candidates(now))
        assert placement is not None, "who decodes it is settled"
        entry.attempt.prefill = placement.prefill
        if entry.attempt.prefill is None:
            return [PrefillLocally(worker, owner)]
        self._note_placed(entry.attempt.prefill, now)
        self._note_prompt(entry, entry.attempt.prefill)
        start = StartPrefill(entry.attempt.prefill, owner, entry.request, tuple(entry.output_ids), ticket)
        return [start] if first else [Fallback(owner, "another sender", f"epoch {ticket.epoch}"), start]

    def on_local_prefill(self, worker: str, owner: Owner, reason: str) -> list[Action]:
        """A decode worker computes the rest of the prompt's KV itself."""
        entry = self._current(owner)
        if entry is None or entry.attempt is None or worker != entry.attempt.decode:
            return []
        self._note_prompt(entry, worker)
        entry.deadline = None
        entry.attempt.prefill = None
        told = self._tell(entry) if entry.output_ids else []
        return [Fallback(owner, "local", reason), *told]

    def on_tokens(
        self, worker: str, owner: Owner, first_position: int, tokens: tuple[SampledToken, ...], now: float
    ) -> list[Action]:
        entry = self._current(owner)
        if entry is None or entry.attempt is None or worker != entry.attempt.decode:
            return []
        if first_position != len(entry.output_ids):
            gap = ProtocolError(f"{worker} sent output token {first_position} where {len(entry.output_ids)} is next")
            return self._fail_attempt(entry, gap, worker, now)
        first_of_attempt = entry.phase is not AttemptPhase.DECODE
        if first_of_attempt and entry.attempt.shares:  # the prompt's last token, at least, was computed here
            self._note_prompt(entry, worker)
        entry.phase = AttemptPhase.DECODE
        entry.deadline = None
        entry.attempt.prefill = None
        entry.fruitless = 0
        entry.unplaced_since = None
        entry.output_ids.extend(token.token_id for token in tokens)
        entry.suspicion.progressed(len(entry.output_ids))
        self._note_success(worker)
        accept = Accept(entry.request.request_id, entry.output, tokens)
        if not first_of_attempt:
            return [accept]
        return [*self._tell(entry), accept, *self._place_waiting(now)]  # others may recover now

    def on_terminal(
        self, worker: str, owner: Owner, outcome: Finish | PdserveError | None, epoch: int, now: float
    ) -> list[Action]:
        """A worker's work for an owner has ended. None: a prefill that was delivered. `epoch`: of the ticket that a
        prefill was given, whose late end says nothing of the next one at the same worker; 0: it is decode's end."""
        entry = self._current(owner)
        if entry is None or entry.attempt is None:
            return []
        if isinstance(outcome, Cancelled):  # not by this router, which has forgotten what it cancelled
            outcome = Unavailable(f"{worker} gave it up: {outcome}")
        if isinstance(outcome, ResourceExhausted):
            self._full_until[worker] = now + _FULL_PAUSE_S
        elif worker in self._full_until:  # it has room for one more now
            self._full_until[worker] = now
        if epoch == 0 and worker == entry.attempt.decode:
            entry.attempt.decode = None
            if isinstance(outcome, PdserveError):
                self._note_failure(worker, outcome, now)
                return [*self._fail_attempt(entry, outcome, worker, now), *self._place_waiting(now)]
            return [*self._end(entry, outcome), *self._place_waiting(now)] if outcome else []
        if epoch == entry.attempt.epoch and worker == entry.attempt.prefill:
            entry.attempt.prefill = None
            if isinstance(outcome, PdserveError):
                self._note_failure(worker, outcome, now)
                return self._lose_prefill(entry, worker, outcome, now)
            self._note_success(worker)
        return []

    def on_worker_lost(self, worker: str, now: float, crashed: bool = True) -> list[Action]:
        """A member has left. What still needs it goes on elsewhere. `crashed`: perhaps a request did it."""
        actions: list[Action] = []
        self._full_until.pop(worker, None)
        lost = Unavailable(f"worker {worker} was lost")
        self._note_failure(worker, lost, now)
        for entry in list(self._requests.values()):
            if entry.attempt is None or worker not in entry.attempt.workers():
                continue
            if crashed:
                entry.suspicion.crashed(len(entry.output_ids))
                actions += self._tell(entry)
            if worker == entry.attempt.decode:
                entry.attempt.decode = None
                actions += self._fail_attempt(entry, lost, worker, now)
            else:
                entry.attempt.prefill = None
                actions += self._lose_prefill(entry, worker, lost, now)
        return actions + self._place_waiting(now)

    def on_worker_joined(self, now: float) -> list[Action]:
        """A member was added, or wants work again: requests that wait for a place may get one."""
        return self._place_waiting(now)

    def cancel(self, request_id: str, error: PdserveError | None = None) -> list[Action]:
        """End what is left of a request with an error; unknown ids are no error."""
        error = error or Cancelled(f"request {request_id} was cancelled")
        return [action for entry in self._outputs(request_id) for action in self._end(entry, error)]

    def finish(self, request_id: str, output: int, finish: Finish) -> list[Action]:
        """End an output regularly from here: a stop string matched in its text."""
        entry = self._requests.get((request_id, output))
        return [] if entry is None else self._end(entry, finish)

    def tick(self, now: float) -> list[Action]:
        """Act on deadlines that have passed."""
        actions: list[Action] = []
        for entry in list(self._requests.values()):
            if entry.deadline is None or now < entry.deadline:
                continue
            if entry.phase is AttemptPhase.PLACING:
                actions += self._end(entry, self._unplaced(now))
            elif entry.attempt is not None and entry.attempt.decode is not None:
                silent = TransferError(f"{entry.attempt.decode} issued no ticket in time")
                self._note_failure(entry.attempt.decode, silent, now)
                actions += self._fail_attempt(entry, silent, entry.attempt.decode, now)
        return actions + self._place_waiting(now)

    # What they have in common.

    def _current(self, owner: Owner) -> InFlight | None:
        """The request whose current attempt this owner is. Anything else is fenced off."""
        entry = self._requests.get((owner.request_id, owner.output))
        if entry is None or entry.attempt is None or entry.attempt.owner != owner:
            return None
        return entry

    def _tell(self, entry: InFlight) -> list[Action]:
        """Let the client know an output's resume state, if it does not."""
        if entry.resume_state == entry.told:
            return []
        entry.told = entry.resume_state
        return [StateChanged(entry.request.request_id, entry.output, entry.told)]

    def _outputs(self, request_id: str) -> list[InFlight]:
        """What is in flight of a request."""
        return [entry for entry in self._requests.values() if entry.request.request_id == request_id]

    def _place_waiting(self, now: float) -> list[Action]:
        """Place what waits for a worker or for its turn to recover, the oldest first."""
        waiting = [entry for entry in self._requests.values() if entry.phase is AttemptPhase.PLACING]
        if not waiting:
            if not self._is_full(now):
                self._full_until.clear()
            return []
        actions: list[Action] = []
        candidates = self._candidates(now)
        for entry in waiting:
            placed = self._place(entry, now, candidates)
            if placed:
                candidates = self._candidates(now)
            actions += placed
        return actions

    def _place(self, entry: InFlight, now: float, candidates: list[Candidate] | None = None) -> list[Action]:
        """Start the next attempt, or let it wait for a worker or for its turn. `candidates`: as they are now, where
        somebody has looked already."""
        entry.phase = AttemptPhase.PLACING
        if entry.attempts and self._recoveries() >= self._config.max_recoveries:
            entry.deadline = None  # those before it have one
            return []
        wish, candidates = self._wish(entry), self._candidates(now) if candidates is None else candidates
        if entry.alone:  # two suspects on one worker would be convicted together
            apart = [candidate for candidate in candidates if not candidate.isolating]
            if candidates and not apart:
                entry.deadline = None  # whoever is there has one, or will be convicted or cleared
                return []
            candidates = apart
        placement = self._policy.place(wish, candidates)
        if placement is None:
            entry.unplaced_since = now if entry.unplaced_since is None else entry.unplaced_since
            entry.deadline = entry.unplaced_since + self._config.placement_timeout_ms / 1000
            if entry.output_ids and self._is_full(now):  # what was taken once waits for as long as others progress
                entry.deadline = None
            return []
        decode = placement.decode
        entry.eos_token_ids = self._eos_token_ids(entry, decode)
        finish = entry.request.params.end_of(entry.output_ids, entry.eos_token_ids)
        if finish is not None:  # nothing is missing but the end
            return self._end(entry, finish)
        self._note_output(entry, decode)
        self._note_placed(decode, now)
        entry.attempts += 1
        entry.fruitless += 1
        self._attempts += 1
        request, share = entry.request, self._output_at(entry, decode) if placement.shares else None
        owner = Owner(request.tenant, request.request_id, self._incarnation, self._attempts, entry.output)
        entry.attempt = Attempt(owner, decode, shares=placement.shares)
        if placement.local and not placement.shares:
            self._note_prompt(entry, decode)
        entry.phase = AttemptPhase.PREFILL if placement.local else AttemptPhase.TICKET
        entry.deadline = None if placement.local else now + self._config.ticket_timeout_ms / 1000
        return [StartDecode(decode, owner, request, tuple(entry.output_ids), placement.local, share)]

    def _others(self, entry: InFlight) -> list[Attempt]:
        """The attempts of the request's other outputs."""
        if entry.request.n == 1:
            return []
        others = self._outputs(entry.request.request_id)
        return [other.attempt for other in others if other is not entry and other.attempt is not None]

    def _output_at(self, entry: InFlight, decode: str) -> Owner | None:
        """The first of the request's other outputs that is decoded there."""
        return next((attempt.owner for attempt in self._others(entry) if attempt.decode == decode), None)

    def _recoveries(self) -> int:
        return sum(1 for entry in self._requests.values() if entry.recovering)

    def _wish(self, entry: InFlight, decode: str | None = None) -> PlacementWish:
        """`decode`: who decodes it already, if somebody does."""
        return PlacementWish(
            avoid=frozenset(entry.avoid),
            prompt_fingerprint=entry.prompt.fingerprint,
            output_fingerprint=entry.output_fingerprint,
            beside=tuple(attempt.decode for attempt in self._others(entry) if attempt.decode is not None),
            alone=entry.alone,
            decode=decode,
        )

    def _candidates(self, now: float) -> list[Candidate]:
        requests: dict[str, int] = {}
        prompt_tokens: dict[str, int] = {}
        isolating: set[str] = set()
        for entry in self._requests.values():
            for worker in entry.attempt.workers() if entry.attempt else ():
                requests[worker] = requests.get(worker, 0) + 1
                tokens = len(entry.request.prompt_ids) + len(entry.output_ids)
                prompt_tokens[worker] = prompt_tokens.get(worker, 0) + tokens
                if entry.alone:
                    isolating.add(worker)
        return [
            Candidate(
                incarnation=member.info.incarnation,
                worker_id=member.info.worker_id,
                role=member.info.role,
                fingerprint=member.info.fingerprint,
                assigned_requests=requests.get(member.info.incarnation, 0),
                assigned_prompt_tokens=prompt_tokens.get(member.info.incarnation, 0),
                free_blocks=member.load.blocks.free,
                draining=member.load.draining,
                tripped=self._breakers.is_open(member.info.worker_id, now),
                isolating=member.info.incarnation in isolating,
            )
            for member in self._membership
            if now >= self._full_until.get(member.info.incarnation, 0.0)
        ]

    def _is_full(self, now: float) -> bool:
        return any(now < until for until in self._full_until.values())

    def _unplaced(self, now: float) -> PdserveError:
        """Why there was no place for a request for so long."""
        waited = f"(waited {self._config.placement_timeout_ms / 1000:g} s)"
        if self._is_full(now):
            return ResourceExhausted(f"every worker is full {waited}")
        return Unavailable(f"no decode worker is alive {waited}")

    # Breakers know workers by their id: one that crashes whenever it is started stays noticed.

    def _note_placed(self, worker: str, now: float) -> None:
        if worker in self._full_until:  # a try whether it takes more: one at a time
            self._full_until[worker] = now + _FULL_PAUSE_S
        info = self._membership.known(worker)
        if info is not None:
            self._breakers.placed(info.worker_id, now)

    def _note_success(self, worker: str) -> None:
        info = self._membership.known(worker)
        if info is not None:
            self._breakers.succeeded(info.worker_id)

    def _note_failure(self, worker: str, error: PdserveError, now: float) -> None:
        info = self._membership.known(worker)
        if info is not None and error.blames_worker:
            self._breakers.failed(info.worker_id, now)

    def _note_prompt(self, entry: InFlight, worker: str) -> None:
        """`worker` computes the KV of the prompt and of what was accepted of the output."""
        entry.prompt_computed_by(self._fingerprint(worker))

    def _note_output(self, entry: InFlight, worker: str) -> None:
        """`worker` computes what comes next of the output."""
        entry.output_computed_by(self._fingerprint(worker))

    def _eos_token_ids(self, entry: InFlight, worker: str) -> tuple[int, ...]:
        member = self._membership.get(worker)
        return member.info.eos_token_ids if member else entry.eos_token_ids

    def _fingerprint(self, worker: str) -> str:
        member = self._membership.get(worker)
        assert member is not None, "only members are chosen, and only members report"
        return member.info.fingerprint

    def _lose_prefill(self, entry: InFlight, worker: str, error: PdserveError, now: float) -> list[Action]:
        """The sender is gone before the first token: let the decode worker ask for another one."""
        assert entry.attempt is not None
        assert entry.attempt.decode is not None
        if entry.suspicion.convicted:
            return self._convict(entry, now)
        if not error.retryable:
            return self._end(entry, error)
        if entry.alone:
            entry.phase = AttemptPhase.PREFILL
            entry.deadline = None
            return [PrefillLocally(entry.attempt.decode, entry.attempt.owner)]
        entry.avoid.add(worker)
        entry.deadline = now + self._config.ticket_timeout_ms / 1000
        return [DropSender(entry.attempt.decode, entry.attempt.owner, entry.attempt.epoch, error)]

    def _fail_attempt(self, entry: InFlight, error: PdserveError, worker: str, now: float) -> list[Action]:
        """Abort what is left of the current attempt and go on: another attempt, or the end."""
        assert entry.attempt is not None
        actions = self._abort_attempt(entry)
        owner, phase = entry.attempt.owner, entry.phase.value
        entry.attempt = None
        entry.deadline = None
        finish = entry.request.params.end_of(entry.output_ids, entry.eos_token_ids)
        if finish is not None:  # only the worker's Terminal was lost
            return [*actions, *self._end(entry, finish)]
        if entry.suspicion.convicted:
            return [*actions, *self._convict(entry, now)]
        if not error.retryable:
            return [*actions, *self._end(entry, error)]
        if isinstance(error, ResourceExhausted):  # the worker has not begun with it
            entry.fruitless -= 1
            entry.attempts -= 1
            return [*actions, Retry(owner, phase, str(error)), *self._place(entry, now)]
        entry.unplaced_since = None
        if entry.fruitless >= self._config.max_attempts:
            if not isinstance(error, InternalError):
                error = Unavailable(f"gave up after {entry.fruitless} attempts without a token; the last one: {error}")
            return [*actions, *self._end(entry, error)]
        entry.avoid.add(worker)
        return [*actions, Retry(owner, phase, str(error)), *self._place(entry, now)]

    def _convict(self, entry: InFlight, now: float) -> list[Action]:
        """End a request that crashes workers, and refuse its like for a while."""
        self._refusals.add(entry.request.tenant, entry.request.prompt_ids, now)
        crashes = entry.suspicion.crashes
        return self._end(entry, InternalError(f"{crashes} workers in a row crashed on this request; it is given up"))

    def _abort_attempt(self, entry: InFlight) -> list[Action]:
        assert entry.attempt is not None
        owner = entry.attempt.owner
        return [AbortAttempt(worker, owner) for worker in entry.attempt.workers()]

    def _end(self, entry: InFlight, outcome: Finish | PdserveError) -> list[Action]:
        """Forget the output, drop what workers hold for it, and say how it ended: once."""
        aborts = self._abort_attempt(entry) if entry.attempt else []
        del self._requests[entry.request.request_id, entry.output]
        return [*aborts, End(entry.request.request_id, entry.output, outcome, entry.attempts, entry.exact)]
