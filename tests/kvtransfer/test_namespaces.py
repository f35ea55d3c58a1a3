"""Two hosts, as far as the network knows: workers in namespaces of their own, CURVE on the link between them."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvtransfer.transports.zmq import CurveKey
from support.clusters import wait_for
from support.kv_faults import TOKEN_COUNT
from support.kv_links import CONFIG, IMPATIENT, LAYOUT
from support.kv_process import KvProcess, digest_of, kv_source
from support.kv_store import FakeStore
from support.namespaces import ADDRESSES, JoinedNamespaces, NoNamespaces, joined_namespaces

ENDS_WITHIN_S = 3 * IMPATIENT.ticket_ttl_ms / 1000 + 5.0
RIGHT_BYTES = digest_of(FakeStore.random(LAYOUT, TOKEN_COUNT, seed=1))
NO_BYTES = digest_of(FakeStore(LAYOUT, TOKEN_COUNT))
ALL_BYTES = LAYOUT.layer_count * LAYOUT.payload_bytes(TOKEN_COUNT)
KEY = CurveKey.generate()


@dataclass(frozen=True, slots=True)
class Hosts:
    """A process on the near side of a link and one on its far side."""

    link: JoinedNamespaces
    near: KvProcess
    far: KvProcess

    def connect(self, far_key: CurveKey = KEY, ttl_ms: int = CONFIG.ticket_ttl_ms) -> str:
        """Links of the two to one another. Their name, which is also that of the transfer to come."""
        name = secrets.token_hex(4)
        for process, address, key in ((self.near, ADDRESSES[0], KEY), (self.far, ADDRESSES[1], far_key)):
            process.link(name, host=address, key=key, ttl_ms=ttl_ms)
        return name


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kv", dir="/tmp")))
        try:
            link = stack.enter_context(joined_namespaces())
        except NoNamespaces as reason:
            pytest.skip(f"no network namespaces: {reason}")
        sources = [stack.enter_context(kv_source(folder, command_prefix=prefix)) for prefix in link.prefixes]
        (near,), (far,) = (source.fork(1) for source in sources)
        yield Hosts(link, near, far)


def transfer(
    sender: KvProcess, receiver: KvProcess, name: str, *, lease_after_s: float | None = 0.0, commit: bool = True
) -> None:
    """Begin one."""
    ticket = receiver.expect(name, name, lease_after_s)
    sender.send(name, name, ticket, commit=commit)


def check_right(sender: KvProcess, receiver: KvProcess, name: str) -> None:
    for process in (sender, receiver):
        end = process.wait("end", name=name)
        assert (end["error"], end["digest"]) == (None, RIGHT_BYTES)


def stats(process: KvProcess, link: str) -> dict[str, int]:
    process.command(do="report")
    counts: dict[str, int] = process.wait("report")["stats"][link]
    return counts


def test_transfers_go_through_both_ways(hosts: Hosts) -> None:
    for sender, receiver in ((hosts.near, hosts.far), (hosts.far, hosts.near)):
        name = hosts.connect()
        transfer(sender, receiver, name)
        check_right(sender, receiver, name)


def test_peer_without_the_key_gets_nothing_and_brings_nothing(hosts: Hosts) -> None:
    started = [
        (hosts.connect(CurveKey.generate(), IMPATIENT.ticket_ttl_ms), *pair)
        for pair in ((hosts.far, hosts.near), (hosts.near, hosts.far))
    ]
    for name, sender, receiver in started:
        transfer(sender, receiver, name)
    for name, sender, receiver in started:
        ends = {process: process.wait("end", ENDS_WITHIN_S, name=name) for process in (sender, receiver)}
        assert all(end["error"].startswith("TransferError") for end in ends.values())
        assert ends[receiver]["digest"] == NO_BYTES
        assert all(stats(process, name)["frames_received"] == 0 for process in ends)


def test_cut_link_ends_both_sides_in_time_and_a_mended_one_serves_again(hosts: Hosts) -> None:
    near, far = hosts.near, hosts.far
    waiting, streaming = (hosts.connect(ttl_ms=IMPATIENT.ticket_ttl_ms) for _ in range(2))
    transfer(far, near, waiting, lease_after_s=None)
    transfer(far, near, streaming, commit=False)
    wait_for(lambda: stats(near, waiting)["frames_received"], "OPEN has come")
    wait_for(lambda: stats(near, streaming)["bytes_received"] == ALL_BYTES, "all layers have come")
    hosts.link.cut()
    for name in (waiting, streaming):
        for process in (near, far):
            end = process.wait("end", ENDS_WITHIN_S, name=name)
            assert "silent" in end["error"]
            assert end["late"] == 0
    hosts.link.mend()
    name = hosts.connect()
    transfer(far, near, name)
    check_right(far, near, name)
