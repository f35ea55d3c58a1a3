"""What a worker decides, in one place: its roles' attempts, its sessions with routers, its leaving. No socket, no loop.

One thread owns it, and everything comes to it there, one after the other:

    a router's messages     -> a role     \\
    the engine's events     -> a role      } -> actions -> commands to engine and link, reports to the sessions
    the link's callbacks    -> a role     /

Engine and link tell of something on threads of their own; `on_engine` and the callbacks that the link is given only
post it to this one. Only KV itself takes another way: from the engine's thread straight to the link (LinkOutlet).

    serving ──drain──► draining ──drain cancelled──► serving          either ──leave──► leaving ──► left
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from decode_worker.actions import (
    AbortReceive,
    DecodeAction,
    ExpectKV,
    GiveUpSender,
    OpenBlocks,
    RenewTicket,
    WantNoMore,
)
from decode_worker.role import DecodeRole
from engine.commands import (
    AbortSequence,
    DeliverTokens,
    ExpectSequence,
    ForgetSequence,
    SubmitSequence,
    TakeOverSequence,
    UnpinSequence,
)
from engine.events import EngineEvent
from pdserve import logs
from pdserve.clock import Clock
from pdserve.errors import InternalError, PdserveError, error_from_code
from pdserve.reports import AttemptEnded, PrefillsLocally, TicketIssued, TokensSampled
from pdserve.rpc import cluster_pb2 as pb
from pdserve.rpc import convert
from pdserve.types import Load, Owner
from prefill_worker.actions import AbortSend, CommitSend, OpenSend, PrefillAction
from prefill_worker.role import PrefillRole
from worker.messages import message_of, sequence_of, tokens_messages
from worker.ports import EngineCommands, LinkCommands, Observer, Session, Turns

_log = logs.logger("worker")

_NOTED_TIMEOUT_S = 2.0

Action: TypeAlias = PrefillAction | DecodeAction


class Control:
    """All that one worker process decides. `turns` is the thread that owns it; the rest of it is only used there."""

    def __init__(
        self,
        prefill: PrefillRole,
        decode: DecodeRole,
        engine: EngineCommands,
        link: LinkCommands,
        turns: Turns,
        clock: Clock,
        observer: Observer,
        load: Load,
    ) -> None:
        """`load`: the engine's before its first step."""
        self._prefill = prefill
        self._decode = decode
        self._engine = engine
        self._link = link
        self._turns = turns
        self._clock = clock
        self._observer = observer
        self._load = load
        self._sessions: dict[str, Session] = {}
        self._draining = False
        self._noted: set[str] = set()  # the routers that have read that it drains
        self._leaving = False  # from `leave` on, for good
        self._has_left = False
        self._waits_for_routers = False

    @property
    def load(self) -> Load:
        """For the routers."""
        return replace(self._load, draining=self._draining)

    @property
    def owners(self) -> list[Owner]:
        """For whom something is here."""
        return [*self._prefill.owners, *self._decode.owners]

    # Its life.

    def drain(self, cancel: bool) -> None:
        """Take nothing new and say so, or serve again. Who leaves does not serve again."""
        if self._draining is not cancel or (cancel and self._leaving):
            return
        self._draining = not cancel
        self._noted.clear()
        _log.info("working on" if cancel else "draining")

    def leave(self, timeout_s: float) -> None:
        """Take nothing new, finish what is here, send what is computed; then tell the observer, once. After `timeout_s`
        what is left shall go on at another worker."""
        if self._leaving:
            return
        self.drain(cancel=False)
        self._leaving = self._waits_for_routers = True
        self._turns.later(min(_NOTED_TIMEOUT_S, timeout_s), self._stop_waiting_for_routers)
        self._turns.later(timeout_s, self._left)
        self._look_whether_left()

    def _stop_waiting_for_routers(self) -> None:
        self._waits_for_routers = False
        self._look_whether_left()

    def _look_whether_left(self) -> None:
        """Before the routers know that it drains, something may be on its way here."""
        known = not self._waits_for_routers or self._noted >= self._sessions.keys()
        if self._leaving and known and not self._prefill.owners and not self._decode.owners:
            self._left()

    def _left(self) -> None:
        if not self._has_left:
            self._has_left = True
            self._observer.left(len(self.owners))

    # The sessions' events.

    def session_opened(self, session: Session) -> None:
        self._sessions[session.router] = session

    def session_ended(self, session: Session) -> None:
        """Drop all that this router's owners hold: nothing is kept for a router that is not there."""
        if self._sessions.get(session.router) is session:
            del self._sessions[session.router]
        self._noted.discard(session.router)
        for owner in self.owners:
            if owner.router == session.router:
                self._abort(owner)
        self._look_whether_left()

    def on_message(self, session: Session, message: pb.RouterMessage) -> None:
        """What a router asks."""
        match message.WhichOneof("message"):
            case "start_decode":
                self._start_decode(message.start_decode)
            case "start_prefill":
                self._start_prefill(message.start_prefill)
            case "sender_lost":
                lost = message.sender_lost
                error = error_from_code(lost.error_code, lost.error_message)
                self._perform(self._decode.sender_lost(convert.owner_from_proto(lost.owner), lost.epoch, error))
            case "prefill_locally":
                owner = convert.owner_from_proto(message.prefill_locally.owner)
                self._perform(self._decode.prefill_locally(owner))
            case "abort":
                self._abort(convert.owner_from_proto(message.abort.owner))
            case "drain":
                self.drain(message.drain.cancel)
            case "drain_noted":
                self._noted.add(session.router)
                self._look_whether_left()
            case "renew":
                pass
            case unknown:
                _log.warning("unknown message from a router", kind=unknown)

    def _start_decode(self, start: pb.StartDecode) -> None:
        owner, prompt_ids, output_ids, params = sequence_of(start.sequence)
        share = convert.owner_from_proto(start.share) if start.HasField("share") else None
        if not self._held_elsewhere(owner, self._prefill):
            local = start.local_prefill
            self._perform(self._decode.start(owner, prompt_ids, output_ids, params, local, share))

    def _start_prefill(self, start: pb.StartPrefill) -> None:
        owner, prompt_ids, output_ids, params = sequence_of(start.sequence)
        ticket = convert.ticket_from_proto(start.ticket)
        if not self._held_elsewhere(owner, self._decode, ticket.epoch):
            self._perform(self._prefill.start(owner, prompt_ids, output_ids, params, ticket))

    def _held_elsewhere(self, owner: Owner, role: PrefillRole | DecodeRole, epoch: int = 0) -> bool:
        """The engine knows a sequence by its owner: one worker cannot be both ends of an attempt."""
        if owner in role:
            held = InternalError(f"{owner} is in this worker's other role already")
            self._perform([AttemptEnded(owner, held, epoch)])
        return owner in role

    def _abort(self, owner: Owner) -> None:
        self._perform(self._prefill.abort(owner))
        self._perform(self._decode.abort(owner))

    # The engine's events.

    def on_engine(self, events: tuple[EngineEvent, ...], load: Load) -> None:
        """The engine's thread."""
        self._turns.post(partial(self._engine_told, events, load))

    def _engine_told(self, events: tuple[EngineEvent, ...], load: Load) -> None:
        self._load = load
        self._perform([action for event in events for action in self._role_of(event.owner).on_engine(event)])

    def _role_of(self, owner: Owner) -> PrefillRole | DecodeRole:
        return self._prefill if owner in self._prefill else self._decode

    # The link's events.

    def _telling(self, role: Callable[..., Sequence[Action]], *what: object) -> Callable[..., None]:
        """A callback for the link's thread: `role` is told of it on this one."""
        return lambda *came: self._turns.post(lambda: self._perform(role(*what, *came)))

    def _open_send(self, action: OpenSend) -> None:
        owner, ticket, token_ids = action.owner, action.ticket, action.token_ids
        on_end = self._telling(self._prefill.send_ended, owner, ticket.epoch)
        try:
            self._link.open_sender(ticket, owner, token_ids, len(token_ids), on_end)
        except PdserveError as error:
            self._perform(self._prefill.send_refused(owner, error))
        else:
            self._perform(self._prefill.send_opened(owner))

    def _expect_kv(self, action: ExpectKV) -> None:
        owner, role = action.owner, self._decode
        try:
            ticket = self._link.expect(
                owner,
                action.token_ids,
                self._telling(role.blocks_needed, owner),
                self._telling(role.receive_ended, owner),
                on_sender_lost=self._telling(lambda error: role.sender_gone(owner, error, self._clock.now())),
            )
        except PdserveError as error:
            self._perform(role.ticket_refused(owner, error))
        else:
            self._perform(role.ticket_issued(owner, ticket))

    # What the roles decided.

    def _perform(self, actions: Sequence[Action]) -> None:
        """Tokens leave first, in one message for each router: an attempt's end may not overtake them."""
        for router, message in tokens_messages(each for each in actions if isinstance(each, TokensSampled)).items():
            self._send(router, message)
        for action in actions:
            match action:
                case TokensSampled():
                    pass
                case TicketIssued() | PrefillsLocally() | AttemptEnded():
                    self._send(action.owner.router, message_of(action))
                case OpenSend():
                    self._open_send(action)
                case CommitSend():
                    self._link.commit(action.transfer_id, action.tokens)
                case AbortSend():
                    self._link.abort_sender(action.transfer_id, action.error)
                case ExpectKV():
                    self._expect_kv(action)
                case OpenBlocks():
                    self._link.blocks_leased(action.transfer_id, action.kv)
                case GiveUpSender():
                    self._link.sender_lost(action.transfer_id, action.epoch, action.error)
                case RenewTicket():
                    self._link.renew(action.transfer_id, self._telling(self._decode.epoch_opened, action.owner))
                case WantNoMore():
                    self._link.take_over(action.transfer_id)
                case AbortReceive():
                    self._link.abort_receiver(action.transfer_id, action.error)
                case SubmitSequence():
                    self._engine.submit(action.sequence)
                case ExpectSequence():
                    self._engine.expect(action.owner)
                case ForgetSequence():
                    self._engine.forget(action.owner)
                case AbortSequence():
                    self._engine.abort(action.owner, action.error)
                case DeliverTokens():
                    self._engine.deliver(action.owner, action.tokens)
                case TakeOverSequence():
                    self._engine.take_over(action.owner, action.computed)
                case UnpinSequence():
                    self._engine.unpin(action.owner)
        self._look_whether_left()

    def _send(self, router: str, message: pb.WorkerMessage) -> None:
        """To a router that has gone, nothing: its loss is an event of its own."""
        session = self._sessions.get(router)
        if session is not None:
            session.send(message)
