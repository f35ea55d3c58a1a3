"""Where a prompt's KV leaves the engine for the wire. Used on the engine's thread only, and past the role: that a layer
is computed needs no decision, and may wait for none.
"""

from __future__ import annotations

from typing import Protocol

from engine.sequence import SequenceKV
from pdserve.tracing import Trace
from pdserve.types import Owner, Ticket
from prefill_worker.release import Release


class SendingLink(Protocol):
    """What an outlet needs of a link. Both only enqueue."""

    def start_sender(self, transfer_id: bytes, reader: SequenceKV) -> None: ...

    def layer_ready(self, transfer_id: bytes, layer: int, start: int, stop: int) -> None: ...


class LinkOutlet:
    """A KVOutlet: one prompt's, of `token_count` tokens. `mode`: one of pdserve.config.TRANSFER_MODES."""

    def __init__(
        self,
        link: SendingLink,
        trace: Trace,
        mode: str,
        layer_count: int,
        owner: Owner,
        ticket: Ticket,
        token_count: int,
    ) -> None:
        self._link = link
        self._trace = trace
        self._owner = owner
        self._transfer_id = ticket.transfer_id
        self._name = ticket.transfer_id.hex()
        self._release = Release(mode, layer_count, token_count, self._give)

    def opened(self, kv: SequenceKV) -> None:
        """The turn of a queued sender has come."""
        self._link.start_sender(self._transfer_id, kv)

    def layer_ready(self, layer: int, start: int, stop: int) -> None:
        self._trace.record("layer_computed", transfer=self._name, layer=layer, start=start, stop=stop)
        if self._release.completes(layer, stop):
            self._trace.record("prefill_computed", transfer=self._name, request_id=self._owner.request_id)
        self._release.computed(layer, start, stop)

    def _give(self, layer: int, start: int, stop: int) -> None:
        self._link.layer_ready(self._transfer_id, layer, start, stop)
