"""A call at a simulated router: the router's own generation, driven without gRPC and without a loop.

events of the attempt loop -> SimulatedStream (checked) -> Generation -> responses, at the client's pace
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from pdserve.errors import PdserveError
from pdserve.rpc import inference_pb2 as pb
from router.actions import Accept, End, StreamEvent
from router.frontend import response
from router.generation import Generation, GenerationEvent
from simulation.network import Wire
from simulation.oracle import Provenance, Script, Violation
from simulation.timeline import Process

_ATTEMPTS = 40


class Caller(Protocol):
    """The client's side of a call."""

    def on_response(self, response: pb.GenerateResponse) -> None: ...

    def on_end(self) -> None: ...

    def on_error(self, error: PdserveError) -> None: ...


class SimulatedStream:
    """Where a router puts a request's events. What it says is checked here against the scripts, by output."""

    def __init__(self, scripts: Sequence[Script], received: Sequence[int], router: Process) -> None:
        self.request_id = scripts[0].request_id
        self.left = len(scripts)
        self.provenance: dict[tuple[int, int], Provenance | None] = {}  # by output and position
        self.who_sampled: Callable[[int, int], Provenance | None] = lambda output, position: None
        self.on_event: Callable[[], None] = lambda: None
        self._scripts = scripts
        self._accepted = list(received)
        self._router = router
        self._ended: set[int] = set()
        self._events: deque[StreamEvent] = deque()

    @property
    def most_events(self) -> int:
        """How many events may wait at most: each has a token, or is an end, or one of the few that tell of attempts."""
        return sum(script.params.max_tokens + 1 for script in self._scripts) + _ATTEMPTS

    @property
    def waiting_count(self) -> int:
        return len(self._events)

    def put(self, event: StreamEvent) -> bool:
        if event.output in self._ended:
            raise Violation(f"{self.request_id} went on at {self._router.name} after its end: {event}")
        if isinstance(event, Accept):
            self._check(event)
        elif isinstance(event, End):
            self._ended.add(event.output)
            self.left -= 1
        self._events.append(event)
        self.on_event()
        return self.left == 0

    def take(self) -> StreamEvent:
        """The next event."""
        return self._events.popleft()

    def _check(self, event: Accept) -> None:
        script, first = self._scripts[event.output], self._accepted[event.output]
        last = first + len(event.tokens)
        if event.tokens != script.tokens[first:last]:
            right = script.tokens[first:last]
            raise Violation(f"{self.request_id} got {event.tokens} at output position {first}, right is {right}")
        self._accepted[event.output] = last
        for position in range(first, last):
            self.provenance[event.output, position] = self.who_sampled(event.output, position)


class FrontCall:
    """A client's call while its router serves it. `pace_s`: how long the client takes to read a response."""

    def __init__(
        self,
        generation: Generation,
        stream: SimulatedStream,
        wire: Wire,
        router: Process,
        caller: Caller,
        pace_s: float,
        on_over: Callable[[], None],
    ) -> None:
        self.stream = stream
        self._generation = generation
        self._wire = wire
        self._router = router
        self._caller = caller
        self._pace_s = pace_s
        self._on_over = on_over
        self._planned = False
        self._over = False
        self._unsent: deque[GenerationEvent] = deque()
        self._send(generation.start())
        stream.on_event = self._plan
        self._plan()

    def _plan(self, delay_s: float = 0.0) -> None:
        if not self._planned and not self._over:
            self._planned = True
            self._router.after(delay_s, "front", self._go_on)

    def _go_on(self) -> None:
        """Pass on what has happened, until that is all, or until the client has to read."""
        self._planned = False
        while not self._over:
            if self._unsent:
                self._send(self._unsent.popleft())
                if self._pace_s:
                    self._plan(self._pace_s)
                    return
            elif self.stream.waiting_count:
                self._take(self.stream.take())
            else:
                if not self.stream.left:
                    self._wire.send(self._router, "call ends", self._caller.on_end)
                    self.end()
                return

    def _take(self, event: StreamEvent) -> None:
        try:
            self._unsent.extend(self._generation.take(event))
        except PdserveError as error:
            self._wire.send(self._router, "error", lambda error=error: self._caller.on_error(error), error)
            self.end()

    def end(self) -> None:
        """As the handler's end, however it comes."""
        if not self._over:
            self._over = True
            self._on_over()

    def _send(self, event: GenerationEvent) -> None:
        message = response(event)
        kind = message.WhichOneof("event") or "resume_state"
        self._wire.send(self._router, kind, lambda: self._caller.on_response(message), message)
