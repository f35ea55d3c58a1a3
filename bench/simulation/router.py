"""One start of a simulated router: the real Control, with a timer, sessions and streams to its clients."""

from __future__ import annotations

from collections.abc import Callable

from bench.simulation.network import Death, Fabric, Wire, kill
from bench.simulation.oracle import Script, Violation
from bench.simulation.timeline import Process
from pdserve.config import RouterConfig
from pdserve.errors import PdserveError
from router.actions import Accept, End, Request
from router.control import TICK_S, Control


class SimulatedRouter:
    """A router process."""

    def __init__(self, host: str, incarnation: str, fabric: Fabric, config: RouterConfig) -> None:
        self.process = Process(fabric.timeline, host, incarnation)
        self.incarnation = incarnation
        self.config = config
        self.renew_interval_s = config.renew_interval_ms / 1000
        self.timeout_s = config.worker_timeout_ms / 1000
        self.control = Control(incarnation, config, fabric.timeline, self)
        self.streams: list[RouterStream] = []
        self._tick()

    def _tick(self) -> None:
        self.control.tick()
        self.process.after(TICK_S, "tick", self._tick)

    def members_changed(self) -> None:
        """Nobody waits for it here."""

    def all_ended(self) -> None:
        """Nobody waits for it here."""

    def generate(self, request: Request, stream: RouterStream, resumed: bool) -> None:
        """A client's call."""
        try:
            self.control.submit(request, stream, resumed)
            self.streams.append(stream)
        except PdserveError as error:
            stream.refuse(error)

    def kill(self, death: Death) -> None:
        kill(self.process, death)

    def at_rest(self) -> list[str]:
        """What is still under way; nothing, when all is quiet."""
        held = {
            "requests": len(self.control.dispatch),
            "streams": len(self.control._streams),
            "streams without an end": sum(not stream.ended for stream in self.streams),
        }
        return [f"{self.process.name}: {count} {what}" for what, count in held.items() if count]


class RouterStream:
    """Where a router puts a request's events: what it says is checked here, and goes on to the client."""

    def __init__(
        self,
        script: Script,
        received: int,
        wire: Wire,
        router: Process,
        on_event: Callable[[Accept | End], None],
    ) -> None:
        self.request_id = script.request_id
        self.ended = False
        self._script = script
        self._wire = wire
        self._router = router
        self._on_event = on_event
        self._accepted = received
        self._stop_at: int | None = None
        self._on_stop: Callable[[], None] = lambda: None

    def watch(self, stop_at: int, on_stop: Callable[[], None]) -> None:
        """Have `on_stop` called once this many tokens are there: a stop string was found in their text."""
        self._stop_at, self._on_stop = stop_at, on_stop

    def put(self, event: Accept | End) -> bool:
        if self.ended:
            raise Violation(f"{self.request_id} went on at {self._router.name} after its end: {event}")
        if isinstance(event, Accept):
            self._check(tuple(token.token_id for token in event.tokens))
        else:
            self.ended = True
        self._wire.send(self._router, "event", lambda: self._on_event(event), event)
        return self.ended

    def refuse(self, error: PdserveError) -> None:
        """The call itself failed: there is no stream."""
        self.ended = True
        end = End(self.request_id, 0, error, attempts=0, exact=True)
        self._wire.send(self._router, "event", lambda: self._on_event(end), end)

    def _check(self, token_ids: tuple[int, ...]) -> None:
        first, last = self._accepted, self._accepted + len(token_ids)
        if token_ids != self._script.output_ids[first:last]:
            right = self._script.output_ids[first:last]
            raise Violation(f"{self.request_id} got {token_ids} at output position {first}, the oracle says {right}")
        self._accepted = last
        if self._stop_at is not None and first < self._stop_at <= last:
            self._on_stop()
