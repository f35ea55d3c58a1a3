"""Ends that come at awkward moments. The links' and the engines' turns are taken by hand."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.sequence import Sequence
from pdserve.errors import TransferError
from pdserve.types import Owner, SamplingParams, Ticket
from support.checkpoints import TinyShape, write_tiny_checkpoint
from support.engines import Job, make_engine
from support.pairs import Pair

PROMPT = list(range(1, 40))
PARAMS = SamplingParams(max_tokens=4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = TinyShape(heads=3, kv_heads=1, hidden_size=48)
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "llama", "llama", shape=shape)


@pytest.fixture
def pair(checkpoint: Path) -> Iterator[Pair]:
    made = Pair(make_engine(checkpoint), make_engine(checkpoint))
    for link in made.links:
        link.accept()
    yield made
    for link in made.links:
        link.close()


def test_an_aborted_prompt_that_waits_for_its_receiver_returns_its_blocks_at_once(pair: Pair) -> None:
    """The receiver is dead, as the router knows: nobody has to wait for its silence."""
    prefill_link, decode_link = pair.links
    owner = pair.start(Job(PROMPT, PARAMS))
    while not pair.prefill.load().blocks.leased or pair.prefill.load().running:
        prefill_link.turn(0.0)
        decode_link.turn(0.0)
        pair.prefill.step()  # decode's engine gets no turn, and so leases no blocks
    pair.prefill_service.abort(owner)
    prefill_link.turn(0.0)
    pair.prefill.step()
    assert pair.prefill.load().blocks.leased == 0
    assert pair.prefill.idle()


def test_a_transfer_that_fails_before_the_engine_has_its_prompt_leaves_nothing(pair: Pair) -> None:
    link, submit = pair.links[0], pair.prefill.submit

    def late(sequence: Sequence) -> None:
        link.turn(0.0)  # the ticket leads nowhere
        pair.prefill.step()
        submit(sequence)

    pair.prefill.submit = late  # type: ignore[method-assign]
    owner, ticket = Owner("tests", "r", "router", 1), Ticket(secrets.token_bytes(16), 1, "nowhere", 0, 5000)
    pair.prefill_service.start(owner, PROMPT, (), PARAMS, ticket)
    for _ in range(3):
        pair.prefill.step()
        link.turn(0.0)
    (ends,) = pair.prefill_reports.ended.values()
    assert [type(error) for error in ends] == [TransferError]
    assert pair.prefill.load().blocks.leased == 0
    assert pair.prefill.idle()
