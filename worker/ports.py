"""What a worker's control acts through. The engine, the link and the session's streams are behind it; so is a
simulation's world."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListLike
from typing import Protocol

from engine.sequence import Sequence, SequenceKV
from kvtransfer.incoming import OnNeedBlocks, OnReceived, OnSenderLost
from kvtransfer.outgoing import OnSent
from pdserve.errors import PdserveError
from pdserve.rpc import cluster_pb2 as pb
from pdserve.types import Owner, SampledToken, Ticket


class Turns(Protocol):
    """The thread that owns a control."""

    def post(self, call: Callable[[], None]) -> None:
        """Any thread: have it called there, after what was posted before."""
        ...

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        """That thread: have it called there then."""
        ...


class EngineCommands(Protocol):
    """An engine, seen from other threads: all of these only enqueue."""

    def submit(self, sequence: Sequence) -> None: ...

    def expect(self, owner: Owner) -> None: ...

    def forget(self, owner: Owner) -> None: ...

    def abort(self, owner: Owner, error: PdserveError) -> None: ...

    def deliver(self, owner: Owner, tokens: ListLike[SampledToken]) -> None: ...

    def take_over(self, owner: Owner, computed: int) -> None: ...

    def unpin(self, owner: Owner) -> None: ...


class LinkCommands(Protocol):
    """A link, seen from other threads: all of these only enqueue, and the callbacks come on the link's thread."""

    def open_sender(
        self, ticket: Ticket, owner: Owner, token_ids: ListLike[int], token_stop: int, on_end: OnSent
    ) -> None: ...

    def commit(self, transfer_id: bytes, tokens: ListLike[SampledToken]) -> None: ...

    def abort_sender(self, transfer_id: bytes, error: PdserveError) -> None: ...

    def expect(
        self,
        owner: Owner,
        token_ids: ListLike[int],
        on_need_blocks: OnNeedBlocks,
        on_end: OnReceived,
        *,
        on_sender_lost: OnSenderLost | None = None,
    ) -> Ticket: ...

    def blocks_leased(self, transfer_id: bytes, writer: SequenceKV) -> None: ...

    def sender_lost(self, transfer_id: bytes, epoch: int, error: PdserveError) -> None: ...

    def renew(self, transfer_id: bytes, on_epoch: Callable[[int], None]) -> None: ...

    def take_over(self, transfer_id: bytes) -> None: ...

    def abort_receiver(self, transfer_id: bytes, error: PdserveError) -> None: ...


class Session(Protocol):
    """One router's open session, seen from the worker. `router`: its incarnation."""

    router: str

    def send(self, message: pb.WorkerMessage) -> None:
        """Pass a message on, in order, without blocking."""
        ...


class Observer(Protocol):
    """Who waits for what happens to a worker as a whole."""

    def left(self, owners_left: int) -> None:
        """It was told to leave, and is done; or its time is over, and so many are not."""
        ...
