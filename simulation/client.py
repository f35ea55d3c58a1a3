"""Clients: each makes one request, may change its mind, and goes to another router when it loses its own.

The client library's own fold and resumption say what a stream has brought and what the next router is told.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from pdserve.client.resume import MAX_LOSSES, ConnectionLost, may_resume, resumption
from pdserve.client.stream import OutputResult, Result, StreamFold, TokenLogprob
from pdserve.errors import (
    AlreadyExists,
    Cancelled,
    FailedPrecondition,
    InternalError,
    PdserveError,
    ResourceExhausted,
    Unavailable,
)
from pdserve.rpc import inference_pb2 as pb
from pdserve.types import SamplingParams
from simulation.front import FrontCall, SimulatedStream
from simulation.network import Fabric, Wire
from simulation.oracle import Provenance, Script, Violation
from simulation.router import SimulatedRouter
from simulation.text import answer
from simulation.timeline import Process

_RETRY_S = 0.1
_LOOK_S = 20.0  # how long a router is looked for that serves
_KEEPALIVE_S = 2.0  # after which a client notices that its router is gone without a word
# How a request may end badly: everything else would be a bug of ours or blame the client for what it did not do.
_ALLOWED_ERRORS = (ResourceExhausted, Unavailable)


@dataclass(frozen=True, slots=True)
class JobPlan:
    """One request for `n` outputs. `stop_at`: one of its stop ids is the first output's token with this number.
    `text_stop_at`: one of its stop strings ends there. `leaves_after_s`: the client goes away then, and comes back with
    the same request after `returns_after_s`, if that is set. `pace_s`: how long it takes to read a response.
    `poison_at`: a worker that computes this position of it crashes."""

    request_id: str
    submit_s: float
    prompt_count: int
    params: SamplingParams
    n: int = 1
    stop_at: int | None = None
    text_stop_at: int | None = None
    leaves_after_s: float | None = None
    returns_after_s: float | None = None
    pace_s: float = 0.0
    poison_at: int | None = None


class Job:
    """A client with its request. `outcome` is what it ended with, once."""

    def __init__(
        self,
        plan: JobPlan,
        scripts: tuple[Script, ...],
        stops: tuple[str, ...],
        client: Process,
        fabric: Fabric,
        rng: random.Random,
        routers: Mapping[str, SimulatedRouter],
    ) -> None:
        self.plan = plan
        self.scripts = scripts
        self.stops = stops
        self.outcome: Result | PdserveError | None = None
        self.calls = 0
        self.losses = 0
        self.provenance: dict[tuple[int, int], Provenance | None] = {}
        self._fold = StreamFold(0.0)
        self._client = client
        self._fabric = fabric
        self._rng = rng
        self._routers = routers
        self._call: _Call | None = None

    def start(self) -> None:
        """Call a router, or wait for one."""
        alive = [router for router in self._routers.values() if router.process.alive]
        if self.outcome is None and alive:
            self._open(self._rng.choice(alive), pb.GenerateRequest(request_id=self.plan.request_id))
        elif self.outcome is None:
            self._client.after(_RETRY_S, "client retries", self.start)

    def leave(self) -> None:
        """The client goes away, or its deadline has passed: the call is abandoned, whatever its state."""
        if self.outcome is not None:
            return
        if self._call is not None:
            self._call.abandon()
            self._call = None
        if self.plan.returns_after_s is None:
            self._end(Cancelled("the client went away"))
        else:
            self._fold = StreamFold(0.0)  # it begins anew
            self.provenance.clear()
            self._client.after(self.plan.returns_after_s, "client returns", self.start)

    def on_response(self, call: _Call, response: pb.GenerateResponse) -> None:
        if call is not self._call or self.outcome is not None:
            return
        self._fold.accept(response, self._client.timeline.now())
        if self._fold.result is not None:
            self._keep_provenance()
            self._check(self._fold.result)
            self._end(self._fold.result)

    def on_error(self, call: _Call, error: PdserveError) -> None:
        """The call has failed: ask elsewhere, as the library does, or give up."""
        if call is not self._call or self.outcome is not None:
            return
        self._call = None
        if isinstance(error, AlreadyExists) and self.calls > 1:  # the router has not noticed the end of a call
            self._client.after(_RETRY_S, "client retries", self.start)
            return
        self.losses += 1
        if may_resume(error, len(self._routers) > 1) and self.losses <= MAX_LOSSES:
            self._keep_provenance(call)
            until_s = self._client.timeline.now() + _LOOK_S
            look = partial(self._look, error, until_s, self._fold)
            self._client.after(self._rng.uniform(0.0, _RETRY_S), "client goes on", look)
            return
        if not isinstance(error, _ALLOWED_ERRORS) and not _convicted(error):
            raise Violation(f"{self.plan.request_id} ended with {error!r}")
        self._end(error)

    def _look(self, error: PdserveError, until_s: float, fold: StreamFold) -> None:
        """Find a router that serves and go on there."""
        if self.outcome is not None or fold is not self._fold:
            return
        serving = [router for router in self._routers.values() if router.serves]
        if serving:
            if self._fold.started is not None:
                self._fold.resume()
            request = resumption(pb.GenerateRequest(request_id=self.plan.request_id), self._fold)
            self._open(self._rng.choice(serving), request)
        elif self._client.timeline.now() < until_s:
            self._client.after(_RETRY_S, "client retries", partial(self._look, error, until_s, fold))
        else:
            self._end(error)

    def _open(self, router: SimulatedRouter, request: pb.GenerateRequest) -> None:
        self.calls += 1
        self._call = _Call(self, router, request, self._client, self._fabric)
        if self.plan.leaves_after_s is not None and self.calls == 1:
            self._client.after(self.plan.leaves_after_s, "client leaves", self.leave)

    def _keep_provenance(self, call: _Call | None = None) -> None:
        """Of the tokens that have come."""
        call = call or self._call
        if call is not None and call.stream is not None:
            self.provenance.update(call.stream.provenance)

    def _end(self, outcome: Result | PdserveError) -> None:
        if self.outcome is not None:
            raise Violation(f"{self.plan.request_id} ended twice: {self.outcome} and {outcome}")
        self.outcome = outcome
        self._call = None

    def _check(self, result: Result) -> None:
        name = self.plan.request_id
        if len(result.outputs) != len(self.scripts):
            raise Violation(f"{name} has {len(result.outputs)} outputs, and asked for {len(self.scripts)}")
        for script, output in zip(self.scripts, result.outputs, strict=True):
            right = answer(script, self.stops)
            expected = OutputResult(
                text=right.text,
                token_ids=script.output_ids[: right.token_count],
                logprobs=tuple(
                    TokenLogprob(token.logprob, token.top_logprobs)
                    for token in script.tokens[: right.token_count]
                    if token.logprob is not None
                ),
                finish_reason=right.finish.reason,
                stop=right.finish.stop if right.finish.stop is not None else right.finish.stop_token_id,
            )
            if output != expected:
                raise Violation(f"{name}[{script.output}] got {output}, right is {expected}")
            if result.exact:
                self._check_exact(script.output, right.token_count)

    def _check_exact(self, output: int, count: int) -> None:
        """That one kind of worker has computed the prompt for every token, and one kind the output."""
        known = [found for position in range(count) if (found := self.provenance.get((output, position)))]
        prompt = frozenset[int]().union(*(found.prompt for found in known))
        said = frozenset[int]().union(*(found.output for found in known))
        if len(prompt) > 1 or len(said) > 1:
            where = "the prompt" if len(prompt) > 1 else "the output"
            raise Violation(f"{self.plan.request_id}[{output}] is said to be exact, and two kinds computed {where}")


def _convicted(error: PdserveError) -> bool:
    """Whether a request was given up because workers were lost under it, three times in a row."""
    return isinstance(error, InternalError | FailedPrecondition) and "crashed" in str(error)


class _Call:
    """One call of a job at one router."""

    def __init__(
        self, job: Job, router: SimulatedRouter, request: pb.GenerateRequest, client: Process, fabric: Fabric
    ) -> None:
        self._job = job
        self._router = router
        self._request = request
        self._client = client
        self._over = False
        self._front: FrontCall | None = None
        self.stream: SimulatedStream | None = None
        self._wire = Wire(fabric, client, router.process, self._closed)
        self._wire.send(client, "generate", self._generate, request.request_id)
        self._watch()

    def on_response(self, response: pb.GenerateResponse) -> None:
        self._job.on_response(self, response)
        self._over |= self._job.outcome is not None

    def on_error(self, error: PdserveError) -> None:
        self._over = True
        self._job.on_error(self, error)

    def _generate(self) -> None:
        job = self._job
        self._front = self._router.generate(self._request, job.scripts, job.stops, self._wire, self, job.plan.pace_s)
        self.stream = self._front.stream if self._front is not None else None

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
            self._job.on_error(self, ConnectionLost("the router is gone"))

    def _closed(self, end: Process) -> None:
        if end is not self._client:
            if self._front is not None:
                self._front.end()
        elif not self._over:
            self._over = True
            self._job.on_error(self, ConnectionLost("the connection broke"))
