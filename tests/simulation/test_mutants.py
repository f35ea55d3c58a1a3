"""The simulation finds planted faults: each is one line of the product done wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from decode_worker.role import DecodeRole
from engine.commands import UnpinSequence
from engine.events import Preempted, Tokens
from engine.sequence import Sequence
from kvtransfer.receiver import Receiver
from kvtransfer.sender import Sender
from pdserve.client.stream import StreamFold
from prefill_worker.role import PrefillRole
from router.generation import OutputText
from router.in_flight import Attempt
from router.session import WorkerSession
from router.suspicion import Suspicion
from simulation import simulate
from simulation.executor import TagStore
from worker.control import Control

_SEEDS = 500

Patch = Callable[[pytest.MonkeyPatch], None]


def _free_on_send(patch: pytest.MonkeyPatch) -> None:
    """Prefill gives its blocks back when everything is handed to the link, not when the receiver has it."""
    on_engine = PrefillRole.on_engine

    def freeing(self: PrefillRole, event: Any) -> Any:
        unpin = [UnpinSequence(event.owner)] if isinstance(event, Tokens) else []
        return [*on_engine(self, event), *unpin]

    patch.setattr(PrefillRole, "on_engine", freeing)


def _no_epoch_check(patch: pytest.MonkeyPatch) -> None:
    """A receiver takes frames of senders whose time is over."""
    on_frame = Receiver.on_frame

    def blind(self: Receiver, frame: Any, now: float) -> Any:
        return on_frame(self, replace(frame, epoch=self.epoch), now)

    patch.setattr(Receiver, "on_frame", blind)


def _token_twice(patch: pytest.MonkeyPatch) -> None:
    """A worker appends the fourth token of an output twice."""
    accept = Sequence.accept

    def doubled(self: Sequence, token_id: int, eos_token_ids: Any) -> Any:
        if self.output_count == 3:
            accept(self, token_id, eos_token_ids)
        return accept(self, token_id, eos_token_ids)

    patch.setattr(Sequence, "accept", doubled)


def _ticket_never_renewed(patch: pytest.MonkeyPatch) -> None:
    """A sender that waits in its queue does not keep its ticket alive."""
    probe = Sender._probe

    def mute(self: Sender) -> Any:
        frame = probe(self)
        return replace(frame, frame=replace(frame.frame, epoch=0)) if self.state == "queued" else frame

    patch.setattr(Sender, "_probe", mute)


def _terminal_twice(patch: pytest.MonkeyPatch) -> None:
    """A decode worker tells a request's end twice."""
    end = DecodeRole._end

    def doubled(self: DecodeRole, receive: Any, event: Any) -> Any:
        actions = end(self, receive, event)
        return [*actions, actions[-1]]

    patch.setattr(DecodeRole, "_end", doubled)


def _fork_without_copy(patch: pytest.MonkeyPatch) -> None:
    """An output that shares a prompt gets an empty block for the last, partly filled one."""
    patch.setattr(TagStore, "copy", lambda *_: None)


def _border_moves(patch: pytest.MonkeyPatch) -> None:
    """A worker takes the accepted tokens of earlier attempts for a part of the prompt."""
    make = Sequence.__init__

    def forgetful(self: Sequence, owner: Any, prompt_ids: Any, output_ids: Any, *args: Any, **kwargs: Any) -> None:
        make(self, owner, [*prompt_ids, *output_ids], [], *args, **kwargs)

    patch.setattr(Sequence, "__init__", forgetful)


def _preemption_untold(patch: pytest.MonkeyPatch) -> None:
    """A decode worker that computes a delivered prompt again does not say so."""
    on_engine = DecodeRole.on_engine

    def silent(self: DecodeRole, event: Any) -> Any:
        return [] if isinstance(event, Preempted) else on_engine(self, event)

    patch.setattr(DecodeRole, "on_engine", silent)


def _resume_state_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A client does not pass on the resume states that the lost router had told it."""
    patch.setattr(StreamFold, "resume_states", lambda self: [])


def _received_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A client that goes on at another router asks for the whole stream again."""
    patch.setattr(StreamFold, "token_ids", lambda self: [])


def _sharing_untold(patch: pytest.MonkeyPatch) -> None:
    """A router believes that an output which shares a prompt computes nothing of it."""
    shares = property(lambda self: False, lambda self, value: None)
    patch.setattr(Attempt, "shares", shares)


def _never_convicted(patch: pytest.MonkeyPatch) -> None:
    """A request may crash as many workers as it has attempts."""
    patch.setattr(Suspicion, "convicted", property(lambda self: False))


def _stop_string_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A router looks for stop strings only in what comes to itself."""
    patch.setattr(OutputText, "replay", lambda self, token_ids: None)


def _leave_is_a_crash(patch: pytest.MonkeyPatch) -> None:
    """A router takes a worker that closed its session in order for one that may have crashed."""
    ended = WorkerSession.ended

    def suspicious(self: WorkerSession, crash_report: str | None) -> None:
        self._said_goodbye = False
        ended(self, None)

    patch.setattr(WorkerSession, "ended", suspicious)


def _flag_of_two_threads(patch: pytest.MonkeyPatch) -> None:
    """The engine's thread sets the load that a worker's control tells its routers."""
    on_engine = Control.on_engine

    def hasty(self: Control, events: Any, load: Any) -> None:
        self._load = load
        on_engine(self, events, load)

    patch.setattr(Control, "on_engine", hasty)


def _link_enters_control(patch: pytest.MonkeyPatch) -> None:
    """The link's thread calls a worker's control, instead of having its own thread do so."""

    def direct(self: Control, role: Callable[..., Any], *what: object) -> Callable[..., None]:
        return lambda *came: self._perform(role(*what, *came))

    patch.setattr(Control, "_telling", direct)


@pytest.mark.parametrize(
    ("mutant", "likely"),
    [
        (_free_on_send, 0),
        (_no_epoch_check, 6),
        (_token_twice, 0),
        (_ticket_never_renewed, 14),
        (_terminal_twice, 0),
        (_fork_without_copy, 8),
        (_border_moves, 36),
        (_preemption_untold, 169),
        (_resume_state_forgotten, 13),
        (_received_forgotten, 13),
        (_sharing_untold, 28),
        (_never_convicted, 20),
        (_stop_string_forgotten, 167),
        (_leave_is_a_crash, 21),
        (_flag_of_two_threads, 0),
        (_link_enters_control, 0),
    ],
)
def test_a_mutant_is_caught(mutant: Patch, likely: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`likely`: the first seed that catches it as scenarios are drawn now; it only saves time."""
    mutant(monkeypatch)
    caught = next((seed for seed in (likely, *range(_SEEDS)) if simulate(seed).problem is not None), None)
    assert caught is not None, f"{mutant.__name__} survives {_SEEDS} seeds"
