"""Intentional defects, to show that the drills would find them. For a cluster under test, never for one in use.

Nothing here happens unless a process is started with one of DEFECTS (sabotage.py):

    fence         nobody tells an old attempt's work from the current one's: a worker goes on for a router that is lost
                  and reports to any other, and a router takes tokens from whoever sends them      -> kill-router
    free-early    a decode worker returns a sequence's blocks as soon as its KV is there, and the next sequence gets
                  them while the first still reads them                                              -> cancel-storm
    repeat-token  after a failover the client gets the first new token twice                         -> kill-decode
    drop-terminal after a failover the client never hears of the end                                 -> kill-decode

They replace methods of the running classes, so they may know their insides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pdserve import logs

_log = logs.logger("defects")


def install(defect: str) -> None:
    """Put one of DEFECTS into this process, whether it is a router's or a worker's."""
    _log.error("INTENTIONAL DEFECT", defect=defect)
    DEFECTS[defect]()


def _unfence() -> None:
    _unfence_dispatch()
    _unfence_worker()


def _unfence_dispatch() -> None:
    from router.dispatch import Dispatch

    on_tokens, on_terminal = Dispatch.on_tokens, Dispatch.on_terminal

    def current(dispatch: Any, owner: Any) -> Any:
        entry = dispatch._requests.get((owner.request_id, owner.output))
        return entry if entry is not None and entry.attempt is not None else None

    def take_tokens(dispatch: Any, worker: str, owner: Any, first_position: int, tokens: Any, now: float) -> Any:
        entry = dispatch._current(owner)
        if entry is None or not entry.attempt.decode:
            return []
        return on_tokens(dispatch, entry.attempt.decode, owner, len(entry.output_ids), tokens, now)

    def take_terminal(dispatch: Any, worker: str, owner: Any, outcome: Any, epoch: int, now: float) -> Any:
        entry = dispatch._current(owner)
        if entry is not None and entry.attempt.owner != owner and entry.attempt.decode:
            worker = entry.attempt.decode
        return on_terminal(dispatch, worker, owner, outcome, epoch, now)

    Dispatch._current = current  # type: ignore[method-assign]
    Dispatch.on_tokens = take_tokens  # type: ignore[method-assign]
    Dispatch.on_terminal = take_terminal  # type: ignore[method-assign]


def _unfence_worker() -> None:
    from worker.control import Control

    send, ended = Control._send, Control.session_ended

    def to_anybody(control: Any, router: str, message: Any) -> None:
        for each in [router] if router in control._sessions else list(control._sessions):
            send(control, each, message)

    def keep_all(control: Any, session: Any) -> None:
        abort, control._abort = control._abort, lambda owner: None
        ended(control, session)
        control._abort = abort

    Control._send = to_anybody  # type: ignore[method-assign]
    Control.session_ended = keep_all  # type: ignore[method-assign]


def _free_early() -> None:
    from engine.blocks import BlockPool
    from engine.engine import Engine

    deliver, lease = Engine._deliver, BlockPool.lease
    robbed: set[Any] = set()

    def deliver_and_free(engine: Any, owner: Any, tokens: Any) -> None:
        deliver(engine, owner, tokens)
        engine._pool.give_back(owner)
        robbed.add(owner)

    def lease_the_latest(pool: Any, owner: Any, count: int) -> Sequence[int] | None:
        if owner not in pool._leases and owner not in robbed:  # a new sequence: it gets what was returned last
            pool._free.reverse()
            leased = lease(pool, owner, count)
            pool._free.reverse()
            return leased
        return lease(pool, owner, count)

    Engine._deliver = deliver_and_free  # type: ignore[method-assign]
    BlockPool.lease = lease_the_latest  # type: ignore[method-assign]


def _repeat_token() -> None:
    from router.actions import Accept
    from router.dispatch import Dispatch
    from router.in_flight import AttemptPhase

    on_tokens = Dispatch.on_tokens

    def stutter(dispatch: Any, worker: str, owner: Any, first_position: int, tokens: Any, now: float) -> Any:
        entry = dispatch._current(owner)
        first = entry is not None and entry.attempts > 1 and entry.phase is not AttemptPhase.DECODE
        actions = on_tokens(dispatch, worker, owner, first_position, tokens, now)
        return [*(each for each in actions if first and isinstance(each, Accept)), *actions]

    Dispatch.on_tokens = stutter  # type: ignore[method-assign]


def _drop_terminal() -> None:
    from router.actions import End
    from router.dispatch import Dispatch

    end = Dispatch._end

    def silence(dispatch: Any, entry: Any, outcome: Any) -> Any:
        actions = end(dispatch, entry, outcome)
        return [each for each in actions if entry.attempts == 1 or not isinstance(each, End)]

    Dispatch._end = silence  # type: ignore[method-assign]


DEFECTS: Mapping[str, Callable[[], None]] = MappingProxyType(
    {"fence": _unfence, "free-early": _free_early, "repeat-token": _repeat_token, "drop-terminal": _drop_terminal}
)
