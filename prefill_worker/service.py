"""The prefill service: computes a prompt's KV and streams it to the decode worker that issued the ticket.

One `Export` a prompt joins the engine and the wire:

    prompt queued           -> the ticket is kept alive
    engine leases blocks    -> the transfer is opened (OPEN)
    a layer of a chunk done -> that range may be sent, while the next layer is computed (other modes: release.py)
    first token sampled     -> COMMIT carries it
    transfer ended (ACK)    -> the blocks are unpinned, the engine returns the lease, the router is told

The lease outlives the computation: it is returned when the receiver has acknowledged everything, or the transfer has
failed. Either side's failure ends the other's part through the same two calls.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from typing import Protocol

from engine.engine import Engine
from engine.sequence import Sequence
from kvtransfer.link import Link
from model.kv_store import SequenceKV
from pdserve import logs
from pdserve.errors import Cancelled, PdserveError, ResourceExhausted, TransferError
from pdserve.tracing import Trace
from pdserve.types import Finish, Owner, SampledToken, SamplingParams, Ticket
from prefill_worker.release import Release

_log = logs.logger("prefill")


class Reports(Protocol):
    def terminal(self, owner: Owner, outcome: Finish | PdserveError | None) -> None: ...


class PrefillService:
    """Commands come from the session thread; the rest runs on the engine's and the link's threads."""

    def __init__(self, engine: Engine, link: Link, reports: Reports, trace: Trace, max_queued: int, mode: str) -> None:
        """`mode`: when computed KV is sent, one of pdserve.config.TRANSFER_MODES."""
        self._engine = engine
        self._link = link
        self._reports = reports
        self._trace = trace
        self._max_queued = max_queued
        self._mode = mode
        self._exports: dict[Owner, Export] = {}

    def start(
        self,
        owner: Owner,
        prompt_ids: ListLike[int],
        output_ids: ListLike[int],
        params: SamplingParams,
        ticket: Ticket,
    ) -> None:
        """Queue the prompt (and the output accepted by earlier attempts) for computation."""
        if len(self._exports) >= self._max_queued:
            full = ResourceExhausted(f"{len(self._exports)} prompts are queued, the most this worker takes")
            self._reports.terminal(owner, full)
            return
        if owner in self._exports:
            again = TransferError(f"an earlier epoch of {owner} has not ended at this worker")
            self._reports.terminal(owner, again)
            return
        export = Export(self, owner, ticket, self._mode)
        sequence = Sequence(
            owner, prompt_ids, output_ids, params, export, stops_after_prefill=True, exports_kv=True, index=owner.output
        )
        self._exports[owner] = export
        try:
            export.queue(sequence)
        except PdserveError as error:
            self.ended(owner, error)
            return
        self._engine.submit(sequence)
        export.submitted()

    def abort(self, owner: Owner) -> None:
        export = self._exports.get(owner)
        if export is not None:
            export.abort(Cancelled(f"{owner} was aborted"))

    def owners(self) -> list[Owner]:
        return list(self._exports)

    def ended(self, owner: Owner, outcome: PdserveError | None) -> None:
        del self._exports[owner]
        self._reports.terminal(owner, outcome)


class Export:
    """One prompt's way from the engine to the wire: the sequence's sink and the transfer's end."""

    def __init__(self, service: PrefillService, owner: Owner, ticket: Ticket, mode: str) -> None:
        self._service = service
        self._engine = service._engine
        self._link = service._link
        self._trace = service._trace
        self._owner = owner
        self._ticket = ticket
        self._transfer = ticket.transfer_id.hex()
        self._release = Release(mode, self._engine.store.shape.layer_count, self._give)
        self._transfer_ended = False
        self._transfer_error: PdserveError | None = None
        self._kv: SequenceKV | None = None

    def queue(self, sequence: Sequence) -> None:
        """Take up the ticket. Raises ResourceExhausted or Unavailable. The session thread."""
        self._link.open_sender(
            self._ticket,
            self._owner,
            sequence.token_ids,
            sequence.known,
            self,
            self._on_transfer_end,
            queued=True,
        )

    def submitted(self) -> None:
        """The engine has the sequence. If the transfer has ended already, it was told so too early. The session
        thread."""
        if self._transfer_ended:
            self._release_lease()

    def abort(self, error: PdserveError) -> None:
        """End it, whatever its state: what is computed and waits for its receiver is the link's. The session thread."""
        self._engine.abort(self._owner, error)
        self._link.abort_sender(self._ticket.transfer_id, error)

    # The engine's thread.

    def on_leased(self, sequence: Sequence) -> None:
        self._kv = self._engine.sequence_kv(sequence)
        self._link.start_sender(self._ticket.transfer_id)

    def on_layer(self, sequence: Sequence, layer: int, start: int, stop: int) -> None:
        self._trace.record("layer_computed", transfer=self._transfer, layer=layer, start=start, stop=stop)
        self._release.computed(layer, start, stop)

    def on_tokens(self, sequence: Sequence, tokens: ListLike[SampledToken]) -> None:
        self._trace.record("prefill_computed", transfer=self._transfer, request_id=self._owner.request_id)
        self._release.finish()
        self._link.commit(self._ticket.transfer_id, tokens)

    def on_preempted(self, sequence: Sequence) -> None:
        raise AssertionError("a sequence that exports its KV is pinned")

    def on_abort(self, sequence: Sequence, error: PdserveError) -> None:
        self._link.abort_sender(self._ticket.transfer_id, error)

    def on_end(self, sequence: Sequence, outcome: Finish | PdserveError | None) -> None:
        error = outcome if isinstance(outcome, PdserveError) else self._transfer_error
        if error is not None:
            self._link.abort_sender(self._ticket.transfer_id, error)  # it may have ended while still queued
            _log.info("prefill ended early", owner=self._owner, error=error)
        self._service.ended(self._owner, error)

    def _give(self, layer: int, start: int, stop: int) -> None:
        self._link.layer_ready(self._ticket.transfer_id, layer, start, stop)

    # The link's thread.

    def read_into(self, layer: int, start: int, stop: int, out: memoryview) -> None:
        assert self._kv is not None, "nothing is ready before the blocks are leased"
        self._kv.read_into(layer, start, stop, out)

    def _on_transfer_end(self, error: PdserveError | None) -> None:
        self._transfer_error = error
        self._transfer_ended = True
        self._release_lease()

    def _release_lease(self) -> None:
        if self._transfer_error is not None:
            self._engine.abort(self._owner, self._transfer_error)
        self._engine.unpin(self._owner)
