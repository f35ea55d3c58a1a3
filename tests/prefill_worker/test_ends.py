"""An end that comes at an awkward moment, with a real engine and link. Their turns are taken by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.errors import Cancelled
from pdserve.types import SamplingParams
from support.checkpoints import TinyShape, write_tiny_checkpoint
from support.commands import abort
from support.engines import Job, make_engine
from support.pairs import Pair

PROMPT = list(range(1, 40))
PARAMS = SamplingParams(max_tokens=4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = TinyShape(heads=3, kv_heads=1, hidden_size=48)
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "llama", "llama", shape=shape)


def test_an_aborted_prompt_that_waits_for_its_receiver_returns_its_blocks_at_once(checkpoint: Path) -> None:
    """The receiver is dead, as the router knows: nobody has to wait for its silence."""
    pair = Pair(make_engine(checkpoint), make_engine(checkpoint))
    prefill, decode = pair.prefill_worker, pair.decode_worker
    for worker in (prefill, decode):
        worker.link.accept()
    owner = pair.start(Job(PROMPT, PARAMS))
    while not pair.prefill.load().blocks.leased or pair.prefill.load().running:
        prefill.link.turn(0.0)
        decode.link.turn(0.0)
        prefill.step()  # decode gets no turn, and so leases no blocks
    prefill.tell(abort(owner))
    prefill.link.turn(0.0)
    prefill.step()
    assert pair.prefill.load().blocks.leased == 0
    assert pair.prefill.idle()
    (ends,) = pair.prefill_ends.values()
    assert [type(end) for end in ends] == [Cancelled]
    for worker in (prefill, decode):
        worker.link.close()
