"""Drills of many things at once: cancellations, overload, restarts, poison, and all faults mixed."""

from __future__ import annotations

import random
import time
from collections.abc import Container
from dataclasses import replace

from drills.arena import wait_for
from drills.faults import Injected, process_of
from drills.footprint import SETTLE_S, Footprint, trends
from drills.load import Ask, background, cancelled, probe
from drills.phases import PHASE_TIMEOUT_S
from drills.stage import Round, Stage
from drills.verdict import Wish
from pdserve.errors import Cancelled, ResourceExhausted
from pdserve.rpc.inference_pb2 import WorkerStatus

CANCELLED, OVERLOADED, UNDER_LOAD = "cancelled", "overloaded", "under load"
CRASHES = ("first crash", "second crash", "third crash")

_STORM_FACTOR = 4  # times the usual number of requests
_MOST_REQUESTS = 200  # of a round
_CANCELLED_SHARE = 0.6
_RESTARTS = 8
_RESTART_PAUSE_S = 10.0  # at most, for a victim to come back before the next
_MIXED_PAUSE_S = (2.0, 5.0)
_MIXED_ROUND_S = 30.0
_FREEZE_S = 2.5


def cancel_storm(stage: Stage) -> None:
    """Many requests at once, most of which are cancelled in any state; the others' answers do not change."""
    settings = stage.settings
    asks = cancelled(
        background(settings.seed, _STORM_FACTOR * settings.streams, settings.scale), settings.seed, _CANCELLED_SHARE
    )
    round_ = stage.play(CANCELLED, asks, lambda round_: None)
    gone = [each for each in round_.run.recordings if isinstance(each.error, Cancelled)]
    if not gone:
        stage.problems.append("nothing was cancelled: every request was too fast")


def overload(stage: Stage) -> None:
    """Many more requests than the routers take: the rest is refused at the door, with a hint when to come again."""
    settings = stage.settings
    asks = background(settings.seed, _STORM_FACTOR * settings.streams, settings.scale)
    asks = [replace(ask, wish=Wish.COMPLETE_OR_REFUSED) for ask in asks]
    round_ = stage.play(OVERLOADED, asks, lambda round_: None)
    for recording in round_.run.recordings:
        if isinstance(recording.error, ResourceExhausted) and recording.error.retry_after_s <= 0:
            stage.problems.append(f"{recording.request_id} was refused without a hint when to come again")


def restart_storm(stage: Stage) -> None:
    """SIGKILL one worker after the other while requests keep coming."""
    rng = random.Random(f"restarts/{stage.settings.seed}")

    def disturb(round_: Round) -> None:
        for _ in range(_RESTARTS):
            victim = _victim(stage, rng)
            if victim is None or not round_.run.live:
                break
            injected = round_.injector.kill(process_of(victim), UNDER_LOAD)
            injected.hit = victim.requests > 0
            wait_for(lambda injected=injected: injected.recovered_s is not None, _RESTART_PAUSE_S)
        round_.run.stop()

    stage.play(UNDER_LOAD, _stream_of_requests(stage), disturb, at_once=stage.settings.streams)


def mixed(stage: Stage) -> None:
    """Any fault every few seconds, for as long as one likes. The first router and the first worker of each role are
    frozen like the others but never killed: what they take must not grow meanwhile."""
    footprints: list[Footprint] = []
    rng = random.Random(f"mixed/{stage.settings.seed}")
    left_s = stage.settings.duration_s

    def disturb(round_: Round) -> None:
        round_end_s = time.monotonic() + min(left_s, _MIXED_ROUND_S)
        while time.monotonic() < round_end_s and round_.run.live:
            pause_s = min(rng.uniform(*_MIXED_PAUSE_S), max(0.0, round_end_s - time.monotonic()))
            wait_for(lambda: not round_.run.live, pause_s)
            _random_fault(stage, round_, rng)
        round_.run.stop()

    while left_s > 0:
        begin_s = time.monotonic()
        stage.play(UNDER_LOAD, _stream_of_requests(stage), disturb, at_once=stage.settings.streams)
        footprints += stage.arena.footprints()
        left_s -= max(_MIXED_ROUND_S, time.monotonic() - begin_s)
    _judge_growth(stage, footprints)


def _judge_growth(stage: Stage, footprints: list[Footprint]) -> None:
    found = {trend.first.name: trend for trend in trends(footprints)}
    stage.problems += [problem for trend in found.values() for problem in trend.growth()]
    stage.watched = {name: str(trend) for name, trend in found.items()}
    if stage.settings.duration_s >= SETTLE_S + 3 * _MIXED_ROUND_S:
        missing = sorted(_witnesses(stage) - set(found))
        stage.problems += [f"{name} did not live long enough to tell whether it grows" for name in missing]


def _witnesses(stage: Stage) -> set[str]:
    """The names of the processes that `mixed` lets live."""
    workers = sorted((worker.role, worker.worker_id) for worker in stage.arena.workers())
    first = {role: worker_id for role, worker_id in reversed(workers)}
    return {"router-0", *first.values()}


def poison(stage: Stage) -> None:
    """A request that crashes whoever serves it: given up after the third crash, refused for a while, and nobody else's
    requests are harmed."""
    settings = stage.settings
    others = background(settings.seed, 4, settings.scale)
    bad = replace(probe(settings.seed, "poison", settings.scale), wish=Wish.CONVICTED)
    again = replace(bad, name="poison-again")

    def disturb(round_: Round) -> None:
        *_, recording, repeated = round_.run.recordings
        round_.run.release(recording)
        for number, phase in enumerate(CRASHES, start=1):
            victim = _wait_attempt(stage, recording.request_id, number)
            if victim is None:
                return
            injected: Injected = round_.injector.crash(process_of(victim), phase)
            injected.hit = wait_for(lambda injected=injected: injected.detected_s is not None, PHASE_TIMEOUT_S)
        wait_for(lambda: recording.ended_s is not None, PHASE_TIMEOUT_S)
        round_.run.release(repeated)

    round_ = stage.play("poisoned", [*others, bad, again], disturb)
    first, second = ("an answer" if each.error is None else each.error.code for each in round_.run.recordings[-2:])
    if (first, second) != ("INTERNAL", "FAILED_PRECONDITION"):
        stage.problems.append(f"the poisonous request ended with {first}, the next one like it with {second}")


def _stream_of_requests(stage: Stage) -> list[Ask]:
    """More than there is time for: whoever plays them stops when it has seen enough."""
    settings = stage.settings
    kinds = background(settings.seed, settings.streams, settings.scale)
    return [
        replace(kinds[number % len(kinds)], name=f"{kinds[number % len(kinds)].name}.{number}")
        for number in range(_MOST_REQUESTS)
    ]


def _victim(stage: Stage, rng: random.Random, spared: Container[str] = ()) -> WorkerStatus | None:
    """Any worker that is not spared, as long as another one lives. Waits for that."""
    alive: list[WorkerStatus] = []

    def look() -> bool:
        alive[:] = [worker for worker in stage.arena.workers() if worker.state == "ready"]
        return len(alive) > 1

    if not wait_for(look, stage.settings.recover_timeout_s):
        return None
    victims = [worker for worker in alive if worker.worker_id not in spared]
    return rng.choice(victims) if victims else None


def _random_fault(stage: Stage, round_: Round, rng: random.Random) -> None:
    injector = round_.injector
    kind = rng.choice(["kill", "kill", "freeze", "terminate", "kill router"])
    injector.thaw()
    if kind == "kill router":
        others = range(1, len(stage.arena.addresses))
        if others and all(info is not None for info in stage.arena.infos()):
            injector.kill(stage.arena.router_process(rng.choice(others)), UNDER_LOAD).hit = True
        return
    victim = _victim(stage, rng, spared=() if kind == "freeze" else _witnesses(stage))
    if victim is None:
        return
    process = process_of(victim)
    if kind == "freeze":
        injected = injector.freeze(process, UNDER_LOAD)
    elif kind == "terminate":
        injected = injector.terminate(process, UNDER_LOAD)
    else:
        injected = injector.kill(process, UNDER_LOAD)
    injected.hit = victim.requests > 0
    if kind == "freeze":
        wait_for(lambda: not round_.run.live, _FREEZE_S)
        injector.thaw()


def _wait_attempt(stage: Stage, request_id: str, number: int) -> WorkerStatus | None:
    """The decode worker of a request's attempt of this number."""
    lines: list[str] = []

    def look() -> bool:
        lines[:] = [line["decode"] for line in stage.arena.lines_of(request_id, "attempt started")]
        return len(lines) >= number

    if not wait_for(look, PHASE_TIMEOUT_S):
        return None
    return next((each for each in stage.arena.workers() if each.incarnation == lines[number - 1]), None)
