"""The decode service: promises to receive KV, receives it, and streams tokens from the running batch.

One `Import` an attempt joins the wire and the engine:

    StartDecode      -> a transfer is expected: Ticket to the router
    OPEN arrives     -> the sequence is submitted; the engine leases blocks when its turn comes
    blocks leased    -> credit is granted, KV is written as it comes
    sender lost      -> the ladder: a ticket for another sender, or compute the rest here
    COMMIT verified  -> the sequence joins the batch with the first tokens; they are streamed at once
    each step        -> the tokens of all sequences leave in one report

With `local_prefill` the engine computes the prompt itself and nothing is expected. Blocks are pinned from the lease
until the transfer has ended, so that no late frame can reach a block that was given to someone else.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import replace
from typing import Protocol

from engine.engine import Engine
from engine.sequence import KVSource, Sequence
from kvtransfer.actions import TakenOver
from kvtransfer.ladder import Ladder, Rung
from kvtransfer.link import Link
from pdserve import logs
from pdserve.clock import Clock
from pdserve.errors import Cancelled, PdserveError, ResourceExhausted
from pdserve.types import Finish, Owner, SampledToken, SamplingParams, Ticket

_log = logs.logger("decode")


class Reports(Protocol):
    def ticket(self, owner: Owner, ticket: Ticket) -> None: ...

    def local_prefill(self, owner: Owner, reason: str) -> None: ...

    def tokens(self, batch: list[tuple[Owner, int, ListLike[SampledToken]]]) -> None: ...

    def terminal(self, owner: Owner, outcome: Finish | PdserveError | None) -> None: ...


class DecodeService:
    """Commands come from the session thread; the rest runs on the engine's and the link's threads."""

    def __init__(
        self, engine: Engine, link: Link, reports: Reports, ladder: Ladder, clock: Clock, max_queued: int
    ) -> None:
        self.engine = engine
        self.link = link
        self.reports = reports
        self.ladder = ladder
        self.clock = clock
        self._max_queued = max_queued
        self._imports: dict[Owner, Import] = {}
        self._new_tokens: list[tuple[Owner, int, ListLike[SampledToken]]] = []
        self._ended: list[tuple[Owner, Finish | PdserveError | None]] = []
        engine.add_after_step(self._report_step)

    def start(
        self,
        owner: Owner,
        prompt_ids: ListLike[int],
        output_ids: ListLike[int],
        params: SamplingParams,
        local_prefill: bool,
        share: Owner | None = None,
    ) -> None:
        """Admit an attempt: issue its ticket, or queue it for local computation. `share`: another output of its
        request, whose prompt KV it takes if that one is here."""
        if len(self._imports) >= self._max_queued:
            full = ResourceExhausted(f"{len(self._imports)} requests are queued, the most this worker takes")
            self.reports.terminal(owner, full)
            return
        source = KVSource.COMPUTED if local_prefill else KVSource.DELIVERED
        entry = Import(self, owner)
        sequence = Sequence(
            owner, prompt_ids, output_ids, params, entry, source=source, index=owner.output, shares=share
        )
        self._imports[owner] = entry
        if local_prefill:
            self.engine.submit(sequence)
            return
        self.engine.expect(owner)
        try:
            ticket = entry.expect(sequence)
        except PdserveError as error:
            self.drop(owner, error)
            return
        self.reports.ticket(owner, ticket)

    def sender_lost(self, owner: Owner, epoch: int, error: PdserveError) -> None:
        """The router knows that the sender of this epoch is gone."""
        entry = self._imports.get(owner)
        if entry is not None:
            entry.sender_lost(epoch, error)

    def prefill_locally(self, owner: Owner) -> None:
        """The router has no prefill worker for this owner's ticket."""
        entry = self._imports.get(owner)
        if entry is not None:
            entry.prefill_locally("no prefill worker is left")

    def abort(self, owner: Owner) -> None:
        entry = self._imports.get(owner)
        if entry is not None:
            entry.abort(Cancelled(f"{owner} was aborted"))

    def owners(self) -> list[Owner]:
        return list(self._imports)

    def drop(self, owner: Owner, error: PdserveError) -> None:
        """End an attempt that never reached the engine. Any thread."""
        if self._imports.pop(owner, None) is not None:
            self.engine.forget(owner)
            self.reports.terminal(owner, error)

    # The engine's thread.

    def note_tokens(self, owner: Owner, first_position: int, tokens: ListLike[SampledToken]) -> None:
        self._new_tokens.append((owner, first_position, tokens))

    def note_end(self, owner: Owner, outcome: Finish | PdserveError | None) -> None:
        self._imports.pop(owner, None)
        self._ended.append((owner, outcome))

    def _report_step(self) -> None:
        """Tokens first: a Terminal may not overtake the tokens before it."""
        if self._new_tokens:
            self.reports.tokens(self._new_tokens)
            self._new_tokens = []
        for owner, outcome in self._ended:
            self.reports.terminal(owner, outcome)
        self._ended.clear()


class Import:
    """One attempt's way from the wire into the batch: the transfer's end and the sequence's sink."""

    def __init__(self, service: DecodeService, owner: Owner) -> None:
        self._service = service
        self._engine = service.engine
        self._link = service.link
        self._owner = owner
        self._ticket: Ticket | None = None
        self._renewals = 0
        self._submitted = False
        self._local_reason = ""
        self._aborted: PdserveError | None = None

    def expect(self, sequence: Sequence) -> Ticket:
        """Be ready for the transfer of all known tokens' KV. The session thread."""
        self._ticket = self._link.expect(
            self._owner,
            sequence.token_ids,
            lambda: self._on_need_blocks(sequence),
            lambda outcome: self._on_transfer_end(sequence, outcome),
            on_sender_lost=self._on_sender_lost,
        )
        return self._ticket

    def sender_lost(self, epoch: int, error: PdserveError) -> None:
        """The session thread."""
        if self._ticket is not None:
            self._link.sender_lost(self._ticket.transfer_id, epoch, error)

    def prefill_locally(self, reason: str) -> None:
        """Want nothing more from outside. The session thread, or the link's."""
        if self._ticket is not None:
            self._local_reason = reason
            self._link.take_over(self._ticket.transfer_id)

    def abort(self, error: PdserveError) -> None:
        """End it, whatever its state. The session thread."""
        self._aborted = error  # first: who gives the sequence to the engine looks at it afterwards
        if self._ticket is not None:
            self._link.abort_receiver(self._ticket.transfer_id, error)
        self._engine.abort(self._owner, error)

    # The link's thread.

    def _on_need_blocks(self, sequence: Sequence) -> None:
        self._submitted = True
        self._engine.submit(sequence)

    def _on_sender_lost(self, error: PdserveError) -> None:
        """Take the next rung of the ladder. None of them is an error to the client."""
        assert self._ticket is not None
        ladder, now = self._service.ladder, self._service.clock.now()
        if self._renewals:
            ladder.failed(now)
        rung = ladder.next_rung(self._renewals, now)
        _log.warning("sender lost", owner=self._owner, rung=rung.value, reason=error)
        if rung is Rung.LOCAL:
            self.prefill_locally(str(error))
            return
        self._renewals += 1
        self._link.renew(self._ticket.transfer_id, self._on_epoch)

    def _on_epoch(self, epoch: int) -> None:
        assert self._ticket is not None
        self._service.reports.ticket(self._owner, replace(self._ticket, epoch=epoch))

    def _on_transfer_end(self, sequence: Sequence, outcome: ListLike[SampledToken] | TakenOver | PdserveError) -> None:
        if isinstance(outcome, TakenOver):
            self._service.reports.local_prefill(self._owner, self._local_reason)
            self._compute_rest(sequence, outcome.token_stop)
        elif not isinstance(outcome, PdserveError):
            if self._renewals:
                self._service.ladder.succeeded()
            self._engine.deliver(self._owner, outcome)
        elif self._submitted:
            _log.info("transfer failed", owner=self._owner, error=outcome)
            self._engine.abort(self._owner, outcome)
            self._engine.unpin(self._owner)
        else:
            _log.info("transfer failed", owner=self._owner, error=outcome)
            self._service.drop(self._owner, outcome)

    def _compute_rest(self, sequence: Sequence, token_stop: int) -> None:
        """Tokens before `token_stop` have their KV. If the engine never saw the sequence, it has none."""
        if self._submitted:
            self._engine.take_over(self._owner, token_stop)
        else:
            sequence.source = KVSource.COMPUTED
            self._submitted = True
            self._engine.submit(sequence)
        if self._aborted is not None:  # perhaps before the engine knew the sequence
            self._engine.abort(self._owner, self._aborted)

    # The engine's thread.

    def on_leased(self, sequence: Sequence) -> None:
        assert self._ticket is not None
        self._link.blocks_leased(self._ticket.transfer_id, self._engine.sequence_kv(sequence))

    def on_layer(self, sequence: Sequence, layer: int, start: int, stop: int) -> None:
        raise AssertionError("a decode worker exports no KV")

    def on_tokens(self, sequence: Sequence, tokens: ListLike[SampledToken]) -> None:
        self._service.note_tokens(self._owner, sequence.output_count - len(tokens), tokens)

    def on_preempted(self, sequence: Sequence) -> None:
        """What a prefill worker had sent is computed here from now on, perhaps to other bits: the router must know."""
        if self._ticket is not None:
            self._service.reports.local_prefill(self._owner, "preempted")

    def on_abort(self, sequence: Sequence, error: PdserveError) -> None:
        assert self._ticket is not None
        self._link.abort_receiver(self._ticket.transfer_id, error)

    def on_end(self, sequence: Sequence, outcome: Finish | PdserveError | None) -> None:
        if isinstance(outcome, PdserveError) and self._ticket is not None:
            self._link.abort_receiver(self._ticket.transfer_id, outcome)  # the engine may never have taken it
        self._service.note_end(self._owner, outcome)
