"""The simulation finds planted faults: each is one line of the product done wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from decode_worker.service import DecodeService, Import
from engine.sequence import Sequence
from kvtransfer.receiver import Receiver
from kvtransfer.sender import Sender
from pdserve.client.stream import StreamFold
from prefill_worker.service import Export
from router.generation import OutputText
from router.in_flight import Attempt
from router.suspicion import Suspicion
from simulation import simulate
from simulation.executor import TagStore

_SEEDS = 500

Patch = Callable[[pytest.MonkeyPatch], None]


def _free_on_send(patch: pytest.MonkeyPatch) -> None:
    """Prefill gives its blocks back when everything is handed to the link, not when the receiver has it."""
    on_tokens = Export.on_tokens

    def freeing(self: Export, sequence: Sequence, tokens: Any) -> None:
        on_tokens(self, sequence, tokens)
        self._engine.unpin(self._owner)

    patch.setattr(Export, "on_tokens", freeing)


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
    note_end = DecodeService.note_end

    def doubled(self: DecodeService, owner: Any, outcome: Any) -> None:
        note_end(self, owner, outcome)
        note_end(self, owner, outcome)

    patch.setattr(DecodeService, "note_end", doubled)


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
    patch.setattr(Import, "on_preempted", lambda *_: None)


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


@pytest.mark.parametrize(
    ("mutant", "likely"),
    [
        (_free_on_send, 0),
        (_no_epoch_check, 6),
        (_token_twice, 0),
        (_ticket_never_renewed, 14),
        (_terminal_twice, 0),
        (_fork_without_copy, 8),
        (_border_moves, 3),
        (_preemption_untold, 100),
        (_resume_state_forgotten, 13),
        (_received_forgotten, 3),
        (_sharing_untold, 28),
        (_never_convicted, 20),
        (_stop_string_forgotten, 114),
    ],
)
def test_a_mutant_is_caught(mutant: Patch, likely: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`likely`: the first seed that catches it as scenarios are drawn now; it only saves time."""
    mutant(monkeypatch)
    caught = next((seed for seed in (likely, *range(_SEEDS)) if simulate(seed).problem is not None), None)
    assert caught is not None, f"{mutant.__name__} survives {_SEEDS} seeds"
