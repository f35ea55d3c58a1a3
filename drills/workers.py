"""Drills on workers: killed or frozen before, during and after a transfer and in mid-decode; all of a role lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from drills.arena import wait_for
from drills.faults import Injected, process_of
from drills.load import Recording, background, probe
from drills.phases import PHASE_TIMEOUT_S, ProbeSight
from drills.stage import Round, Stage
from pdserve.rpc.inference_pb2 import WorkerStatus

BEFORE, DURING, AFTER, MID_DECODE = "before transfer", "during transfer", "after transfer", "mid-decode"

TRIES = 3  # of a phase that was missed
STEADY_TOKENS = 2  # after which a request has no transfer any more
MID_TOKENS = 10
DETECT_TIMEOUT_S = 6.0  # several times router.worker_timeout_ms: who is slower does not look

Strike = Callable[[Stage, Round, WorkerStatus, str], Injected]


@dataclass(frozen=True, slots=True)
class Aim:
    """A phase of the probe: whom to strike when it has come, and what shows afterwards that the strike hit it."""

    phase: str
    find: Callable[[ProbeSight], WorkerStatus | None]
    hit: Callable[[ProbeSight, float], bool]  # with the strike's time


def kill_decode(stage: Stage) -> None:
    """SIGKILL the decode worker of a request."""
    for aim in _decode_aims(stage):
        aimed(stage, aim, kill)
    mid_decode(stage, "decode", kill)


def kill_prefill(stage: Stage) -> None:
    """SIGKILL the prefill worker of a request."""
    for aim in _prefill_aims(stage):
        aimed(stage, aim, kill)


def freeze_decode(stage: Stage) -> None:
    """SIGSTOP the decode worker of a request; it goes on when its requests have gone elsewhere."""
    for aim in _decode_aims(stage):
        aimed(stage, aim, freeze_a_while)
    mid_decode(stage, "decode", freeze_a_while)


def freeze_prefill(stage: Stage) -> None:
    """SIGSTOP the prefill worker of a request; it goes on while another one sends the rest."""
    for aim in _prefill_aims(stage):
        aimed(stage, aim, freeze_a_while)


def lose_all_prefill(stage: Stage) -> None:
    """SIGKILL every prefill worker during a transfer: decode computes the rest itself."""
    aimed(stage, Aim(DURING, _sender_in_transfer, _partly_received(stage)), kill_its_role)


def lose_all_decode(stage: Stage) -> None:
    """SIGKILL every decode worker in mid-decode: a prefill worker takes both roles."""
    mid_decode(stage, "decode", kill_its_role)


def kill(stage: Stage, round_: Round, worker: WorkerStatus, phase: str) -> Injected:
    return round_.injector.kill(process_of(worker), phase)


def kill_its_role(stage: Stage, round_: Round, worker: WorkerStatus, phase: str) -> Injected:
    """It first, then every other worker of its role."""
    injected = kill(stage, round_, worker, phase)
    for other in stage.arena.alive(worker.role):
        if other.incarnation != worker.incarnation:
            kill(stage, round_, other, phase).hit = True
    return injected


def freeze_a_while(stage: Stage, round_: Round, worker: WorkerStatus, phase: str) -> Injected:
    """Until the routers have noticed."""
    injected = round_.injector.freeze(process_of(worker), phase)
    if not wait_for(lambda: injected.detected_s is not None, DETECT_TIMEOUT_S):
        stage.problems.append(f"no router noticed within {DETECT_TIMEOUT_S:g} s that {worker.worker_id} was frozen")
    round_.injector.thaw()
    return injected


def aimed(stage: Stage, aim: Aim, strike: Strike) -> None:
    """Rounds in which the strike is aimed at a phase of the probe, until one has hit it; none without traces to aim
    by."""
    if not stage.arena.has_traces:
        return
    for number in range(1, TRIES + 1):
        shot = _Shot(stage, aim, strike, number)
        stage.play(aim.phase, shot.asks, shot.disturb)
        if shot.has_hit():
            return


class _Shot:
    """One round of `aimed`."""

    def __init__(self, stage: Stage, aim: Aim, strike: Strike, number: int) -> None:
        settings = stage.settings
        self._stage, self._aim, self._strike = stage, aim, strike
        self._probe = probe(settings.seed, f"{aim.phase.replace(' ', '-')}-{number}", settings.scale)
        self.asks = [*background(settings.seed, settings.streams, settings.scale), self._probe]
        self._sight: ProbeSight | None = None
        self._injected: Injected | None = None

    def disturb(self, round_: Round) -> None:
        *others, recording = round_.run.recordings
        round_.run.wait_tokens(others, STEADY_TOKENS, PHASE_TIMEOUT_S)
        self._sight = ProbeSight(self._stage.arena, recording)
        round_.run.release(recording)
        worker = self._aim.find(self._sight)
        if worker is not None:
            self._injected = self._strike(self._stage, round_, worker, self._aim.phase)

    def has_hit(self) -> bool:
        if self._sight is None or self._injected is None:
            return False
        self._injected.hit = self._aim.hit(self._sight, self._injected.at_s)
        return self._injected.hit


def mid_decode(stage: Stage, role: str, strike: Strike) -> None:
    """Rounds in which the strike falls on the busiest worker of a role while its streams flow, until one has hit."""
    settings = stage.settings
    struck: list[tuple[Injected, list[Recording]]] = []

    def disturb(round_: Round) -> None:
        round_.run.wait_tokens(round_.run.recordings, MID_TOKENS, PHASE_TIMEOUT_S)
        flowing = [each for each in round_.run.recordings if each.live and each.token_count]
        victim = stage.arena.busy(role)
        if victim is not None:
            struck.append((strike(stage, round_, victim, MID_DECODE), flowing))

    for _ in range(TRIES):
        round_ = stage.play(MID_DECODE, background(settings.seed, settings.streams, settings.scale), disturb)
        for injected, flowing in struck:
            injected.hit = any(stage.failed_over(recording) for recording in flowing)
        if not round_.missed(injected for injected, _ in struck):
            return


def _decode_aims(stage: Stage) -> tuple[Aim, ...]:
    """The phases of a transfer at its decode worker."""

    def not_sent(sight: ProbeSight, at_s: float) -> bool:
        return not sight.seen("prefill", "frame_sent", at_s) and stage.failed_over(sight.recording)

    def partly_sent(sight: ProbeSight, at_s: float) -> bool:
        whole = sight.seen("prefill", "transfer_complete", at_s)
        return sight.seen("prefill", "frame_sent", at_s) and not whole and stage.failed_over(sight.recording)

    def sent(sight: ProbeSight, at_s: float) -> bool:
        return stage.failed_over(sight.recording)

    return (
        Aim(BEFORE, ProbeSight.placed, not_sent),
        Aim(DURING, ProbeSight.receiving, partly_sent),
        Aim(AFTER, ProbeSight.received, sent),
    )


def _prefill_aims(stage: Stage) -> tuple[Aim, ...]:
    """The phases of a transfer at its prefill worker, which has done its work after it."""

    def not_received(sight: ProbeSight, at_s: float) -> bool:
        return not sight.seen("decode", "frame_received", at_s) and stage.failed_over(sight.recording)

    def received(sight: ProbeSight, at_s: float) -> bool:
        return sight.seen("decode", "transfer_complete", at_s) and not stage.failed_over(sight.recording)

    return (
        Aim(BEFORE, ProbeSight.queued, not_received),
        Aim(DURING, _sender_in_transfer, _partly_received(stage)),
        Aim(AFTER, _sender_after_transfer, received),
    )


def _sender_in_transfer(sight: ProbeSight) -> WorkerStatus | None:
    return sight.sender() if sight.receiving() else None


def _sender_after_transfer(sight: ProbeSight) -> WorkerStatus | None:
    return sight.sender() if sight.received() else None


def _partly_received(stage: Stage) -> Callable[[ProbeSight, float], bool]:
    def hit(sight: ProbeSight, at_s: float) -> bool:
        whole = sight.seen("decode", "transfer_complete", at_s)
        return sight.seen("decode", "frame_received", at_s) and not whole and stage.failed_over(sight.recording)

    return hit
