"""When prefill gives its KV to the wire: the modes' order, the same bytes in all, and traces that show which it was."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pdserve.config import TRANSFER_MODES, Config, TransferConfig
from pdserve.errors import ConfigError
from pdserve.tracing import TraceEvent
from pdserve.types import SamplingParams
from prefill_worker.release import Release
from support.checkpoints import TinyShape, write_tiny_checkpoint
from support.engines import Job, make_engine
from support.pairs import Pair

CHUNKS = [(0, 4), (4, 6)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=2)
PROMPT = list(range(1, 101))
WAIT_S = 20.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = TinyShape(heads=3, kv_heads=1, hidden_size=48)
    return write_tiny_checkpoint(tmp_path_factory.mktemp("modes") / "llama", "llama", shape=shape)


def given_after_each_layer(mode: str) -> list[int]:
    """How many ranges were given after each of four layers of the two chunks."""
    given: list[tuple[int, int, int]] = []
    release = Release(mode, 2, CHUNKS[-1][1], lambda *part: given.append(part))
    counts = []
    for start, stop in CHUNKS:
        for layer in range(2):
            release.computed(layer, start, stop)
            counts.append(len(given))
    assert given == [(layer, *chunk) for chunk in CHUNKS for layer in range(2)]
    return counts


def test_each_mode_gives_every_range_once_in_order_and_in_its_time() -> None:
    assert given_after_each_layer("layerwise") == [1, 2, 3, 4]
    assert given_after_each_layer("chunkwise") == [0, 2, 2, 4]
    assert given_after_each_layer("whole") == [0, 0, 0, 4]


def test_unknown_mode_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="layerwise, chunkwise, whole"):
        Config().override({"transfer": {"mode": "blockwise"}}, "test")


def frames_sent(events: list[TraceEvent]) -> list[TraceEvent]:
    return [event for event in events if event.name == "frame_sent"]


def generate(checkpoint: Path, mode: str) -> tuple[Job, list[TraceEvent]]:
    """A disaggregated generation whose prompt takes four chunks. Where the mode lets KV leave before the last one, the
    first chunk's must leave before any other is computed."""
    prefill, decode = (make_engine(checkpoint, max_step_tokens=32) for _ in range(2))
    job = Job(PROMPT, PARAMS)
    with Pair(prefill, decode, TransferConfig(mode=mode)) as pair:
        pair.start(job)
        pair.prefill_worker.step(wait_s=WAIT_S)  # the decode worker has issued its ticket at once
        until = time.monotonic() + WAIT_S
        while mode != "whole" and not frames_sent(pair.trace.events()):
            pair.decode_worker.step(wait_s=0.001)
            assert time.monotonic() < until, "nothing left"
        pair.finish(job)
        return job, pair.trace.events()


def test_modes_send_the_same_bytes_at_different_times(checkpoint: Path) -> None:
    runs = {mode: generate(checkpoint, mode) for mode in TRANSFER_MODES}
    jobs = [job for job, _ in runs.values()]
    assert jobs[0].tokens == jobs[1].tokens == jobs[2].tokens
    assert len({sum(event.fields["bytes"] for event in frames_sent(events)) for _, events in runs.values()}) == 1
    (computed,) = [event for event in runs["whole"][1] if event.name == "prefill_computed"]
    assert all(event.time_ns > computed.time_ns for event in frames_sent(runs["whole"][1]))
