"""Clients: each makes one request, may leave and come back, reads at its pace, and checks what it got.

The client library's own machine says what a stream does next: which router it opens or asks, how long it waits, what it
delivers and how it ends. What is of this module is how that is carried out, and what the client wants.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.client.resume import (
    AskRouter,
    ConnectionLost,
    Deliver,
    Done,
    Fail,
    OpenCall,
    ResumeMachine,
    Routers,
    StreamAction,
    Wait,
)
from pdserve.client.stream import Delta, OutputResult, Result, TokenLogprob
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
        self.provenance: dict[tuple[int, int], Provenance | None] = {}
        self._client = client
        self._fabric = fabric
        self._hosts = routers
        self._routers = Routers(len(routers), rng.randrange(len(routers)))
        self._machine = self._begin()
        self._delivered: list[Delta] = []
        self._call: _Call | None = None

    def start(self) -> None:
        """Call a router. While none is there, the client waits."""
        if self.outcome is not None:
            return
        if not any(router.process.alive for router in self._hosts.values()):
            self._client.after(_RETRY_S, "client retries", self.start)
            return
        self._machine = self._begin()
        self._delivered = []
        self.provenance.clear()
        self._do(self._machine, self._machine.start())

    def leave(self) -> None:
        """The client goes away, whatever the state of its call."""
        if self.outcome is not None:
            return
        if self._call is not None:
            self._call.abandon()
            self._call = None
        self._machine.cancel()
        if self.plan.returns_after_s is None:
            self._do(self._machine, self._machine.on_cancelled())
        else:
            self._machine = self._begin()
            self._client.after(self.plan.returns_after_s, "client returns", self.start)

    # What a call brings.

    def on_response(self, call: _Call, response: pb.GenerateResponse) -> None:
        if call is self._call:
            self._do(self._machine, self._machine.on_message(response, self._now()))

    def on_end(self, call: _Call) -> None:
        if call is self._call:
            self._keep_provenance(call)
            self._call = None
            self._do(self._machine, self._machine.on_end())

    def on_error(self, call: _Call, error: PdserveError) -> None:
        if call is self._call:
            self._keep_provenance(call)
            self._call = None
            self._do(self._machine, self._machine.on_failure(error, self._now()))

    # What the machine says.

    def _begin(self) -> ResumeMachine:
        request = pb.GenerateRequest(request_id=self.plan.request_id)
        return ResumeMachine(request, self._routers, self._now(), None)

    def _now(self) -> float:
        return self._client.timeline.now()

    def _do(self, machine: ResumeMachine, action: StreamAction) -> None:
        """Do what is next, unless the client has begun anew meanwhile, or is done. Nothing is to be done to receive."""
        if machine is not self._machine or self.outcome is not None:
            return
        match action:
            case OpenCall():
                self._open(action)
                self._do(machine, machine.on_opened())
            case AskRouter():
                self._ask(machine, action)
            case Wait(seconds):
                self._client.after(seconds, "timer", lambda: self._do(machine, machine.on_time(self._now())))
            case Deliver(delta):
                self._delivered.append(delta)
            case Done():
                assert machine.result is not None
                self._check(machine.result)
                self._end(machine.result)
            case Fail(error):
                self._fail(error)

    def _router(self, index: int) -> SimulatedRouter:
        """Whatever runs at that address now."""
        return list(self._hosts.values())[index]

    def _open(self, action: OpenCall) -> None:
        self.calls += 1
        self._call = _Call(self, self._router(action.router), action.request, self._client, self._fabric)
        if self.plan.leaves_after_s is not None and self.calls == 1:
            self._client.after(self.plan.leaves_after_s, "client leaves", self.leave)

    def _ask(self, machine: ResumeMachine, ask: AskRouter) -> None:
        """As the health check: a dead router's host refuses at once, one that is frozen or cut off says nothing."""
        router = self._router(ask.router)
        cut_off = self._fabric.parted_until(self._client.host, router.process.host) > self._now()
        silent = router.process.frozen or cut_off
        wait_s = ask.timeout_s if silent else self._fabric.delay(self._client.host, router.process.host)

        def answered() -> None:
            self._do(machine, machine.on_health(router.serves and not silent, self._now()))

        self._client.after(wait_s, "timer", answered)

    def _fail(self, error: PdserveError) -> None:
        if isinstance(error, AlreadyExists) and self.calls > 1:  # it came back before the router saw it leave
            self._client.after(_RETRY_S, "client retries", self.start)
            return
        left = isinstance(error, Cancelled) and self._machine.ended
        if not isinstance(error, _ALLOWED_ERRORS) and not left and not _convicted(error):
            raise Violation(f"{self.plan.request_id} ended with {error!r}")
        self._end(error)

    def _keep_provenance(self, call: _Call) -> None:
        """Of the tokens that have come."""
        if call.stream is not None:
            self.provenance.update(call.stream.provenance)

    def _end(self, outcome: Result | PdserveError) -> None:
        if self.outcome is not None:
            raise Violation(f"{self.plan.request_id} ended twice: {self.outcome} and {outcome}")
        self.outcome = outcome

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
            self._check_delivered(script.output, output)
            if result.exact:
                self._check_exact(script.output, right.token_count)

    def _check_delivered(self, index: int, output: OutputResult) -> None:
        """That the caller was given each token and each piece of text once."""
        deltas = [delta for delta in self._delivered if delta.output_index == index]
        token_ids = tuple(token_id for delta in deltas for token_id in delta.token_ids)
        text = "".join(delta.text for delta in deltas)
        if (text, token_ids) != (output.text, output.token_ids):
            raise Violation(f"{self.plan.request_id}[{index}] was given {text!r}, and its result says {output.text!r}")

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
        client.after(0.0, "timer", self._watch)

    def on_response(self, response: pb.GenerateResponse) -> None:
        self._job.on_response(self, response)

    def on_end(self) -> None:
        self._over = True
        self._job.on_end(self)

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
