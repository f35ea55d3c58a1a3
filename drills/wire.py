"""Drills on the KV wire: links cut and slow, messages corrupted, lost and doubled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from drills.faults import NOBODY
from drills.load import Ask, background, probe
from drills.phases import PHASE_TIMEOUT_S
from drills.stage import Round, Stage
from drills.workers import DURING, STEADY_TOKENS
from pdserve.errors import ConfigError

_PROBES = 3
_CUT_S = 12.0  # more than twice the life of a ticket

Rule = dict[str, Any]


def cut_link(stage: Stage) -> None:
    """From the tenth layer frame on, nothing goes over the link: another sender takes over, or decode itself."""
    _strike(stage, [{"fault": "cut", "frame": "layer", "first": 10, "count": 1, "seconds": _CUT_S}], 1)


def slow_link(stage: Stage) -> None:
    """Frames come late and out of order."""
    _strike(stage, [{"fault": "delay", "rate": 0.5, "seconds": 0.2}], _PROBES)


def corrupt_frames(stage: Stage) -> None:
    """Bits flip in headers and payloads."""
    _strike(stage, [{"fault": "corrupt", "rate": 0.125}], _PROBES)


def drop_frames(stage: Stage) -> None:
    """Messages of every kind are lost or come twice; the first COMMIT and the first ACK are lost for certain."""
    closing = [{"fault": "drop", "frame": frame, "count": 1} for frame in ("commit", "ack")]
    _strike(stage, [{"fault": "drop", "rate": 0.1}, {"fault": "duplicate", "rate": 0.1}, *closing], _PROBES)


def _strike(stage: Stage, rules: Sequence[Rule], probes: int) -> None:
    """A round whose long prompts are transferred while the rules strike."""
    settings, file = stage.settings, stage.arena.faults_file
    if file is None:
        raise ConfigError("this cluster's KV wire has no faults to switch on")
    aims = [probe(settings.seed, f"wire-{number}", settings.scale) for number in range(probes)]
    asks: list[Ask] = [*background(settings.seed, settings.streams, settings.scale), *aims]

    def disturb(round_: Round) -> None:
        steady = round_.run.recordings[: -len(aims)]
        round_.run.wait_tokens(steady, STEADY_TOKENS, PHASE_TIMEOUT_S)
        begin = datetime.now(UTC).isoformat(timespec="milliseconds")  # as the logs write it
        injected = round_.injector.note(" and ".join({rule["fault"]: 0 for rule in rules}), NOBODY, DURING)
        file.write_text(json.dumps({"seed": settings.seed, "rules": rules}))
        try:
            for recording in round_.run.recordings[-len(aims) :]:
                round_.run.release(recording)
            round_.run.wait()
        finally:
            file.unlink()
        kinds = {line["fault"] for line in _struck(stage) if line["time"] >= begin}
        injected.hit = kinds == {rule["fault"] for rule in rules}

    stage.play(DURING, asks, disturb)


def _struck(stage: Stage) -> list[dict[str, Any]]:
    return stage.arena.log_lines("*-*", "wire fault")
