"""The decode role: promises to receive KV, receives it, and streams tokens from the running batch.

One `KVReceive` an attempt joins the wire and the engine:

    StartDecode      -> a transfer is expected: ticket to the router
    OPEN arrives     -> the sequence is submitted; the engine leases blocks when its turn comes
    blocks leased    -> credit is granted, KV is written as it comes
    sender lost      -> the ladder: a ticket for another sender, or compute the rest here
    COMMIT verified  -> the sequence joins the batch with the first tokens; they are streamed at once
    each step        -> the tokens of all sequences leave in one message

With `local_prefill` the engine computes the prompt itself and nothing is expected. Blocks are pinned from the lease
until the transfer has ended, so that no late frame can reach a block that was given to someone else.

Pure: events in, actions out (actions.py). Who performs them, and on which thread, is worker/control.py's business.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass, replace

from decode_worker.actions import (
    AbortReceive,
    DecodeAction,
    ExpectKV,
    GiveUpSender,
    OpenBlocks,
    RenewTicket,
    WantNoMore,
)
from decode_worker.ladder import Ladder, Rung
from engine.commands import (
    AbortSequence,
    DeliverTokens,
    ExpectSequence,
    ForgetSequence,
    SubmitSequence,
    TakeOverSequence,
    UnpinSequence,
)
from engine.events import Aborting, Ended, EngineEvent, Leased, Preempted, Tokens
from engine.sequence import KVSource, Sequence
from kvtransfer.actions import TakenOver
from pdserve import logs
from pdserve.errors import Cancelled, InternalError, PdserveError, ResourceExhausted
from pdserve.reports import AttemptEnded, PrefillsLocally, TicketIssued, TokensSampled
from pdserve.types import Owner, SampledToken, SamplingParams, Ticket

_log = logs.logger("decode")


@dataclass(slots=True)
class KVReceive:
    """One attempt's way from the wire into the batch. Without a ticket it computes everything itself."""

    sequence: Sequence
    ticket: Ticket | None = None
    submitted: bool = False  # to the engine
    renewals: int = 0
    local_reason: str = ""  # why it wants nothing more from outside
    aborted: PdserveError | None = None


class DecodeRole:
    """All attempts that one worker decodes."""

    def __init__(self, ladder: Ladder, max_queued: int) -> None:
        self._ladder = ladder
        self._max_queued = max_queued
        self._receives: dict[Owner, KVReceive] = {}

    def __contains__(self, owner: Owner) -> bool:
        return owner in self._receives

    @property
    def owners(self) -> list[Owner]:
        return list(self._receives)

    # What a router asks.

    def start(
        self,
        owner: Owner,
        prompt_ids: ListLike[int],
        output_ids: ListLike[int],
        params: SamplingParams,
        local_prefill: bool,
        share: Owner | None,
    ) -> list[DecodeAction]:
        """Admit an attempt: issue its ticket, or queue it for local computation. `share`: another output of its
        request, whose prompt KV it takes if that one is here."""
        if len(self._receives) >= self._max_queued:
            full = ResourceExhausted(f"{len(self._receives)} requests are queued, the most this worker takes")
            return [AttemptEnded(owner, full)]
        if owner in self._receives:
            return [AttemptEnded(owner, InternalError(f"{owner} was started twice at this worker"))]
        source = KVSource.COMPUTED if local_prefill else KVSource.DELIVERED
        sequence = Sequence(owner, prompt_ids, output_ids, params, source=source, index=owner.output, shares=share)
        receive = self._receives[owner] = KVReceive(sequence)
        if local_prefill:
            return [_submit(receive)]
        return [ExpectSequence(owner), ExpectKV(owner, tuple(sequence.token_ids))]

    def sender_lost(self, owner: Owner, epoch: int, error: PdserveError) -> list[DecodeAction]:
        """The router knows that the sender of this epoch is gone."""
        receive = self._receives.get(owner)
        if receive is None or receive.ticket is None:
            return []
        return [GiveUpSender(receive.ticket.transfer_id, epoch, error)]

    def prefill_locally(self, owner: Owner) -> list[DecodeAction]:
        """The router has no prefill worker for this owner's ticket."""
        receive = self._receives.get(owner)
        return [] if receive is None else _want_no_more(receive, "no prefill worker is left")

    def abort(self, owner: Owner) -> list[DecodeAction]:
        """End it, whatever its state."""
        receive = self._receives.get(owner)
        if receive is None:
            return []
        receive.aborted = Cancelled(f"{owner} was aborted")
        of_engine = [AbortSequence(owner, receive.aborted)] if receive.submitted else []
        return [*_abort_transfer(receive, receive.aborted), *of_engine]

    # What the link tells.

    def ticket_issued(self, owner: Owner, ticket: Ticket) -> list[DecodeAction]:
        self._receives[owner].ticket = ticket
        return [TicketIssued(owner, ticket)]

    def ticket_refused(self, owner: Owner, error: PdserveError) -> list[DecodeAction]:
        return self._drop(owner, error)

    def blocks_needed(self, owner: Owner) -> list[DecodeAction]:
        """Its sender is there. What was aborted meanwhile needs no blocks: its transfer is about to end."""
        receive = self._receives.get(owner)
        if receive is None or receive.aborted is not None:
            return []
        return [_submit(receive)]

    def sender_gone(self, owner: Owner, error: PdserveError, now: float) -> list[DecodeAction]:
        """Take the next rung of the ladder. None of them is an error to the client."""
        receive = self._receives.get(owner)
        if receive is None or receive.ticket is None or receive.aborted is not None:
            return []
        if receive.renewals:
            self._ladder.failed(now)
        rung = self._ladder.next_rung(receive.renewals, now)
        _log.warning("sender lost", owner=owner, rung=rung.value, reason=error)
        if rung is Rung.LOCAL:
            return _want_no_more(receive, str(error))
        receive.renewals += 1
        return [RenewTicket(owner, receive.ticket.transfer_id)]

    def epoch_opened(self, owner: Owner, epoch: int) -> list[DecodeAction]:
        """A sender with this epoch is expected now."""
        receive = self._receives.get(owner)
        if receive is None or receive.ticket is None:
            return []
        return [TicketIssued(owner, replace(receive.ticket, epoch=epoch))]

    def receive_ended(
        self, owner: Owner, outcome: ListLike[SampledToken] | TakenOver | PdserveError
    ) -> list[DecodeAction]:
        """The link touches the sequence's blocks no more."""
        receive = self._receives.get(owner)
        if receive is None:
            return []
        if isinstance(outcome, TakenOver):
            return self._compute_rest(receive, outcome.token_stop)
        if not isinstance(outcome, PdserveError):
            if receive.renewals:
                self._ladder.succeeded()
            return [DeliverTokens(owner, outcome)]
        _log.info("transfer failed", owner=owner, error=outcome)
        if receive.submitted:
            return [AbortSequence(owner, outcome), UnpinSequence(owner)]
        return self._drop(owner, outcome)

    def _compute_rest(self, receive: KVReceive, token_stop: int) -> list[DecodeAction]:
        """Tokens before `token_stop` have their KV. If the engine never saw the sequence, it has none."""
        owner = receive.sequence.owner
        if receive.aborted is not None and not receive.submitted:
            return self._drop(owner, receive.aborted)
        told = PrefillsLocally(owner, receive.local_reason)
        if receive.submitted:
            return [told, TakeOverSequence(owner, token_stop)]
        receive.sequence.source = KVSource.COMPUTED
        return [told, _submit(receive)]

    def _drop(self, owner: Owner, error: PdserveError) -> list[DecodeAction]:
        """End an attempt that never reached the engine."""
        del self._receives[owner]
        return [ForgetSequence(owner), AttemptEnded(owner, error)]

    # What the engine tells.

    def on_engine(self, event: EngineEvent) -> list[DecodeAction]:
        receive = self._receives.get(event.owner)
        if receive is None:
            return []
        match event:
            case Leased():
                assert receive.ticket is not None
                return [OpenBlocks(receive.ticket.transfer_id, event.kv)]
            case Tokens():
                return [TokensSampled(event.owner, event.first_position, event.tokens)]
            case Preempted():
                # What a prefill worker sent is computed here from now on, perhaps to other bits: the router must know.
                return [] if receive.ticket is None else [PrefillsLocally(event.owner, "preempted")]
            case Aborting():
                return _abort_transfer(receive, event.error)
            case Ended():
                return self._end(receive, event)

    def _end(self, receive: KVReceive, event: Ended) -> list[DecodeAction]:
        del self._receives[event.owner]
        ended = AttemptEnded(event.owner, event.outcome)
        if isinstance(event.outcome, PdserveError):  # the engine may never have taken it
            return [*_abort_transfer(receive, event.outcome), ended]
        return [ended]


def _submit(receive: KVReceive) -> SubmitSequence:
    receive.submitted = True
    return SubmitSequence(receive.sequence)


def _want_no_more(receive: KVReceive, reason: str) -> list[DecodeAction]:
    if receive.ticket is None:
        return []
    receive.local_reason = reason
    return [WantNoMore(receive.ticket.transfer_id)]


def _abort_transfer(receive: KVReceive, error: PdserveError) -> list[DecodeAction]:
    return [] if receive.ticket is None else [AbortReceive(receive.ticket.transfer_id, error)]
