"""Every transport keeps the same promises; ZMQ's own are below."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvtransfer.transports.assembly import worker_transport
from kvtransfer.transports.base import Event, Message, PeerLost, Transport
from kvtransfer.transports.carried import CarriedLimits, CarriedTransport
from kvtransfer.transports.zmq import CurveKey, ZmqTransport, ipc_endpoint
from pdserve.clock import SystemClock
from pdserve.config import TransferConfig
from pdserve.errors import ConfigError, TransferError
from pdserve.logs import logger
from support.kv_links import TransportFactory, carried, transport_factory

WAIT_S = 10.0


@pytest.fixture(params=["memory", "ipc", "tcp", "curve", "shared", "gloo"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TransportFactory]:
    made: list[Transport] = []
    factory = transport_factory(request.param, tmp_path)

    def tracked() -> Transport:
        made.append(factory())
        return made[-1]

    yield tracked
    for transport in made:
        transport.close()


def take(transport: Transport, count: int, *others: Transport) -> list[Event]:
    """Receive until `count` events came; `others` get their turns meanwhile."""
    events: list[Event] = []
    deadline = time.monotonic() + WAIT_S
    while len(events) < count:
        assert time.monotonic() < deadline, f"{len(events)} of {count} events came"
        events += transport.receive(0.02)
        for other in others:
            assert other.receive(0.0) == []
    return events


def test_message_arrives_whole_and_its_answer_comes_back(make: TransportFactory) -> None:
    ours, theirs = make(), make()
    peer = ours.connect(theirs.endpoint)
    payload = os.urandom(300_000)
    ours.send(peer, [b"header", memoryview(payload)])
    (message,) = take(theirs, 1, ours)
    assert isinstance(message, Message)
    assert [bytes(part) for part in message.parts] == [b"header", payload]
    theirs.send(message.peer, [b"answer"])
    (answer,) = take(ours, 1, theirs)
    assert isinstance(answer, Message)
    assert (answer.peer, [bytes(part) for part in answer.parts]) == (peer, [b"answer"])


def test_messages_to_one_peer_keep_their_order(make: TransportFactory) -> None:
    ours, theirs = make(), make()
    peer = ours.connect(theirs.endpoint)
    for number in range(500):
        ours.send(peer, [number.to_bytes(2, "big")])
    events = take(theirs, 500, ours)
    numbers = [int.from_bytes(event.parts[0], "big") for event in events if isinstance(event, Message)]
    assert numbers == list(range(500))


def test_peers_are_told_apart(make: TransportFactory) -> None:
    center, *others = [make() for _ in range(4)]
    for number, other in enumerate(others):
        other.send(other.connect(center.endpoint), [bytes([number])])
    events = take(center, 3, *others)
    assert len({event.peer for event in events}) == 3
    assert center.connect(others[0].endpoint) == center.connect(others[0].endpoint)
    assert center.connect(others[0].endpoint) not in {event.peer for event in events}
    for event in events:
        assert isinstance(event, Message)
        center.send(event.peer, event.parts)
    for number, other in enumerate(others):
        (echo,) = take(other, 1, center)
        assert isinstance(echo, Message)
        assert bytes(echo.parts[0]) == bytes([number])


def test_wake_ends_a_wait_from_another_thread(make: TransportFactory) -> None:
    transport, entered = make(), threading.Event()

    def wake() -> None:
        assert entered.wait(WAIT_S)
        transport.wake()

    waker = threading.Thread(target=wake)
    waker.start()
    started = time.monotonic()
    entered.set()
    assert transport.receive(WAIT_S) == []
    assert time.monotonic() - started < WAIT_S / 2
    waker.join()


def test_wake_before_a_wait_is_not_lost_and_many_count_as_one(make: TransportFactory) -> None:
    transport = make()
    for _ in range(100_000):
        transport.wake()
    started = time.monotonic()
    assert transport.receive(WAIT_S) == []
    assert time.monotonic() - started < WAIT_S / 2
    assert transport.receive(0.05) == []
    assert time.monotonic() - started > 0.04


def test_peer_that_went_away_is_reported_and_raises_nothing(make: TransportFactory) -> None:
    ours, theirs = make(), make()
    theirs.send(theirs.connect(ours.endpoint), [b"hello"])
    (message,) = take(ours, 1, theirs)
    theirs.close()
    deadline = time.monotonic() + WAIT_S
    lost: list[Event] = []
    while not lost:  # a ROUTER learns of it a moment later
        assert time.monotonic() < deadline
        ours.send(message.peer, [b"anybody there?"])
        lost = ours.receive(0.02)
    assert set(lost) == {PeerLost(message.peer)}


def test_unknown_and_forgotten_peers_are_reported(make: TransportFactory) -> None:
    ours, theirs = make(), make()
    ours.send(b"<nobody", [b"x"])
    assert take(ours, 1) == [PeerLost(b"<nobody")]
    ours.disconnect(b"<nobody")
    ours.disconnect(ours.connect(theirs.endpoint))


def test_connecting_to_nonsense_is_a_typed_error(make: TransportFactory) -> None:
    with pytest.raises(TransferError):
        make().connect("nonsense")


def test_close_and_wake_after_close_do_nothing(make: TransportFactory) -> None:
    transport = make()
    transport.close()
    transport.close()
    transport.wake()
    assert transport.endpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def test_message_waits_for_a_peer_that_comes_later(folder: Path) -> None:
    endpoint = ipc_endpoint(folder, "later")
    early = ZmqTransport(ipc_endpoint(folder, "early"), b"early")
    for number in range(3):
        early.send(early.connect(endpoint), [bytes([number]), bytes(200_000)])
    assert early.receive(0.0) == []
    late = ZmqTransport(endpoint, b"later")
    events = take(late, 3, early)
    assert [bytes(event.parts[0]) for event in events if isinstance(event, Message)] == [b"\0", b"\1", b"\2"]
    early.close()
    late.close()


def test_full_outbox_loses_the_newest_and_says_so(folder: Path) -> None:
    transport = ZmqTransport(ipc_endpoint(folder, "us"), b"us", max_waiting=2)
    peer = transport.connect(ipc_endpoint(folder, "nobody"))
    for _ in range(4):
        transport.send(peer, [b"x"])
    assert transport.receive(0.0) == [PeerLost(peer), PeerLost(peer)]
    transport.disconnect(peer)
    assert transport.receive(0.0) == []
    transport.close()


def test_part_above_the_limit_never_arrives(folder: Path) -> None:
    small = ZmqTransport(ipc_endpoint(folder, "small"), b"small", max_part_bytes=1000)
    other = ZmqTransport(ipc_endpoint(folder, "other"), b"other")
    peer = other.connect(small.endpoint)
    other.send(peer, [b"h", bytes(1001)])
    deadline = time.monotonic() + WAIT_S
    events: list[Event] = []
    while not events:  # the cut connection comes back, and then carries what is allowed
        assert time.monotonic() < deadline
        other.send(peer, [b"h", bytes(1000)])
        other.receive(0.02)
        events = small.receive(0.02)
    assert all(len(event.parts[1]) == 1000 for event in events if isinstance(event, Message))
    small.close()
    other.close()


def test_next_connection_of_the_same_worker_takes_over(folder: Path) -> None:
    center = ZmqTransport(ipc_endpoint(folder, "center"), b"center")
    first, second = (ZmqTransport(ipc_endpoint(folder, name), b"same") for name in ("first", "second"))
    first.send(first.connect(center.endpoint), [b"1"])
    take(center, 1, first)
    second.send(second.connect(center.endpoint), [b"2"])
    (message,) = take(center, 1, first, second)
    center.send(message.peer, [b"for the second"])
    assert len(take(second, 1, center, first)) == 1
    for transport in (center, first, second):
        transport.close()


def test_ipc_folder_is_private_and_a_shared_one_is_refused(folder: Path) -> None:
    ipc_endpoint(folder, "a")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o750)
    with pytest.raises(ConfigError, match="0700"):
        ipc_endpoint(folder, "a")


def test_file_in_the_folders_place_is_a_config_error(folder: Path) -> None:
    folder.write_text("no folder")
    with pytest.raises(ConfigError, match="cannot hold"):
        ipc_endpoint(folder, "a")


def test_incarnations_that_differ_at_the_end_have_different_sockets(folder: Path) -> None:
    incarnations = ["a-worker-with-a-long-name-" + "f" * 60 + ending for ending in "abc"]
    endpoints = {ipc_endpoint(folder, incarnation) for incarnation in incarnations}
    assert len(endpoints) == 3
    assert max(map(len, endpoints)) == len(f"ipc://{folder}/kv-") + 16


def test_socket_file_lives_as_long_as_its_transport(folder: Path) -> None:
    transport = ZmqTransport(ipc_endpoint(folder, "a"), b"a")
    assert len(list(folder.iterdir())) == 1
    transport.close()
    assert list(folder.iterdir()) == []


def test_path_too_long_for_a_socket_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="longer than"):
        ipc_endpoint(tmp_path / ("x" * 100), "incarnation")


@pytest.mark.parametrize("identity", [b"", b"\0auto", b"x" * 256])
def test_identity_zmq_would_not_take_is_a_config_error(identity: bytes) -> None:
    with pytest.raises(ConfigError, match="identity"):
        ZmqTransport("tcp://127.0.0.1:*", identity)


def test_endpoint_in_use_is_a_config_error() -> None:
    transport = ZmqTransport("tcp://127.0.0.1:*", b"a")
    with pytest.raises(ConfigError, match="cannot bind"):
        ZmqTransport(transport.endpoint, b"b")
    transport.close()


def test_cores_and_link_need_neither_zmq_nor_torch() -> None:
    code = (
        "import sys; sys.modules['zmq'] = sys.modules['torch'] = None\n"
        "import kvtransfer.sender, kvtransfer.receiver, kvtransfer.exchange, kvtransfer.link\n"
        "import kvtransfer.transports.memory"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_without_the_clusters_key_nothing_gets_in_and_nothing_out() -> None:
    key, other = CurveKey.generate(), CurveKey.generate()
    inside = ZmqTransport("tcp://127.0.0.1:*", b"inside", key=key)
    friend = ZmqTransport("tcp://127.0.0.1:*", b"friend", key=key)
    half = CurveKey(key.public, other.secret)  # the public half travels, and is no secret
    strangers = [
        ZmqTransport("tcp://127.0.0.1:*", name, key=given)
        for name, given in ((b"keyless", None), (b"another", other), (b"half", half))
    ]
    for stranger in strangers:
        stranger.send(stranger.connect(inside.endpoint), [b"let me in"])
        inside.send(inside.connect(stranger.endpoint), [b"a secret"])
    deadline = time.monotonic() + 0.5  # many handshakes long
    while time.monotonic() < deadline:
        for transport in (inside, *strangers):
            assert transport.receive(0.01) == []
    friend.send(friend.connect(inside.endpoint), [b"hello"])
    (message,) = take(inside, 1, friend, *strangers)
    assert isinstance(message, Message)
    assert bytes(message.parts[0]) == b"hello"
    for transport in (inside, friend, *strangers):
        transport.close()


def test_client_with_a_key_of_its_own_that_knows_the_public_one_is_turned_away() -> None:
    key = CurveKey.generate()
    inside = ZmqTransport("tcp://127.0.0.1:*", b"inside", key=key)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.set(zmq.LINGER, 0)
        stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
        stranger.curve_serverkey = key.public
        monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        stranger.connect(inside.endpoint)
        stranger.send(b"let me in")
        deadline = time.monotonic() + WAIT_S
        while not monitor.poll(0):
            assert time.monotonic() < deadline
            assert inside.receive(0.02) == []
        stranger.disable_monitor()
    inside.close()


def test_key_does_not_show_where_it_is_printed() -> None:
    key = CurveKey.generate()
    assert key.secret.decode() not in repr(key)


@pytest.mark.parametrize("kind", ["shared", "gloo"])
def test_payloads_go_by_the_carrier_once_it_is_open_and_stay_in_order(folder: Path, kind: str) -> None:
    limits = CarriedLimits(min_bytes=1, answer_timeout_s=WAIT_S, arrival_timeout_s=WAIT_S, cooldown_s=0.5)
    ours, theirs = (
        carried(ZmqTransport(ipc_endpoint(folder, name), name.encode()), kind, limits=limits)
        for name in ("ours", "theirs")
    )
    peer, sent = ours.connect(theirs.endpoint), 0
    received: list[bytes] = []
    deadline = time.monotonic() + WAIT_S
    while ours.counts[kind] < 50 or len(received) < sent:
        assert time.monotonic() < deadline
        if ours.counts[kind] < 50 and sent - len(received) < 4:
            ours.send(peer, [b"header", sent.to_bytes(2, "big") * 300])
            sent += 1
        ours.receive(0.0)
        received += [bytes(event.parts[1]) for event in theirs.receive(0.001) if isinstance(event, Message)]
    assert received == [number.to_bytes(2, "big") * 300 for number in range(sent)]
    ours.close()
    theirs.close()


@pytest.mark.parametrize(
    ("network", "payload", "scheme", "names"),
    [
        ("ipc", "auto", "ipc://", ["shared"]),
        ("ipc", "inline", "ipc://", []),
        ("tcp", "auto", "tcp://127.0.0.1:", []),
        ("tcp", "shared", "tcp://127.0.0.1:", ["shared"]),
        ("tcp", "gloo", "tcp://127.0.0.1:", ["gloo"]),
    ],
)
def test_settings_choose_network_and_payload_path(
    folder: Path, network: str, payload: str, scheme: str, names: list[str]
) -> None:
    config = TransferConfig(network=network, payload=payload)
    transport = worker_transport(config, "worker", folder, CurveKey.generate(), SystemClock(), logger("test"))
    assert isinstance(transport, CarriedTransport)
    assert transport.endpoint.startswith(scheme)
    assert transport.carriers == names
    transport.close()


def test_tcp_without_a_key_is_a_config_error(folder: Path) -> None:
    with pytest.raises(ConfigError, match="key"):
        worker_transport(TransferConfig(network="tcp"), "worker", folder, None, SystemClock(), logger("test"))


def test_nccl_without_a_gpu_is_a_config_error(folder: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    config = TransferConfig(payload="nccl")
    with pytest.raises(ConfigError, match="NCCL"):
        worker_transport(config, "worker", folder, None, SystemClock(), logger("test"))
    assert list(folder.iterdir()) == []
