"""The transport over ZMQ: one ROUTER bound for those who connect to us, one DEALER for each endpoint connected to.

    us  DEALER ---- messages of our transfers ----> ROUTER  them      peer here: ">" + endpoint
        DEALER <--- their answers ----------------- ROUTER            peer there: "<" + our identity

The identity of all our DEALERs is the process's incarnation, so a restarted worker is somebody else, and a broken
connection of the same process is taken over by its next one (ROUTER_HANDOVER). ROUTER_MANDATORY and IMMEDIATE let no
message go to somebody who is not there: it waits in a bounded outbox or is reported as lost. High-water marks stand
far above what credit allows to be on its way; credit, not ZMQ, bounds memory.

Payloads are passed to ZMQ and taken from it without a copy. Endpoints: ipc:// in a folder that only this user can
enter, or tcp:// with CURVE: both ends prove that they have the cluster's key, and everything is encrypted. Who has not
does not get past the handshake, which `receive` answers (ZAP).
"""

from __future__ import annotations

import math
import os
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import zmq
from zmq.utils import z85

from kvtransfer.frames import MAX_PAYLOAD_BYTES
from kvtransfer.transports.base import Event, Message, Part, Peer, PeerLost, fresh_buffer
from pdserve.errors import ConfigError, TransferError

_HIGH_WATER = 65_536  # messages in a ZMQ queue
_MAX_BATCH = 64  # messages of one receive
_RETRY_MS = 5  # between tries for a connected peer's full queue
_RECONNECT_MS, _RECONNECT_MAX_MS = 50, 1_000
_MAX_IPC_PATH_BYTES = 107
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # ZMQ asks there who may come in


def ipc_endpoint(folder: Path, incarnation: str) -> str:
    """An ipc endpoint in `folder`, which is made with mode 0700 where it does not exist.

    The file's name stands for the whole incarnation but is short, as a socket's path may not be long.
    Raises ConfigError if the folder cannot be made, if somebody else could enter it, or if the path is too long.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise ConfigError(f"{folder}: cannot hold the KV sockets: {error}") from None
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(f"{folder}: must be a folder of this user with mode 0700, for the KV sockets")
    path = folder / f"kv-{blake2b(incarnation.encode(), digest_size=8).hexdigest()}"
    if len(os.fsencode(path)) > _MAX_IPC_PATH_BYTES:
        raise ConfigError(f"{path}: longer than the {_MAX_IPC_PATH_BYTES} bytes a socket's path may have")
    return f"ipc://{path}"


@dataclass(frozen=True, slots=True)
class CurveKey:
    """A cluster's key pair, both halves in Z85: who holds it belongs to the cluster."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> CurveKey:
        return cls(*zmq.curve_keypair())


class ZmqTransport:
    """A Transport. Binds `endpoint` ("tcp://127.0.0.1:*" takes any port) on construction.

    `identity`: 1 to 255 bytes that no other process has, the first not zero. `max_part_bytes`: a peer that sends more
    is cut off. `max_waiting`: messages that may wait for a peer. `key`: only who has it too gets in or is talked to;
    None: anybody, in the clear. Raises ConfigError where it cannot bind.
    """

    def __init__(
        self,
        endpoint: str,
        identity: bytes,
        max_part_bytes: int = MAX_PAYLOAD_BYTES,
        max_waiting: int = 65_536,
        key: CurveKey | None = None,
    ) -> None:
        if not 1 <= len(identity) <= 255 or identity[0] == 0:
            raise ConfigError(f"identity {identity!r}: must be 1 to 255 bytes, the first not zero")
        self._identity = identity
        self._max_part_bytes = max_part_bytes
        self._max_waiting = max_waiting
        self._key = key
        self._context = zmq.Context()
        self._gatekeeper = self._open_gate() if key is not None else None
        self._router = self._socket(zmq.ROUTER)
        self._router.set(zmq.ROUTER_MANDATORY, 1)
        self._router.set(zmq.ROUTER_HANDOVER, 1)
        if key is not None:
            self._router.set(zmq.CURVE_SERVER, 1)
            self._router.set(zmq.CURVE_SECRETKEY, key.secret)
            self._router.set_string(zmq.ZAP_DOMAIN, "kv")
        try:
            self._router.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"{endpoint}: cannot bind: {error}") from None
        self._endpoint = self._router.get_string(zmq.LAST_ENDPOINT)
        self._dealers: dict[Peer, zmq.Socket[bytes]] = {}
        self._outboxes: dict[Peer, deque[Sequence[Part]]] = {}
        self._lost: list[PeerLost] = []
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._wake_reader.fileno(), zmq.POLLIN)
        if self._gatekeeper is not None:
            self._poller.register(self._gatekeeper, zmq.POLLIN)

    @property
    def endpoint(self) -> str:
        return self._endpoint

    def connect(self, endpoint: str) -> Peer:
        peer = b">" + endpoint.encode()
        if peer not in self._dealers:
            dealer = self._socket(zmq.DEALER)
            dealer.set(zmq.ROUTING_ID, self._identity)
            dealer.set(zmq.IMMEDIATE, 1)
            dealer.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
            dealer.set(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
            if self._key is not None:
                dealer.set(zmq.CURVE_SERVERKEY, self._key.public)
                dealer.set(zmq.CURVE_PUBLICKEY, self._key.public)
                dealer.set(zmq.CURVE_SECRETKEY, self._key.secret)
            try:
                dealer.connect(endpoint)
            except zmq.ZMQError as error:
                dealer.close(linger=0)
                raise TransferError(f"{endpoint}: cannot connect: {error}") from None
            self._dealers[peer] = dealer
            self._poller.register(dealer, zmq.POLLIN)
        return peer

    def disconnect(self, peer: Peer) -> None:
        dealer = self._dealers.pop(peer, None)
        if dealer is not None:
            self._outboxes.pop(peer, None)
            self._poller.unregister(dealer)
            dealer.close(linger=0)

    def buffer(self, peer: Peer, byte_count: int) -> memoryview:
        return fresh_buffer(byte_count)

    def send(self, peer: Peer, parts: Sequence[Part]) -> None:
        outbox = self._outboxes.get(peer)
        if outbox is None:
            if not self._try_send(peer, parts):
                self._outboxes[peer] = deque([parts])
                self._watch_writable(peer)
        elif len(outbox) < self._max_waiting:
            outbox.append(parts)
        else:
            self._lost.append(PeerLost(peer))

    def receive(self, timeout_s: float) -> list[Event]:
        timeout_ms = 0 if self._lost else math.ceil(max(timeout_s, 0.0) * 1000)
        if any(peer not in self._dealers for peer in self._outboxes):
            timeout_ms = min(timeout_ms, _RETRY_MS)  # a ROUTER is writable if any of its peers is
        ready = dict(self._poller.poll(timeout_ms))
        if self._wake_reader.fileno() in ready:
            self._drain_wakes()
        if self._gatekeeper is not None and self._gatekeeper in ready:
            self._answer_at_gate(self._gatekeeper)
        for peer in list(self._outboxes):
            self._flush(peer)
        events: list[Event] = [*self._lost]
        self._lost.clear()
        if self._router in ready:
            events += self._take_routed()
        for peer, dealer in self._dealers.items():
            if ready.get(dealer, 0) & zmq.POLLIN:
                events += [Message(peer, parts) for parts in _messages(dealer)]
        return events

    def wake(self) -> None:
        try:
            self._wake_writer.send(b"w")
        except BlockingIOError:
            pass  # enough wakes are waiting
        except OSError:
            pass  # closed: nobody waits any more

    def close(self) -> None:
        if self._context.closed:
            return
        self._context.destroy(linger=0)
        self._dealers.clear()
        self._outboxes.clear()
        self._wake_reader.close()
        self._wake_writer.close()
        if self._endpoint.startswith("ipc://"):
            Path(self._endpoint.removeprefix("ipc://")).unlink(missing_ok=True)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.set(zmq.LINGER, 0)
        made.set(zmq.MAXMSGSIZE, self._max_part_bytes)
        made.set(zmq.SNDHWM, _HIGH_WATER)
        made.set(zmq.RCVHWM, _HIGH_WATER)
        return made

    def _open_gate(self) -> zmq.Socket[bytes]:
        gatekeeper = self._context.socket(zmq.ROUTER)
        gatekeeper.set(zmq.LINGER, 0)
        gatekeeper.bind(_ZAP_ENDPOINT)
        return gatekeeper

    def _answer_at_gate(self, gatekeeper: zmq.Socket[bytes]) -> None:
        """Let in who has proved to hold our key, as RFC 27 (ZAP) has it."""
        assert self._key is not None
        ours = z85.decode(self._key.public)
        for _ in range(_MAX_BATCH):
            try:
                asker, empty, version, request, _domain, _address, _identity, mechanism, *credentials = (
                    gatekeeper.recv_multipart(zmq.NOBLOCK)
                )
            except zmq.Again:
                return
            known = mechanism == b"CURVE" and credentials == [ours]
            verdict = (b"200", b"OK", b"pdserve") if known else (b"400", b"the key is not this cluster's", b"")
            gatekeeper.send_multipart([asker, empty, version, request, *verdict, b""])

    def _try_send(self, peer: Peer, parts: Sequence[Part]) -> bool:
        """Hand a message to ZMQ. False: not now. A peer that is not there loses it."""
        dealer = self._dealers.get(peer)
        try:
            if dealer is not None:
                dealer.send_multipart(parts, zmq.NOBLOCK, copy=False)
            else:
                self._router.send_multipart([peer[1:], *parts], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._lost.append(PeerLost(peer))
        return True

    def _flush(self, peer: Peer) -> None:
        outbox = self._outboxes[peer]
        while outbox:
            if not self._try_send(peer, outbox[0]):
                return
            outbox.popleft()
        del self._outboxes[peer]
        if (dealer := self._dealers.get(peer)) is not None:
            self._poller.modify(dealer, zmq.POLLIN)

    def _watch_writable(self, peer: Peer) -> None:
        if (dealer := self._dealers.get(peer)) is not None:
            self._poller.modify(dealer, zmq.POLLIN | zmq.POLLOUT)

    def _take_routed(self) -> Iterator[Message]:
        for identity, *parts in _messages(self._router):
            yield Message(b"<" + bytes(identity), parts)

    def _drain_wakes(self) -> None:
        try:
            while self._wake_reader.recv(4096):
                pass
        except BlockingIOError:
            pass


def _messages(source: zmq.Socket[bytes]) -> Iterator[list[memoryview]]:
    """What waits in a socket, up to the batch's limit."""
    for _ in range(_MAX_BATCH):
        try:
            frames = source.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return
        yield [frame.buffer for frame in frames]
