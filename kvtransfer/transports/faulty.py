"""A transport that misbehaves as told: a decorator round any other one, for tests and drills.

What is sent meets a list of rules, each of which may strike it:

    DROP        it is lost
    DUPLICATE   it is sent twice
    REORDER     it is sent after the next message to the same peer, or after 50 ms if none comes
    CORRUPT     one bit of one of its parts is another
    DELAY       it is sent `seconds` later; what follows overtakes it
    CUT         from it on nothing goes to this peer or comes from it, for `seconds`

Whether a rule strikes the n-th message it counts, and which bit it flips, follows from the seed, the rule's place and
n alone; a rule for LAYER is not disturbed by PINGs. So a failing run replays. Neither the wrapped transport nor those
above it know.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvtransfer.frames import type_of
from kvtransfer.transports.base import Event, Message, Part, Peer, Transport, fresh_buffer
from pdserve.clock import Clock

_REORDER_S = 0.05


class Fault(StrEnum):
    DROP = "drop"
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    CORRUPT = "corrupt"
    DELAY = "delay"
    CUT = "cut"


@dataclass(frozen=True, slots=True)
class FaultRule:
    """`frame_type`: which messages are counted, by the type in their header; None: all. Of these, from the one numbered
    `first` (from 0) on, `count` messages (None: all) are struck with probability `rate`. `seconds` as in the module's
    docstring; a CUT lasts for good by default."""

    fault: Fault
    frame_type: type[Any] | None = None
    first: int = 0
    count: int | None = None
    rate: float = 1.0
    seconds: float = math.inf


class FaultyTransport:
    """A Transport round `inner`. `injected` counts what was done, by fault."""

    def __init__(self, inner: Transport, rules: Sequence[FaultRule], seed: int, clock: Clock) -> None:
        self.injected: Counter[Fault] = Counter()
        self._inner = inner
        self._strikers = [_Striker(rule, f"{seed}/{place}") for place, rule in enumerate(rules)]
        self._clock = clock
        self._held: list[_Held] = []
        self._cut_until: dict[Peer, float] = {}

    @property
    def endpoint(self) -> str:
        return self._inner.endpoint

    def connect(self, endpoint: str) -> Peer:
        return self._inner.connect(endpoint)

    def disconnect(self, peer: Peer) -> None:
        self._held = [held for held in self._held if held.peer != peer]
        self._inner.disconnect(peer)

    def buffer(self, peer: Peer, byte_count: int) -> memoryview:
        return fresh_buffer(byte_count)  # not the wrapped one's: what is held back must stay as it is

    def send(self, peer: Peer, parts: Sequence[Part]) -> None:
        struck = self._strike(parts)
        if Fault.CUT in struck:
            self._cut_until[peer] = self._clock.now() + struck[Fault.CUT].rule.seconds
        if self._is_cut(peer):
            return
        waiting = [held for held in self._held if held.until_next and held.peer == peer]
        if Fault.DROP not in struck:
            self._pass_on(peer, parts, struck)
        for held in waiting:
            self._release(held)

    def receive(self, timeout_s: float) -> list[Event]:
        self._release_due()
        due = self.next_due()
        if due is not None:
            timeout_s = min(timeout_s, max(due - self._clock.now(), 0.0))
        events = self._inner.receive(timeout_s)
        self._release_due()
        return [event for event in events if not (isinstance(event, Message) and self._is_cut(event.peer))]

    def wake(self) -> None:
        self._inner.wake()

    def close(self) -> None:
        self._held.clear()
        self._inner.close()

    def next_due(self) -> float | None:
        """When `receive` should be called for what is held back; None: nothing is."""
        return min((held.due for held in self._held), default=None)

    def _strike(self, parts: Sequence[Part]) -> dict[Fault, _Strike]:
        frame_type = type_of(parts)
        strikes = [strike for striker in self._strikers if (strike := striker.strike(frame_type)) is not None]
        self.injected.update(strike.rule.fault for strike in strikes)
        return {strike.rule.fault: strike for strike in strikes}

    def _pass_on(self, peer: Peer, parts: Sequence[Part], struck: dict[Fault, _Strike]) -> None:
        if Fault.CORRUPT in struck:
            parts = _corrupted(parts, struck[Fault.CORRUPT].rng)
        for _ in range(2 if Fault.DUPLICATE in struck else 1):
            if Fault.DELAY in struck:
                self._hold(peer, parts, struck[Fault.DELAY].rule.seconds, until_next=False)
            elif Fault.REORDER in struck:
                self._hold(peer, parts, _REORDER_S, until_next=True)
            else:
                self._inner.send(peer, parts)

    def _hold(self, peer: Peer, parts: Sequence[Part], seconds: float, *, until_next: bool) -> None:
        self._held.append(_Held(self._clock.now() + seconds, peer, parts, until_next))

    def _release_due(self) -> None:
        now = self._clock.now()
        for held in sorted((held for held in self._held if held.due <= now), key=lambda held: held.due):
            self._release(held)

    def _release(self, held: _Held) -> None:
        self._held.remove(held)
        if not self._is_cut(held.peer):
            self._inner.send(held.peer, held.parts)

    def _is_cut(self, peer: Peer) -> bool:
        return self._clock.now() < self._cut_until.get(peer, -math.inf)


@dataclass(slots=True, eq=False)
class _Held:
    """A message that goes out at `due`, or after the next one to its peer."""

    due: float
    peer: Peer
    parts: Sequence[Part]
    until_next: bool


@dataclass(frozen=True, slots=True)
class _Strike:
    rule: FaultRule
    rng: random.Random


class _Striker:
    """A rule and how many messages it has counted."""

    def __init__(self, rule: FaultRule, seed: str) -> None:
        self._rule = rule
        self._seed = seed
        self._counted = 0

    def strike(self, frame_type: type[Any] | None) -> _Strike | None:
        rule, number = self._rule, self._counted
        if rule.frame_type is not None and frame_type is not rule.frame_type:
            return None
        self._counted += 1
        if number < rule.first or (rule.count is not None and number >= rule.first + rule.count):
            return None
        rng = random.Random(f"{self._seed}/{number}")
        return _Strike(rule, rng) if rng.random() < rule.rate else None


def _corrupted(parts: Sequence[Part], rng: random.Random) -> list[Part]:
    """Copies with one bit changed: the sender may still use its own."""
    copies = [bytearray(part) for part in parts]
    part = rng.choice([copy for copy in copies if copy] or [bytearray(1)])
    part[rng.randrange(len(part))] ^= 1 << rng.randrange(8)
    return [bytes(copy) for copy in copies]
