"""Clients: each makes one request, may change its mind, and goes to another router when it loses its own."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from bench.simulation.network import Fabric, Wire
from bench.simulation.oracle import Script, Violation
from bench.simulation.router import RouterStream, SimulatedRouter
from bench.simulation.timeline import Process
from pdserve.errors import (
    AlreadyExists,
    Cancelled,
    FailedPrecondition,
    InternalError,
    PdserveError,
    ResourceExhausted,
    Unavailable,
)
from pdserve.types import Finish, FinishReason, SamplingParams
from router.actions import Accept, End, Request

_RETRY_S = 0.1
_KEEPALIVE_S = 2.0  # after which a client notices that its router is gone without a word
STOP_TEXT = "stop"
# How a request may end badly: everything else would be a bug of ours or blame the client for what it did not do.
_ALLOWED_ERRORS = (Cancelled, ResourceExhausted, Unavailable)


@dataclass(frozen=True, slots=True)
class JobPlan:
    """One request. `stop_at`: one of its stop ids is the oracle's output token with this number. `text_stop_at`: the
    router finds a stop string once it has this many tokens. `leaves_after_s`: the client goes away then, and comes back
    with the same request after `returns_after_s`, if that is set."""

    request_id: str
    submit_s: float
    prompt_count: int
    params: SamplingParams
    stop_at: int | None = None
    text_stop_at: int | None = None
    leaves_after_s: float | None = None
    returns_after_s: float | None = None


class Job:
    """A client with its request. `outcome` is what it ended with, once."""

    def __init__(
        self,
        plan: JobPlan,
        script: Script,
        client: Process,
        fabric: Fabric,
        rng: random.Random,
        routers: Callable[[], list[SimulatedRouter]],
    ) -> None:
        self.plan = plan
        self.script = script
        self.outcome: Finish | PdserveError | None = None
        self.exact = True
        self.calls = 0
        self.attempts = 0
        self._received: list[int] = []
        self._client = client
        self._fabric = fabric
        self._rng = rng
        self._routers = routers
        self._call: _Call | None = None

    def start(self) -> None:
        """Call a router, or wait for one."""
        if self.outcome is not None:
            return
        routers = self._routers()
        if not routers:
            self._client.after(_RETRY_S, "client retries", self.start)
            return
        self.calls += 1
        self._call = _Call(self, self._rng.choice(routers), tuple(self._received), self._client, self._fabric)
        if self.plan.leaves_after_s is not None and self.calls == 1:
            self._client.after(self.plan.leaves_after_s, "client leaves", self.leave)

    def leave(self) -> None:
        """The client goes away, or its deadline has passed: the call is abandoned, whatever its state."""
        if self.outcome is not None or self._call is None:
            return
        self._call.abandon()
        self._call = None
        if self.plan.returns_after_s is None:
            self._end(Cancelled("the client went away"))
        else:
            self._received = []  # it begins anew
            self._client.after(self.plan.returns_after_s, "client returns", self.start)

    def on_event(self, call: _Call, event: Accept | End) -> None:
        if call is not self._call or self.outcome is not None:
            return
        if isinstance(event, Accept):
            self._received += [token.token_id for token in event.tokens]
            return
        if isinstance(event.outcome, AlreadyExists) and self.calls > 1:  # the router has not noticed the end of a call
            self._client.after(_RETRY_S, "client retries", self.start)
            return
        self.exact, self.attempts = event.exact, event.attempts
        self._check(event.outcome)
        self._end(event.outcome)

    def on_lost(self, call: _Call) -> None:
        if call is self._call and self.outcome is None:
            self._client.after(self._rng.uniform(0.0, _RETRY_S), "client goes on", self.start)

    def _end(self, outcome: Finish | PdserveError) -> None:
        if self.outcome is not None:
            raise Violation(f"{self.plan.request_id} ended twice: {self.outcome} and {outcome}")
        self.outcome = outcome

    def _check(self, outcome: Finish | PdserveError) -> None:
        name, received = self.plan.request_id, tuple(self._received)
        if isinstance(outcome, PdserveError):
            if not isinstance(outcome, _ALLOWED_ERRORS) and not _convicted(outcome):
                raise Violation(f"{name} ended with {outcome!r}")
        elif outcome.stop is not None:
            if len(received) < (self.plan.text_stop_at or 0):
                raise Violation(f"{name} was stopped by its text after {len(received)} tokens")
        elif received != self.script.output_ids or outcome != self.script.finish:
            right = self.script.output_ids, self.script.finish
            raise Violation(f"{name} got {received} and {outcome}, the oracle says {right}")
        if not self.exact:
            raise Violation(f"{name} is said to be inexact, and all workers are alike")


def _convicted(error: PdserveError) -> bool:
    """Whether a request was given up because workers were lost under it, three times in a row."""
    return isinstance(error, InternalError | FailedPrecondition) and "crashed" in str(error)


class _Call:
    """One call of a job at one router."""

    def __init__(
        self, job: Job, router: SimulatedRouter, received: tuple[int, ...], client: Process, fabric: Fabric
    ) -> None:
        self._job = job
        self._router = router
        self._client = client
        self._over = False
        self._wire = Wire(fabric, client, router.process, self._closed)
        script, stop_at = job.script, job.plan.text_stop_at
        self._stream = RouterStream(
            script, len(received), self._wire, router.process, lambda event: job.on_event(self, event)
        )
        self._request = Request(script.request_id, script.prompt_ids, script.params, (received,))
        if stop_at is not None:  # the front looks for stop strings in what comes
            self._stream.watch(stop_at, self._found_stop)
        self._client.after(_KEEPALIVE_S, "timer", self._watch)
        self._wire.send(client, "generate", self._generate, script.request_id)

        self._watch()

    def _generate(self) -> None:
        received, stop_at = len(self._request.received_ids[0]), self._job.plan.text_stop_at
        self._router.generate(self._request, self._stream, resumed=received > 0)
        if stop_at is not None and received >= stop_at:
            self._found_stop()

    def abandon(self) -> None:
        self._over = True
        self._wire.close(self._client)

    def _watch(self) -> None:
        if self._over:
            return
        if self._router.process.alive:
            self._client.after(_KEEPALIVE_S, "timer", self._watch)
        else:
            self.abandon()
            self._job.on_lost(self)

    def _closed(self, end: Process) -> None:
        if end is self._client:
            self._over = True
            self._job.on_lost(self)
        else:
            self._router.control.abandon(self._stream)

    def _found_stop(self) -> None:
        finish = Finish(FinishReason.STOP, stop=STOP_TEXT)
        self._router.process.after(0.0, "stop string", lambda: self._router.control.finish(self._stream, 0, finish))
