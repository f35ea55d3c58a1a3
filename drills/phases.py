"""Where a request stands: the moments that faults are aimed at, waited for from outside.

The request is a probe: while it is on its way, no other has a KV transfer, so whatever the workers' traces show since
it was sent is its own. Times compare, because all processes are on one host.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from drills.arena import Arena, wait_for
from drills.load import Recording
from pdserve.rpc.inference_pb2 import WorkerStatus

PHASE_TIMEOUT_S = 20.0


class ProbeSight:
    """Looks for one request that is about to be sent. What does not come in time, or before the request has ended, is
    None. Where a cluster shows no traces, only `queued` is ever seen."""

    def __init__(self, arena: Arena, recording: Recording) -> None:
        self.recording = recording
        self._arena = arena
        self._since_ns = time.monotonic_ns()

    def placed(self) -> WorkerStatus | None:
        """The decode worker that was chosen for it: no KV has moved yet, at best."""

        def look() -> WorkerStatus | None:
            lines = self._arena.lines_of(self.recording.request_id, "attempt started")
            return self._worker(lines[-1]["decode"]) if lines else None

        return self._wait(look)

    def queued(self) -> WorkerStatus | None:
        """The prefill worker that was told to compute it."""
        return self._wait(lambda: self._arena.busy("prefill"))

    def receiving(self) -> WorkerStatus | None:
        """The decode worker that has the first of its frames."""
        return self._wait(lambda: self._with("decode", "frame_received"))

    def received(self) -> WorkerStatus | None:
        """The decode worker that has all of its KV."""
        return self._wait(lambda: self._with("decode", "transfer_complete"))

    def sender(self) -> WorkerStatus | None:
        """The prefill worker that has sent frames of it."""
        return self._with("prefill", "frame_sent")

    def seen(self, role: str, event: str, until_s: float) -> bool:
        """Whether a worker of the role that still lives had this event before `until_s`."""
        return any(
            each.name == event and each.time_ns < until_s * 1e9
            for worker in self._arena.alive(role)
            for each in self._arena.trace(worker.worker_id, self._since_ns)
        )

    def _with(self, role: str, event: str) -> WorkerStatus | None:
        for worker in self._arena.alive(role):
            if any(each.name == event for each in self._arena.trace(worker.worker_id, self._since_ns)):
                return worker
        return None

    def _worker(self, incarnation: str) -> WorkerStatus | None:
        return next((each for each in self._arena.workers() if each.incarnation == incarnation), None)

    def _wait(self, look: Callable[[], WorkerStatus | None]) -> WorkerStatus | None:
        found: list[WorkerStatus] = []

        def seen() -> bool:
            worker = look()
            if worker is not None:
                found.append(worker)
            return bool(found) or self.recording.ended_s is not None

        wait_for(seen, PHASE_TIMEOUT_S)
        return found[0] if found else None
