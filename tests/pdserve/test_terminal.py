"""How a worker's work ended, as its router hears it."""

import pytest

from pdserve.errors import DataLoss, InternalError, TransferError, Unavailable
from pdserve.rpc import convert
from pdserve.types import Finish, FinishReason, Owner

OWNER = Owner("tenant", "request", "router", 1)


def across(outcome):
    return convert.terminal_from_proto(convert.terminal_to_proto(OWNER, outcome))


@pytest.mark.parametrize("outcome", [None, Finish(FinishReason.LENGTH), Finish(FinishReason.STOP, stop_token_id=2)])
def test_an_end_arrives_as_it_was(outcome):
    assert across(outcome) == outcome


@pytest.mark.parametrize("error", [DataLoss("beyond repair"), InternalError("a step failed")])
def test_an_error_arrives_with_its_type(error):
    assert (type(across(error)), str(across(error))) == (type(error), str(error))


@pytest.mark.parametrize("error", [TransferError("the receiver was silent"), Unavailable("the link is closed")])
def test_a_worker_is_not_blamed_for_what_it_missed(error):
    heard = across(error)
    assert (heard.retryable, heard.blames_worker) == (True, False)
