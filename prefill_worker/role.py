"""The prefill role: computes a prompt's KV and streams it to the decode worker that issued the ticket.

One `KVSend` a prompt joins the engine and the wire:

    prompt queued           -> the ticket is kept alive
    engine leases blocks    -> the transfer is opened (OPEN)                    \\ by the sequence's outlet, past the
    a layer of a chunk done -> that range may be sent (other modes: release.py) / role: no layer waits for a decision
    first token sampled     -> COMMIT carries it
    transfer ended (ACK)    -> the blocks are unpinned, the engine returns the lease, the router is told

The lease outlives the computation: it is returned when the receiver has acknowledged everything, or the transfer has
failed. Either side's failure ends the other's part.

Pure: events in, actions out (actions.py). Who performs them, and on which thread, is worker/control.py's business.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass

from engine.commands import AbortSequence, SubmitSequence, UnpinSequence
from engine.events import Aborting, Ended, EngineEvent, Tokens
from engine.sequence import KVOutlet, Sequence
from pdserve import logs
from pdserve.errors import Cancelled, PdserveError, ResourceExhausted, TransferError
from pdserve.reports import AttemptEnded
from pdserve.types import Owner, SamplingParams, Ticket
from prefill_worker.actions import AbortSend, CommitSend, OpenSend, PrefillAction

_log = logs.logger("prefill")

MakeOutlet = Callable[[Owner, Ticket, int], KVOutlet]  # for so many tokens


@dataclass(slots=True)
class KVSend:
    """One prompt's way from the engine to the wire."""

    ticket: Ticket
    sequence: Sequence
    error: PdserveError | None = None  # that its transfer ended with


class PrefillRole:
    """All prompts that one worker prefills for others."""

    def __init__(self, make_outlet: MakeOutlet, max_queued: int) -> None:
        self._make_outlet = make_outlet
        self._max_queued = max_queued
        self._sends: dict[Owner, KVSend] = {}

    def __contains__(self, owner: Owner) -> bool:
        return owner in self._sends

    @property
    def owners(self) -> list[Owner]:
        return list(self._sends)

    # What a router asks.

    def start(
        self,
        owner: Owner,
        prompt_ids: ListLike[int],
        output_ids: ListLike[int],
        params: SamplingParams,
        ticket: Ticket,
    ) -> list[PrefillAction]:
        """Queue the prompt (and the output accepted by earlier attempts) for computation."""
        if len(self._sends) >= self._max_queued:
            full = ResourceExhausted(f"{len(self._sends)} prompts are queued, the most this worker takes")
            return [AttemptEnded(owner, full, ticket.epoch)]
        if owner in self._sends:
            again = TransferError(f"an earlier epoch of {owner} has not ended at this worker")
            return [AttemptEnded(owner, again, ticket.epoch)]
        sequence = Sequence(
            owner,
            prompt_ids,
            output_ids,
            params,
            stops_after_prefill=True,
            outlet=self._make_outlet(owner, ticket, len(prompt_ids) + len(output_ids)),
            index=owner.output,
        )
        self._sends[owner] = KVSend(ticket, sequence)
        return [OpenSend(owner, ticket, tuple(sequence.token_ids))]

    def abort(self, owner: Owner) -> list[PrefillAction]:
        """End it, whatever its state: what is computed and waits for its receiver is the link's."""
        send = self._sends.get(owner)
        if send is None:
            return []
        error = Cancelled(f"{owner} was aborted")
        return [AbortSequence(owner, error), AbortSend(send.ticket.transfer_id, error)]

    # What the link tells.

    def send_opened(self, owner: Owner) -> list[PrefillAction]:
        return [SubmitSequence(self._sends[owner].sequence)]

    def send_refused(self, owner: Owner, error: PdserveError) -> list[PrefillAction]:
        send = self._sends.pop(owner)
        return [AttemptEnded(owner, error, send.ticket.epoch)]

    def send_ended(self, owner: Owner, epoch: int, error: PdserveError | None) -> list[PrefillAction]:
        """The link touches the sequence's blocks no more. What an earlier epoch's transfer still tells is late."""
        send = self._sends.get(owner)
        if send is None or send.ticket.epoch != epoch:
            return []
        send.error = error
        aborts = [] if error is None else [AbortSequence(owner, error)]
        return [*aborts, UnpinSequence(owner)]

    # What the engine tells.

    def on_engine(self, event: EngineEvent) -> list[PrefillAction]:
        send = self._sends.get(event.owner)
        if send is None:
            return []
        transfer_id = send.ticket.transfer_id
        match event:
            case Tokens():
                return [CommitSend(transfer_id, event.tokens)]
            case Aborting():
                return [AbortSend(transfer_id, event.error)]
            case Ended():
                return self._end(send, event)
        raise AssertionError(f"a sequence whose KV leaves is pinned from its lease on: {event}")

    def _end(self, send: KVSend, event: Ended) -> list[PrefillAction]:
        del self._sends[event.owner]
        error = event.outcome if isinstance(event.outcome, PdserveError) else send.error
        ended = AttemptEnded(event.owner, error, send.ticket.epoch)
        if error is None:
            return [ended]
        _log.info("prefill ended early", owner=event.owner, error=error)
        return [AbortSend(send.ticket.transfer_id, error), ended]  # it may have ended while still queued
