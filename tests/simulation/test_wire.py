"""The KV wire alone, in whole clusters from seeds: what a transfer can bear costs nobody anything, and what it cannot
bear ends it in time, with the truth at both ends. Planted faults of the wire are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvtransfer.credit import CreditSpender
from kvtransfer.exchange import Exchange
from kvtransfer.receiver import Receiver
from kvtransfer.sender import Sender
from kvtransfer.timing import Silence
from simulation import run, simulate
from simulation.wire import KINDS
from support.length import times

_SEEDS = 30
# What each of them is about, and has to have met.
_TROUBLE = {
    "still": (),
    "lossy": ("frame sent again", "damaged payload", "frame refused"),
    "absent": ("freeze",),
    "asleep": ("freeze", "another sender", "local prefill", "transfer failed"),
    "bereft": ("crash", "another sender", "local prefill", "kept for the next sender"),
}

Patch = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize("kind", KINDS)
def test_transfers_go_right(kind: str) -> None:
    report = run(range(times(_SEEDS)), kind)
    assert not report.failures, report.failures[0]
    rare = {name for name in _TROUBLE[kind] if not report.counts[name]}
    assert not rare, f"never happened: {rare}; {report}"


def _lost_for_good(patch: pytest.MonkeyPatch) -> None:
    """Nobody hears that a receiver misses something."""
    nack = Receiver._nack

    def mute(self: Receiver, ranges: Any) -> Any:
        asked = nack(self, ranges)
        return replace(asked, frame=replace(asked.frame, epoch=0))

    patch.setattr(Receiver, "_nack", mute)


def _by_the_clock(patch: pytest.MonkeyPatch) -> None:
    """A link that was away judges silence before it has looked into its sockets."""
    listened = Exchange.listened

    def judging(self: Exchange, wait_s: float) -> None:
        listened(self, wait_s)
        self.tick()

    for table in (Sender, Receiver):
        patch.setattr(table, "excuse", lambda self, seconds: None)
    patch.setattr(Exchange, "listened", judging)


def _keeps_nothing(patch: pytest.MonkeyPatch) -> None:
    """A receiver does not tell the next sender what is there."""
    patch.setattr(Receiver, "_have", lambda self: [])


def _dead_unnoticed(patch: pytest.MonkeyPatch) -> None:
    """Silence never lasts too long."""
    patch.setattr(Silence, "lasts_until", lambda self, length_s: float("inf"))


def _window_ignored(patch: pytest.MonkeyPatch) -> None:
    """A sender sends whatever it has."""
    patch.setattr(CreditSpender, "available", property(lambda self: 2**40))


@pytest.mark.parametrize(
    ("mutant", "kind"),
    [
        (_lost_for_good, "lossy"),
        (_by_the_clock, "absent"),
        (_by_the_clock, "asleep"),
        (_keeps_nothing, "bereft"),
        (_dead_unnoticed, "bereft"),
        (_window_ignored, "still"),
    ],
)
def test_a_mutant_is_caught(mutant: Patch, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    caught = any(simulate(seed, kind=kind).problem is not None for seed in range(_SEEDS))
    assert caught, f"{mutant.__name__} survives {_SEEDS} seeds of {kind}"
