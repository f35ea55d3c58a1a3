"""What must hold after every event, whatever has happened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvtransfer.incoming import IncomingTransfer
from kvtransfer.outgoing import OutgoingTransfer
from router.in_flight import AttemptPhase
from simulation.executor import CheckedKV
from simulation.oracle import Violation
from simulation.router import SimulatedRouter
from simulation.worker import SimulatedWorker

_OVER_LIMIT = 2  # a session's last word and the connection's end come after what it has sent


def check_worker(worker: SimulatedWorker, max_unsent: int) -> None:
    """The pool's books, the blocks of transfers under way, the limits of all queues, and nobody's bug swallowed."""
    if worker.pool.touched:
        worker.pool.check_integrity()
        worker.pool.touched = False
    name = worker.process.name
    for owner, kv in _views(worker):
        leased = worker.pool.leased_to(owner)
        if leased[: len(kv.blocks)] != kv.blocks and not set(kv.blocks) <= set(leased):
            raise Violation(f"{name}: a transfer of {owner} is under way, and its blocks are not leased any more")
    if worker.link._stats.internal_errors:
        raise Violation(f"{name}: the link met an error it should not")
    for what, count in (
        ("prompts queued", len(worker.control._prefill.owners)),
        ("requests queued", len(worker.control._decode.owners)),
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
    streams = router.control.stream_count
    requests = len({entry.request.request_id for entry in dispatch.entries()})
    if streams != requests:
        raise Violation(f"{router.process.name}: {requests} requests have {streams} streams")
    for stream in router.calls:
        if stream.waiting_count > stream.most_events:
            raise Violation(f"{router.process.name}: {stream.waiting_count} events wait for {stream.request_id}")
    for entry in dispatch.entries():  # the timer looks after those that wait for a place
        waits = entry.phase is AttemptPhase.PLACING or (
            entry.attempt is not None
            and entry.attempt.decode is not None
            and router.control.has_session(entry.attempt.decode)
        )
        if not waits:
            raise Violation(f"{router.process.name}: {entry.request.request_id} waits for nobody")
    limit = 2 * router.config.max_requests  # with another router's
    if len(dispatch) > limit:
        raise Violation(f"{router.process.name}: {len(dispatch)} outputs, the limit is {limit}")


def check_calm(counts: Counter[str], nothing_lost: bool) -> None:
    """Transfers have borne what happened: each had one sender to its end. `nothing_lost`: the wire lost no frame, and
    nobody was away, so nothing was asked for twice either."""
    for what in ("another sender", "local prefill"):
        if counts[what]:
            raise Violation(f"a transfer lost its sender, and nothing was wrong: {counts[what]} {what}")
    if nothing_lost and counts["frame sent again"]:
        raise Violation(f"{counts['frame sent again']} frames were sent again, and none was lost")


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
    sending = [each._reader for each in exchange._outgoing.values() if not each.ended and each._reader is not None]
    receiving = [each._writer for each in exchange._incoming.values() if not each.ended and each._writer is not None]
    return [(view.owner, view) for view in (*sending, *receiving)]
