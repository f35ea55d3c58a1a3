"""What must hold after every event, whatever has happened."""

from __future__ import annotations

from collections.abc import Iterable

from kvtransfer.incoming import IncomingTransfer
from kvtransfer.outgoing import OutgoingTransfer
from router.in_flight import Phase
from simulation.executor import CheckedKV
from simulation.oracle import Violation
from simulation.router import SimulatedRouter
from simulation.worker import SimulatedWorker

_OVER_LIMIT = 2  # a session's first message and the connection's end are beside its outbox


def check_worker(worker: SimulatedWorker, max_unsent: int) -> None:
    """The pool's books, the blocks of transfers under way, the limits of all queues, and nobody's bug swallowed."""
    if worker.engine.pool_touched:
        worker.engine.pool.check_integrity()
        worker.engine.pool_touched = False
    name = worker.process.name
    for owner, kv in _views(worker):
        leased = worker.engine.pool.leased_to(owner)
        if leased[: len(kv.blocks)] != kv.blocks and not set(kv.blocks) <= set(leased):
            raise Violation(f"{name}: a transfer of {owner} is under way, and its blocks are not leased any more")
    if worker.link._stats.internal_errors:
        raise Violation(f"{name}: the link met an error it should not")
    for what, count in (
        ("prompts queued", len(worker.prefill._exports)),
        ("requests queued", len(worker.decode._imports)),
        ("outgoing transfers", worker.link._outgoing.taken),
        ("incoming transfers", worker.link._incoming.taken),
    ):
        if count > worker.max_queued:
            raise Violation(f"{name}: {count} {what}, the limit is {worker.max_queued}")
    for wire in worker.process.wires:
        if max(wire.unread.values()) > max_unsent + _OVER_LIMIT:
            raise Violation(f"{name}: a session has more unread messages than its outbox takes")


def check_router(router: SimulatedRouter) -> None:
    """Each request in flight has its stream and somebody or some time to wait for; there are not more than allowed."""
    dispatch = router.control.dispatch
    streams = len(router.control._streams)
    requests = len({entry.request.request_id for entry in dispatch._requests.values()})
    if streams != requests:
        raise Violation(f"{router.process.name}: {requests} requests have {streams} streams")
    for stream in router.calls:
        if stream.waiting_count > stream.most_events:
            raise Violation(f"{router.process.name}: {stream.waiting_count} events wait for {stream.request_id}")
    for entry in dispatch._requests.values():  # the timer looks after those that wait for a place
        waits = entry.phase is Phase.PLACING or (
            entry.attempt is not None and entry.attempt.decode in router.control._sessions
        )
        if not waits:
            raise Violation(f"{router.process.name}: {entry.request.request_id} waits for nobody")
    limit = 2 * router.config.max_requests  # with another router's
    if len(dispatch) > limit:
        raise Violation(f"{router.process.name}: {len(dispatch)} outputs, the limit is {limit}")


def check_credit(sending: SimulatedWorker, workers: Iterable[SimulatedWorker]) -> None:
    """It has not spent more than its receivers have granted."""
    for transfer_id, outgoing in sending.link._exchange._outgoing.items():
        for worker in workers:
            incoming = worker.link._exchange._incoming.get(transfer_id)
            if incoming is not None:
                _compare(outgoing, incoming)


def _compare(outgoing: OutgoingTransfer, incoming: IncomingTransfer) -> None:
    sender, receiver = outgoing._sender, incoming._receiver
    if outgoing._offer.epoch == receiver.epoch and sender.credit.spent > receiver.credit.granted:
        raise Violation(f"{sender.credit.spent} bytes sent, {receiver.credit.granted} granted")


def _views(worker: SimulatedWorker) -> list[tuple[object, CheckedKV]]:
    """What transfers that have not ended may still read or write."""
    exchange = worker.link._exchange
    views: list[tuple[object, CheckedKV]] = []
    for owner, export in worker.prefill._exports.items():
        outgoing = exchange._outgoing.get(export._ticket.transfer_id)
        if outgoing is not None and not outgoing.ended and export._kv is not None:
            views.append((owner, export._kv))
    for incoming in exchange._incoming.values():
        if not incoming.ended and incoming._writer is not None:
            views.append((incoming._writer.owner, incoming._writer))
    return views
