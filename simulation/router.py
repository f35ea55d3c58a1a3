"""One start of a simulated router: the real Control and generation, with a timer, sessions and calls of its clients."""

from __future__ import annotations

from functools import partial

from pdserve.config import RouterConfig
from pdserve.errors import PdserveError
from pdserve.rpc import inference_pb2 as pb
from router.control import TICK_S, Control
from router.frontend import resume_point
from router.generation import Generation, request_of
from router.session import SessionTerms
from router.validation import ResolvedRequest
from simulation.front import Caller, FrontCall, SimulatedStream
from simulation.network import Death, Fabric, Wire, kill
from simulation.oracle import Oracle, Provenance, Script
from simulation.text import Letters
from simulation.timeline import Process


class SimulatedRouter:
    """A router process."""

    def __init__(self, host: str, incarnation: str, fabric: Fabric, config: RouterConfig, oracle: Oracle) -> None:
        self.process = Process(fabric.timeline, host, incarnation)
        self.incarnation = incarnation
        self.config = config
        self.terms = SessionTerms(incarnation, "tags", config.renew_interval_ms, config.worker_timeout_ms)
        self.control = Control(incarnation, config, fabric.timeline, self)
        self.calls: list[SimulatedStream] = []  # whose front has not ended
        self._oracle = oracle
        self._tick()

    @property
    def serves(self) -> bool:
        """What its health says."""
        return self.process.alive and self.control.serves

    def _tick(self) -> None:
        self.control.tick()
        self.process.after(TICK_S, "tick", self._tick)

    def members_changed(self) -> None:
        """Nobody waits for it here."""

    def all_ended(self) -> None:
        """Nobody waits for it here."""

    def generate(
        self,
        request: pb.GenerateRequest,
        scripts: tuple[Script, ...],
        stops: tuple[str, ...],
        wire: Wire,
        caller: Caller,
        pace_s: float,
    ) -> FrontCall | None:
        """A client's call. None: it was refused, and the client is told so."""
        resume, script = resume_point(request), scripts[0]
        received = () if resume is None else resume.received_ids
        received += ((),) * (len(scripts) - len(received))
        resolved = ResolvedRequest(script.request_id, "tags", script.prompt_ids, script.params, stops, received)
        stream = SimulatedStream(scripts, [len(ids) for ids in received], self.process)
        stream.who_sampled = lambda output, position: self._who_sampled(stream, output, position)
        try:
            self.control.submit(request_of(resolved, resume), stream, resume is not None)
        except PdserveError as error:
            wire.send(self.process, "error", lambda error=error: caller.on_error(error), error)
            return None
        self.calls.append(stream)
        generation = Generation(resolved, Letters(), partial(self.control.finish, stream))
        return FrontCall(generation, stream, wire, self.process, caller, pace_s, lambda: self._call_over(stream))

    def _call_over(self, stream: SimulatedStream) -> None:
        self.calls.remove(stream)
        self.control.abandon(stream)

    def _who_sampled(self, stream: SimulatedStream, output: int, position: int) -> Provenance | None:
        entry = self.control.dispatch.entry(stream.request_id, output)
        if entry is None or entry.attempt is None:
            return None
        return self._oracle.provenance(entry.attempt.owner, position)

    def kill(self, death: Death) -> None:
        kill(self.process, death)

    def at_rest(self) -> list[str]:
        """What is still under way; nothing, when all is quiet."""
        held = {
            "requests": len(self.control.dispatch),
            "streams": self.control.stream_count,
            "calls without an end": len(self.calls),
        }
        return [f"{self.process.name}: {count} {what}" for what, count in held.items() if count]
