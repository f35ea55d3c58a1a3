"""Ends that come at awkward moments. The links' and the engines' turns are taken by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.types import SamplingParams
from support.checkpoints import TinyShape, write_tiny_checkpoint
from support.engines import Job, make_engine
from support.pairs import Pair

PARAMS = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = TinyShape(heads=3, kv_heads=1, hidden_size=48)
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "llama", "llama", shape=shape)


@pytest.mark.parametrize("faster", ["engine", "link"])
def test_an_abort_right_behind_the_order_to_compute_locally_holds(checkpoint: Path, faster: str) -> None:
    prefill, decode = make_engine(checkpoint), make_engine(checkpoint)
    pair = Pair(prefill, decode)
    for link in pair.links:
        link.accept()
    link = pair.links[1]
    job = Job(list(range(1, 40)), PARAMS)
    pair.decode_reports.ticket = lambda owner, ticket: None  # no prefill worker for it
    owner = pair.start(job)
    link.turn(0.0)
    pair.decode_service.prefill_locally(owner)
    pair.decode_service.abort(owner)
    if faster == "engine":
        decode.step()
    link.turn(0.0)
    link.turn(0.0)
    for _ in range(3):
        decode.step()
    assert job.ended == 1
    assert len(job.tokens) <= 1
    assert decode.idle()
    assert decode.load().blocks.leased == 0
    for link in pair.links:
        link.close()
