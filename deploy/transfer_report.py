"""What a request's KV transfer cost, read from the traces of both sides (one host, one monotonic clock)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from deploy.cluster import LocalCluster
from pdserve.tracing import TraceEvent


@dataclass(frozen=True, slots=True)
class TransferReport:
    """`hidden_share`: of the time in which a frame was on its way (handed to the wire, not yet verified and written),
    the part that lay before the end of the prefill computation. Only the rest can delay the first token.
    From that end, `visible_ms` is until the last frame was written, `hand_over_ms` until the decode worker had verified
    all.
    """

    kv_bytes: int
    frame_count: int
    hidden_share: float
    visible_ms: float
    hand_over_ms: float


def transfer_report(cluster: LocalCluster, request_id: str, since_ns: int = 0) -> TransferReport:
    """The report of a request's first transfer. Raises LookupError where no worker has a trace of it since then."""
    events = [event for worker in cluster.worker_ids for event in cluster.trace_events(worker, since_ns)]
    computed = next((e for e in events if e.name == "prefill_computed" and e.fields["request_id"] == request_id), None)
    if computed is None:
        raise LookupError(f"no trace of a prefill for request {request_id}")
    transfer = computed.fields["transfer"]
    mine = [event for event in events if event.fields.get("transfer") == transfer]
    sent = {_frame(event): event for event in mine if event.name == "frame_sent"}
    received = {_frame(event): event for event in mine if event.name == "frame_received"}
    intervals = [(sent[frame].time_ns, received[frame].time_ns) for frame in sent.keys() & received.keys()]
    busy_ns = _covered(intervals)
    hidden_ns = _covered((begin, min(end, computed.time_ns)) for begin, end in intervals)
    return TransferReport(
        kv_bytes=sum(event.fields["bytes"] for event in sent.values()),
        frame_count=len(sent),
        hidden_share=hidden_ns / busy_ns if busy_ns else 1.0,
        hand_over_ms=max((e.time_ns - computed.time_ns for e in mine if _is_verified(e)), default=0) / 1e6,
        visible_ms=max((end - computed.time_ns for _, end in intervals if end > computed.time_ns), default=0) / 1e6,
    )


def _is_verified(event: TraceEvent) -> bool:
    return event.name == "transfer_complete" and event.fields["side"] == "receiver"


def _frame(event: TraceEvent) -> tuple[int, int, int]:
    return event.fields["layer"], event.fields["start"], event.fields["stop"]


def _covered(intervals: Iterable[tuple[int, int]]) -> int:
    """The length of the union of half-open intervals."""
    covered, reached = 0, 0
    for begin, end in sorted(intervals):
        covered += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return covered
