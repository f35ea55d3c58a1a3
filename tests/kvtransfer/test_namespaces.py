"""Two hosts, as far as the network knows: workers in namespaces of their own, CURVE on the link between them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.transports.zmq import CurveKey
from support.clusters import wait_for
from support.kv_faults import TOKEN_COUNT
from support.kv_links import CONFIG, LAYOUT
from support.kv_process import KvProcess, digest_of, kv_source
from support.kv_store import FakeStore
from support.namespaces import ADDRESSES, JoinedNamespaces, NoNamespaces, joined_namespaces

ENDS_WITHIN_S = 3 * CONFIG.ticket_ttl_ms / 1000 + 2.0
RIGHT_BYTES = digest_of(FakeStore.random(LAYOUT, TOKEN_COUNT, seed=1))
NO_BYTES = digest_of(FakeStore(LAYOUT, TOKEN_COUNT))
ALL_BYTES = LAYOUT.layer_count * LAYOUT.payload_bytes(TOKEN_COUNT)
KEY = CurveKey.generate()


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[JoinedNamespaces, KvProcess, KvProcess]]:
    """The link, a process on its near side and one on its far side. The last test cuts it."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kv", dir="/tmp")))
        try:
            link = stack.enter_context(joined_namespaces())
        except NoNamespaces as reason:
            pytest.skip(f"no network namespaces: {reason}")
        sources = [stack.enter_context(kv_source(folder, command_prefix=prefix)) for prefix in link.prefixes]
        (near,), (far,) = (source.fork(1) for source in sources)
        yield link, near, far


def connect(near: KvProcess, far: KvProcess, name: str, far_key: CurveKey = KEY) -> None:
    """A link on either side."""
    for process, address, key in ((near, ADDRESSES[0], KEY), (far, ADDRESSES[1], far_key)):
        process.link(name, host=address, key=key)


def transfer(sender: KvProcess, receiver: KvProcess, name: str, **how: Any) -> None:
    """Begin one over the links of that name."""
    ticket = receiver.expect(name, name, lease_after_s=how.pop("lease_after_s", 0.0))
    sender.send(name, name, ticket, **how)


def stats(process: KvProcess, link: str) -> dict[str, int]:
    process.command(do="report")
    counts: dict[str, int] = process.wait("report")["stats"][link]
    return counts


def test_transfer_goes_through_both_ways(hosts: tuple[JoinedNamespaces, KvProcess, KvProcess]) -> None:
    _, near, far = hosts
    for name, sender, receiver in (("there", near, far), ("back", far, near)):
        connect(near, far, name)
        transfer(sender, receiver, name)
        for process in (sender, receiver):
            end = process.wait("end", name=name)
            assert (end["error"], end["digest"]) == (None, RIGHT_BYTES)


def test_peer_without_the_key_gets_nothing_and_brings_nothing(
    hosts: tuple[JoinedNamespaces, KvProcess, KvProcess],
) -> None:
    _, near, far = hosts
    for name, sender, receiver in (("from a stranger", far, near), ("to a stranger", near, far)):
        connect(near, far, name, far_key=CurveKey.generate())
        transfer(sender, receiver, name)
        ends = {process: process.wait("end", ENDS_WITHIN_S, name=name) for process in (sender, receiver)}
        assert all(end["error"].startswith("TransferError") for end in ends.values())
        assert ends[receiver]["digest"] == NO_BYTES
        assert all(stats(process, name)["frames_received"] == 0 for process in ends)


def test_cut_link_ends_both_sides_in_time(hosts: tuple[JoinedNamespaces, KvProcess, KvProcess]) -> None:
    link, near, far = hosts
    for name in ("waiting", "in the stream"):
        connect(near, far, name)
    transfer(far, near, "waiting", lease_after_s=60.0)
    transfer(far, near, "in the stream", commit=False)
    wait_for(lambda: stats(near, "waiting")["frames_received"], "OPEN has come")
    wait_for(lambda: stats(near, "in the stream")["bytes_received"] == ALL_BYTES, "all layers have come")
    link.cut()
    for name in ("waiting", "in the stream"):
        for process in (near, far):
            end = process.wait("end", ENDS_WITHIN_S, name=name)
            assert "silent" in end["error"]
            assert end["late"] == 0
