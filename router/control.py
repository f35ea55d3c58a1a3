"""What a router decides, in one place: its members, its workers' sessions and the attempt loop. No socket, no loop.

What comes from sessions, clients and the timer goes to Membership and Dispatch; what these decide goes out as messages
to sessions and events to streams. Whoever carries them is the caller's: `server.py` over gRPC, a simulation in memory.
"""

from __future__ import annotations

from typing import Protocol

from pdserve import logs
from pdserve.clock import Clock
from pdserve.config import RouterConfig
from pdserve.errors import Cancelled, PdserveError, Unavailable
from pdserve.rpc import cluster_pb2 as pb
from pdserve.rpc import convert
from pdserve.types import Finish, Load, Owner, SampledToken, Ticket, WorkerInfo
from router.actions import (
    AbortAttempt,
    Accept,
    Action,
    DropSender,
    End,
    Fallback,
    PrefillLocally,
    Request,
    Retry,
    StartDecode,
    StartPrefill,
    StateChanged,
    StreamEvent,
)
from router.dispatch import Dispatch
from router.membership import Membership
from router.policies import LeastLoaded

_log = logs.logger("router")

TICK_S = 0.05
_STALL_S = 0.25  # between two ticks: more says that the router itself got no processor


class MemberSession(Protocol):
    """One worker's open session, seen from the router."""

    info: WorkerInfo

    def send(self, message: pb.RouterMessage) -> None:
        """Pass a message on, in order, without blocking."""
        ...

    def close(self) -> None:
        """Break the session from this side. `worker_left` follows, later."""
        ...


class EventSink(Protocol):
    """Where a request's events go: Accept and StateChanged, and one End for each output. Must not block."""

    request_id: str

    def put(self, event: StreamEvent) -> bool:
        """Take an event; True if it is the last one."""
        ...


class RouterObserver(Protocol):
    """Who waits for what happens to a router as a whole."""

    def members_changed(self) -> None:
        """A member came or went, or drains, or serves again."""
        ...

    def all_ended(self) -> None:
        """No request is in flight any more."""
        ...


class Control:
    """All that one router process decides. One thread calls it."""

    def __init__(self, incarnation: str, config: RouterConfig, clock: Clock, observer: RouterObserver) -> None:
        self.membership = Membership(config.worker_timeout_ms / 1000)
        self.dispatch = Dispatch(incarnation, self.membership, LeastLoaded(), config)
        self._clock = clock
        self._observer = observer
        self._ticked_at = clock.now()
        self._sessions: dict[str, MemberSession] = {}
        self._streams: dict[str, EventSink] = {}
        self._draining = False

    @property
    def serves(self) -> bool:
        """Whether new requests are welcome here: what its health says."""
        return not self._draining and any(not member.load.draining for member in self.membership)

    def drain(self) -> None:
        """Take nothing new from now on. What is in flight goes on."""
        self._draining = True

    @property
    def stream_count(self) -> int:
        """Requests whose stream has not had its last event."""
        return len(self._streams)

    def has_session(self, worker: str) -> bool:
        return worker in self._sessions

    # The front's calls.

    def submit(self, request: Request, stream: EventSink, resumed: bool = False) -> None:
        """Take a request over, a resumed one from whoever had it; its events go to `stream`. Raises as Dispatch, and
        Unavailable where this router drains."""
        if self._draining:
            raise Unavailable("this router is shutting down; ask another one")
        if resumed:
            self.cancel(request.request_id, Cancelled("the client resumed this request over another connection"))
        actions = self.dispatch.submit(request, self._clock.now())
        self._streams[request.request_id] = stream
        self._perform(actions)

    def abandon(self, stream: EventSink) -> None:
        """Nobody listens any more: end the request if it has not ended. Its id may be another request's by now."""
        if self._streams.get(stream.request_id) is stream:
            self.cancel(stream.request_id)

    def cancel(self, request_id: str, error: PdserveError | None = None) -> bool:
        """End a request with an error; False if it is not in flight."""
        actions = self.dispatch.cancel(request_id, error)
        self._perform(actions)
        return bool(actions)

    def finish(self, stream: EventSink, output: int, finish: Finish) -> None:
        """End an output regularly: a stop string matched in what its stream brought. Its id may be another's by now."""
        if self._streams.get(stream.request_id) is stream:
            self._perform(self.dispatch.finish(stream.request_id, output, finish))

    def drain_worker(self, incarnation: str, cancel: bool) -> None:
        """Ask a worker to finish what it has and take nothing new, or to serve again."""
        self._send(incarnation, pb.RouterMessage(drain=pb.Drain(cancel=cancel)))

    def tick(self) -> None:
        """Act on what is overdue: members without a sign of life, deadlines of requests. To be called every TICK_S."""
        now = self._clock.now()
        if now - self._ticked_at > _STALL_S:
            _log.warning("this router was stalled", seconds=round(now - self._ticked_at, 3))
            self.membership.excuse(now - self._ticked_at)
        self._ticked_at = now
        for incarnation in self.membership.expire(now):
            self._lose(incarnation, "no renewal in time", crashed=False)
        self._perform(self.dispatch.tick(now))

    # The sessions' events.

    def worker_joined(self, session: MemberSession) -> None:
        info, now = session.info, self._clock.now()
        if info.incarnation in self._sessions:  # it noticed the end of its session first, and has dropped everything
            self.membership.leave(info.incarnation)
            self._lose(info.incarnation, "it came back over another session", crashed=False)
        self._sessions[info.incarnation] = session  # first: what a replaced one loses may be placed on this one
        for replaced in self.membership.join(info, now):
            self._lose(replaced, f"replaced by {info.incarnation}")
        _log.info("worker joined", worker=info.incarnation, role=info.role.value, pid=info.pid)
        self._perform(self.dispatch.on_worker_joined(now))
        self._observer.members_changed()

    def worker_left(self, session: MemberSession, reason: str, crashed: bool = True) -> None:
        """`crashed`: perhaps by itself, so that a request may have done it; not if it is known to have been killed."""
        if self._sessions.get(session.info.incarnation) is session:
            self.membership.leave(session.info.incarnation)
            self._lose(session.info.incarnation, reason, crashed)

    def renewed(self, worker: str, load: Load) -> None:
        now = self._clock.now()
        member = self.membership.get(worker)
        turned = member is not None and member.load.draining != load.draining
        self.membership.renew(worker, load, now)
        if turned:
            _log.info("worker draining" if load.draining else "worker serves again", worker=worker)
            if load.draining:
                self._send(worker, pb.RouterMessage(drain_noted=pb.DrainNoted()))
            self._perform(self.dispatch.on_worker_joined(now))
            self._observer.members_changed()

    def ticket(self, worker: str, owner: Owner, ticket: Ticket) -> None:
        self._perform(self.dispatch.on_ticket(worker, owner, ticket, self._clock.now()))

    def local_prefill(self, worker: str, owner: Owner, reason: str) -> None:
        self._perform(self.dispatch.on_local_prefill(worker, owner, reason))

    def tokens(self, worker: str, owner: Owner, first_position: int, tokens: tuple[SampledToken, ...]) -> None:
        self._perform(self.dispatch.on_tokens(worker, owner, first_position, tokens, self._clock.now()))

    def terminal(self, worker: str, owner: Owner, outcome: Finish | PdserveError | None, epoch: int) -> None:
        self._perform(self.dispatch.on_terminal(worker, owner, outcome, epoch, self._clock.now()))

    def _lose(self, incarnation: str, reason: str, crashed: bool = True) -> None:
        """A worker is no member any more: break its session, make its attempts anew."""
        _log.warning("worker lost", worker=incarnation, reason=reason)
        session = self._sessions.pop(incarnation, None)
        if session is not None:
            session.close()
        self._perform(self.dispatch.on_worker_lost(incarnation, self._clock.now(), crashed))
        self._observer.members_changed()

    # What the cores decided.

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case StartDecode():
                    _log.info(
                        "attempt started",
                        owner=action.owner,
                        decode=action.worker,
                        local=action.local_prefill,
                        share=action.share,
                    )
                    share = None if action.share is None else convert.owner_to_proto(action.share)
                    start = pb.StartDecode(sequence=_sequence(action), local_prefill=action.local_prefill, share=share)
                    self._send(action.worker, pb.RouterMessage(start_decode=start))
                case StartPrefill():
                    ticket = convert.ticket_to_proto(action.owner, action.ticket)
                    start_prefill = pb.StartPrefill(sequence=_sequence(action), ticket=ticket)
                    self._send(action.worker, pb.RouterMessage(start_prefill=start_prefill))
                case DropSender():
                    lost = pb.SenderLost(
                        owner=convert.owner_to_proto(action.owner),
                        epoch=action.epoch,
                        error_code=action.error.code,
                        error_message=str(action.error),
                    )
                    self._send(action.worker, pb.RouterMessage(sender_lost=lost))
                case PrefillLocally():
                    local = pb.PrefillLocally(owner=convert.owner_to_proto(action.owner))
                    self._send(action.worker, pb.RouterMessage(prefill_locally=local))
                case AbortAttempt():
                    abort = pb.Abort(owner=convert.owner_to_proto(action.owner))
                    self._send(action.worker, pb.RouterMessage(abort=abort))
                case Accept() | StateChanged():
                    self._streams[action.request_id].put(action)
                case End():
                    if self._streams[action.request_id].put(action):
                        del self._streams[action.request_id]
                    if not self._streams:
                        self._observer.all_ended()
                case Fallback():
                    _log.warning("fallback", owner=action.owner, rung=action.rung, reason=action.reason)
                case Retry():
                    _log.warning("attempt failed", owner=action.owner, phase=action.phase, reason=action.reason)

    def _send(self, worker: str, message: pb.RouterMessage) -> None:
        """To a worker that has just gone, nothing: its loss is an event of its own."""
        session = self._sessions.get(worker)
        if session is not None:
            session.send(message)


def _sequence(action: StartDecode | StartPrefill) -> pb.Sequence:
    return pb.Sequence(
        owner=convert.owner_to_proto(action.owner),
        prompt_ids=action.request.prompt_ids,
        output_ids=action.output_ids,
        sampling=convert.sampling_to_proto(action.request.params),
    )
