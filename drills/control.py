"""Drills on what stands above the workers: routers, the orderly leaving of workers, Ray's control store."""

from __future__ import annotations

from collections.abc import Callable

from drills.arena import Process, wait_for
from drills.faults import process_of
from drills.load import Recording, background, probe
from drills.phases import PHASE_TIMEOUT_S
from drills.stage import Round, Stage
from drills.workers import MID_DECODE, MID_TOKENS, STEADY_TOKENS, TRIES
from pdserve.errors import Unavailable
from pdserve.rpc.inference_pb2 import WorkerStatus

BEFORE_TOKENS, DRAINED, TERMINATED = "before the first token", "drained in mid-decode", "terminated in mid-decode"
AFTERWARDS = "requests that come afterwards"

_DRAIN_TIMEOUT_S = 60.0


def kill_router(stage: Stage) -> None:
    """SIGKILL a router, in mid-decode and before a request's first token: its clients go on at another one."""
    for phase in (_kill_router_in_mid_decode, _kill_router_before_tokens):
        for number in range(TRIES):
            round_ = phase(stage, number)
            if not round_.missed(round_.injector.injected):
                break


def _kill_router_in_mid_decode(stage: Stage, number: int) -> Round:
    settings = stage.settings

    def disturb(round_: Round) -> None:
        round_.run.wait_tokens(round_.run.recordings, MID_TOKENS, PHASE_TIMEOUT_S)
        its_own = [each for each in round_.run.recordings if each.live and each.token_count and each.router == 0]
        injected = round_.injector.kill(stage.arena.router_process(0), MID_DECODE)
        round_.run.wait()
        injected.hit = any(_resumed(each) for each in its_own)

    return stage.play(MID_DECODE, background(settings.seed, settings.streams, settings.scale), disturb)


def _kill_router_before_tokens(stage: Stage, number: int) -> Round:
    settings = stage.settings
    aim = probe(settings.seed, f"router-before-tokens-{number}", settings.scale)  # none that a prefix cache knows

    def disturb(round_: Round) -> None:
        *others, recording = round_.run.recordings
        round_.run.wait_tokens(others, STEADY_TOKENS, PHASE_TIMEOUT_S)
        round_.run.release(recording)
        wait_for(lambda: stage.arena.busy("prefill") or recording.ended_s is not None, PHASE_TIMEOUT_S)
        if recording.live:
            early = not recording.token_count
            injected = round_.injector.kill(stage.arena.router_process(recording.router), BEFORE_TOKENS)
            round_.run.wait()
            injected.hit = early and _resumed(recording)

    return stage.play(BEFORE_TOKENS, [*background(settings.seed, settings.streams, settings.scale), aim], disturb)


def drain(stage: Stage) -> None:
    """Tell a decode worker to leave, by the drain call and by SIGTERM: it finishes its streams and gets no other."""
    _leaving(stage, DRAINED, _drain)
    _leaving(stage, TERMINATED, _terminate)


def _leaving(stage: Stage, phase: str, tell: Callable[[Stage, Round, WorkerStatus], None]) -> None:
    settings = stage.settings
    late = probe(settings.seed, phase.replace(" ", "-"), settings.scale)

    def disturb(round_: Round) -> None:
        *others, recording = round_.run.recordings
        round_.run.wait_tokens(others, MID_TOKENS, PHASE_TIMEOUT_S)
        victim = stage.arena.busy("decode")
        if victim is None:
            return
        tell(stage, round_, victim)
        if not wait_for(lambda: not _takes_work(stage, victim), PHASE_TIMEOUT_S):
            stage.problems.append(f"{victim.worker_id} did not say that it leaves")
        round_.run.release(recording)
        round_.run.wait()
        if any(line["decode"] == victim.incarnation for line in _placements(stage, recording)):
            stage.problems.append(f"{victim.worker_id} was leaving and got a new request")
        if phase == DRAINED:
            stage.arena.client().drain_worker(victim.worker_id, cancel=True)

    def tidy(round_: Round) -> None:
        try:
            disturb(round_)
        finally:
            round_.run.wait()
            moved = [each.request_id for each in round_.run.recordings if stage.failed_over(each)]
            for injected in round_.injector.injected:
                injected.hit = not moved
            if moved:
                stage.problems.append(f"a leaving worker's requests went on elsewhere: {', '.join(moved)}")

    stage.play(phase, [*background(settings.seed, settings.streams, settings.scale), late], tidy)


def _drain(stage: Stage, round_: Round, victim: WorkerStatus) -> None:
    round_.injector.note("drain", process_of(victim), DRAINED)
    stage.arena.client().drain_worker(victim.worker_id)


def _terminate(stage: Stage, round_: Round, victim: WorkerStatus) -> None:
    round_.injector.terminate(process_of(victim), TERMINATED)


def kill_control_store(stage: Stage) -> None:
    """SIGKILL Ray's control store: streams flow on, and requests that come afterwards are served."""
    settings = stage.settings
    asks = background(settings.seed, settings.streams, settings.scale)

    def disturb(round_: Round) -> None:
        store = stage.arena.process_named("gcs_server")
        if store is None:
            raise Unavailable("Ray's control store (gcs_server) was not found among the cluster's processes")
        round_.run.wait_tokens(round_.run.recordings, MID_TOKENS, PHASE_TIMEOUT_S)
        flowing = [each for each in round_.run.recordings if each.live and each.token_count]
        injected = round_.injector.kill(Process("control store", store), MID_DECODE)
        injected.hit = bool(flowing)
        round_.run.wait()

    stage.play(MID_DECODE, asks, disturb)
    stage.play(AFTERWARDS, asks[:2], lambda round_: None)


def _resumed(recording: Recording) -> bool:
    return recording.result is not None and recording.result.resumptions > 0


def _placements(stage: Stage, recording: Recording) -> list[dict[str, str]]:
    return stage.arena.lines_of(recording.request_id, "attempt started")


def _takes_work(stage: Stage, worker: WorkerStatus) -> bool:
    """Whether any router would still give it new requests."""
    return any(
        each.incarnation == worker.incarnation and each.state == "ready"
        for info in stage.arena.infos()
        for each in (info.workers if info else ())
    )
