"""The whole system over each network and payload path that settings can choose: the same stream."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.transports.zmq import CurveKey
from pdserve.client import Client
from pdserve.config import TransferConfig
from pdserve.errors import FailedPrecondition
from pdserve.types import Role
from support.clusters import wait_for
from support.routers import RouterThread, make_worker
from worker.process import Worker

PROMPT = list(range(5, 105))
ROLES = (Role.PREFILL, Role.DECODE)
OPTIONS: dict[str, Any] = {"temperature": 1.0, "seed": 7, "max_tokens": 12, "ignore_eos": True}


@contextmanager
def workers(
    model: Path, transfer: TransferConfig, decode: TransferConfig | None = None
) -> Iterator[tuple[Client, Worker, Worker]]:
    """A client, a prefill worker and a decode worker, which may have settings of its own."""
    key = CurveKey.generate() if transfer.network == "tcp" else None
    settings = {Role.PREFILL: transfer, Role.DECODE: decode or transfer}
    with ExitStack() as stack:
        sockets = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kv", dir="/tmp"))) / "s"
        router = stack.enter_context(RouterThread(model))
        made = [make_worker(model, sockets, router, role=role, transfer=settings[role], kv_key=key) for role in ROLES]
        for worker in made:
            stack.callback(worker.stop)
            worker.start()
        client = stack.enter_context(Client(router.router.grpc_address))
        wait_for(lambda: len(client.server_info().workers) == len(made), "both workers are members")
        yield client, *made


@pytest.fixture(scope="module")
def expected(small_checkpoint: Path) -> list[int]:
    """The stream where everything is in the messages."""
    with workers(small_checkpoint, TransferConfig(payload="inline")) as (client, _, _):
        return list(client.complete(PROMPT, **OPTIONS).token_ids)


@pytest.mark.parametrize("path", ["ipc auto", "tcp auto", "tcp gloo"])
def test_stream_is_the_same_over_every_network_and_payload_path(
    small_checkpoint: Path, expected: list[int], path: str
) -> None:
    network, payload = path.split()
    with workers(small_checkpoint, TransferConfig(network=network, payload=payload)) as (client, prefill, decode):
        result = client.complete(PROMPT, **OPTIONS)
        assert decode.info.kv_endpoint.startswith(f"{network}://")
        assert any(event.name == "frame_sent" for event in prefill.trace_events()), "no KV went over the wire"
    assert (list(result.token_ids), result.attempts) == (expected, 1)


def test_workers_that_disagree_fail_the_request_and_the_client_reads_both_values(small_checkpoint: Path) -> None:
    theirs = TransferConfig(max_frame_bytes=64 << 10)
    with workers(small_checkpoint, TransferConfig(max_frame_bytes=1 << 20), decode=theirs) as (client, *both):
        message = "max_frame_bytes: the sender has 1048576, the receiver takes .* to 65536"
        with pytest.raises(FailedPrecondition, match=message):
            client.complete(PROMPT, timeout_s=20.0, **OPTIONS)
        wait_for(lambda: not any(worker.load.blocks.leased for worker in both), "the leases' return", timeout_s=5.0)
