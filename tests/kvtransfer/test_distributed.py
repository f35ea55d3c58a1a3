"""A group's end whose other end stands still: bounded in time, and nobody else's matter."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import msgpack
import pytest

from kvtransfer.transports.carrier import Carrier, Inlet, Outlet
from kvtransfer.transports.cutting import cut
from support.clusters import wait_for
from support.kv_links import WAIT_S, gloo_carrier

TIMEOUT_S = 0.3
LONG_S = 2.0


@contextmanager
def frozen_store() -> Iterator[bytes]:
    """The offer of an outlet whose process is frozen: the kernel takes connections for it, nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as store:
        yield bytes(msgpack.packb(["127.0.0.1", store.getsockname()[1]]))


def receivers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "kv-group-receive"]


@pytest.fixture(scope="module")
def carrier() -> Carrier:
    return gloo_carrier(TIMEOUT_S)


def joined() -> tuple[Outlet, Inlet]:
    carrier = gloo_carrier(LONG_S)
    outlet = carrier.outlet(lambda: None)
    wait_for(outlet.offer, "an offer", WAIT_S)
    inlet = carrier.inlet(outlet.offer() or b"", lambda: None)
    return outlet, inlet


def test_joining_a_frozen_peers_store_ends_in_time_with_its_thread(carrier: Carrier) -> None:
    with frozen_store() as offer:
        inlet = carrier.inlet(offer, lambda: None)
        assert not inlet.ready()
        wait_for(inlet.broken, "the join has ended", WAIT_S)
        wait_for(lambda: not receivers(), "its thread has ended", WAIT_S)
        assert not inlet.ready()


def test_end_that_is_closed_while_it_joins_leaves_no_thread_for_long() -> None:
    with frozen_store() as offer:
        inlet = gloo_carrier(LONG_S).inlet(offer, lambda: None)
        inlet.close()
        assert receivers(), "closing waited for the join"
        wait_for(lambda: not receivers(), "its thread has ended", WAIT_S)


def test_frozen_peer_costs_one_thread_and_keeps_no_other_from_its_way(carrier: Carrier) -> None:
    with frozen_store() as offer:
        stuck = carrier.inlet(offer, lambda: None)
        outlet, inlet = joined()
        wait_for(inlet.ready, "the other pair is joined", WAIT_S)
        descriptor = outlet.put(b"payload")
        assert descriptor is not None
        payload = inlet.take(descriptor).result(WAIT_S)
        assert bytes(payload) == b"payload"
        wait_for(stuck.broken, "the join has ended", WAIT_S)
        assert inlet.broken() is None, "cut for another's sake"
        outlet.close()
        inlet.close()
        stuck.close()
        wait_for(lambda: not receivers(), "its thread has ended", WAIT_S)


def test_only_connections_to_that_address_are_cut() -> None:
    with ExitStack() as stack:
        meant, other = (stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2))
        ours, kept = (stack.enter_context(socket.create_connection(to.getsockname())) for to in (meant, other))
        for made in (ours, kept):
            made.settimeout(WAIT_S)
        assert cut(*meant.getsockname()) == 1
        assert ours.recv(1) == b""
        accepted = stack.enter_context(other.accept()[0])
        accepted.send(b"x")
        assert kept.recv(1) == b"x"
        assert cut("no such host.invalid", 1) == 0
