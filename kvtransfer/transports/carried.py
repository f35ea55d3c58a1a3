"""A transport whose payloads go another way where there is one: a decorator round any other transport.

Above it nothing shows: a message goes in with its payload and comes out with it, in order. Below, a message is

    [header] or [header, payload]     as it was sent: small, or no other way is open
    [header, "", envelope CARRIED]    its payload is on a carrier (carrier.py), the envelope has the descriptor
    ["", "", envelope]                between the two ends of a carrier

    envelope   msgpack [kind, carrier's name, session, body]; a session is one outlet's life

For each peer connected to and each carrier, best first:

              offer                 READY
    (new) -----------> OFFERED ----------------> OPEN
                          |                        |
                          +-----> COOLING <--------+   refused, no answer in time, broken on either side
                                     |
                                     +--- cooldown over, a payload wants to go ---> OFFERED

A payload takes the first OPEN carrier that has room, else it goes inline. So a carrier that fails costs what was on it,
which the protocol above asks for again, and nothing after that. Its first failure for a peer is a warning in the log.

A message whose payload is not there yet holds up those behind it from the same peer, and only for `arrival_timeout_s`.
If it has not come then, or will not come, its carrier counts as broken.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import IntEnum, StrEnum

import msgpack

from kvtransfer.transports.base import Event, Message, Part, Peer, Transport
from kvtransfer.transports.carrier import Carrier, Inlet, Outlet
from pdserve.clock import Clock
from pdserve.errors import TransferError
from pdserve.logs import Logger

_SESSION_BYTES = 8
_MAX_ENVELOPE_BYTES = 4096
_MAX_INLETS = 1024
_CHECK_INTERVAL_S = 1.0  # between looks at whether the other end of an inlet still lives


class Kind(IntEnum):
    OFFER = 1  # ->
    READY = 2  # <-
    CARRIED = 3  # ->
    NOTE = 4  # <-
    BROKEN = 5  # <-, with the reason; also the answer to an offer that is refused


@dataclass(frozen=True, slots=True)
class Envelope:
    kind: Kind
    carrier: str
    session: bytes
    body: bytes

    def pack(self) -> bytes:
        return bytes(msgpack.packb([int(self.kind), self.carrier, self.session, self.body], use_bin_type=True))

    @classmethod
    def unpack(cls, part: Part) -> Envelope:
        """Raises TransferError for what is no envelope."""
        try:
            if len(part) > _MAX_ENVELOPE_BYTES:
                raise ValueError(f"{len(part)} bytes")
            kind, carrier, session, body = msgpack.unpackb(part, raw=False, max_array_len=4, max_map_len=0)
            if (type(carrier), type(session), type(body)) != (str, bytes, bytes):
                raise ValueError("wrong types")
            return cls(Kind(kind), carrier, session, body)
        except (ValueError, TypeError) as error:  # msgpack's own errors are ValueErrors too
            raise TransferError(f"not an envelope: {error}") from None


@dataclass(frozen=True, slots=True)
class CarriedLimits:
    """`min_bytes`: smaller payloads go inline. The rest as in the module's docstring."""

    min_bytes: int = 128 * 1024  # below, a carrier's own work costs more than the copies it saves
    answer_timeout_s: float = 5.0
    arrival_timeout_s: float = 2.0
    cooldown_s: float = 10.0


class CarriedTransport:
    """A Transport round `inner`. `carriers`: ours, best first; the other side uses of them what it has too.

    `counts`: payloads sent by way ("inline" or a carrier's name), and "lost" ones that did not come.
    """

    def __init__(
        self, inner: Transport, carriers: Sequence[Carrier], clock: Clock, log: Logger, limits: CarriedLimits
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._inner = inner
        self._carriers = {carrier.name: carrier for carrier in carriers}
        self._clock = clock
        self._log = log
        self._limits = limits
        self._ways: dict[Peer, list[_Way]] = {}
        self._inlets: dict[tuple[Peer, str], _Entrance] = {}
        self._arriving: dict[Peer, deque[_Arrival]] = {}
        self._events: list[Event] = []
        self._check_at = -math.inf

    @property
    def endpoint(self) -> str:
        return self._inner.endpoint

    @property
    def carriers(self) -> list[str]:
        """By name, best first."""
        return list(self._carriers)

    def connect(self, endpoint: str) -> Peer:
        peer = self._inner.connect(endpoint)
        if peer not in self._ways:
            self._ways[peer] = [_Way(carrier) for carrier in self._carriers.values()]
            for way in self._ways[peer]:
                self._offer(peer, way)
        return peer

    def disconnect(self, peer: Peer) -> None:
        for way in self._ways.pop(peer, ()):
            way.close()
        self._inner.disconnect(peer)

    def buffer(self, peer: Peer, byte_count: int) -> memoryview:
        for _, outlet in self._open_ways(peer, byte_count):
            room = outlet.reserve(byte_count)
            if room is not None:
                return room
        return self._inner.buffer(peer, byte_count)

    def send(self, peer: Peer, parts: Sequence[Part]) -> None:
        if len(parts) == 2:
            for way, outlet in self._open_ways(peer, len(parts[1])):
                descriptor = outlet.put(parts[1])
                if descriptor is not None:
                    self.counts[way.carrier.name] += 1
                    self._tell(peer, Envelope(Kind.CARRIED, way.carrier.name, way.session, descriptor), parts[0])
                    return
            self.counts["inline"] += 1
        self._inner.send(peer, parts)

    def receive(self, timeout_s: float) -> list[Event]:
        self._keep_up()
        self._deliver_arrived()
        now = self._clock.now()
        due = min((queue[0].due for queue in self._arriving.values()), default=math.inf)
        wait_s = 0.0 if self._events else max(min(timeout_s, due - now), 0.0)
        for event in self._inner.receive(wait_s):
            if isinstance(event, Message):
                self._on_message(event)
            else:
                self._events.append(event)
        self._deliver_arrived()
        events, self._events = self._events, []
        return events

    def wake(self) -> None:
        self._inner.wake()

    def close(self) -> None:
        for ways in self._ways.values():
            for way in ways:
                way.close()
        for entrance in self._inlets.values():
            entrance.inlet.close()
        self._ways.clear()
        self._inlets.clear()
        self._arriving.clear()
        self._inner.close()

    # The sender's side.

    def _open_ways(self, peer: Peer, byte_count: int) -> Iterator[tuple[_Way, Outlet]]:
        """The ways that a payload of this size may take, best first."""
        if byte_count < self._limits.min_bytes:
            return
        for way in self._ways.get(peer, ()):
            outlet = self._open_outlet(peer, way)
            if outlet is not None:
                yield way, outlet

    def _open_outlet(self, peer: Peer, way: _Way) -> Outlet | None:
        now = self._clock.now()
        if way.state is _WayState.OFFERED and now >= way.since + self._limits.answer_timeout_s:
            self._cool(peer, way, f"no answer for {self._limits.answer_timeout_s:g} s")
        if way.state is _WayState.COOLING and now >= way.since + self._limits.cooldown_s:
            self._offer(peer, way)
        if way.state is not _WayState.OPEN or way.outlet is None:
            return None
        if (reason := way.outlet.broken()) is not None:
            self._cool(peer, way, reason)
            return None
        return way.outlet

    def _offer(self, peer: Peer, way: _Way) -> None:
        way.state, way.since, way.session = _WayState.OFFERED, self._clock.now(), secrets.token_bytes(_SESSION_BYTES)
        try:
            way.outlet = way.carrier.outlet(self.wake)
        except TransferError as error:
            self._cool(peer, way, error.message)
        else:
            way.to_offer = True
            self._make_offer(peer, way)

    def _make_offer(self, peer: Peer, way: _Way) -> None:
        offer = way.outlet.offer() if way.outlet is not None else None
        if offer is not None:
            way.to_offer = False
            self._tell(peer, Envelope(Kind.OFFER, way.carrier.name, way.session, offer))

    def _cool(self, peer: Peer, way: _Way, reason: str) -> None:
        way.close()
        way.state, way.since = _WayState.COOLING, self._clock.now()
        log = self._log.debug if way.warned else self._log.warning
        way.warned = True
        log(
            "payloads go another way",
            peer=peer.decode(errors="replace"),
            carrier=way.carrier.name,
            reason=reason,
            cooldown_s=self._limits.cooldown_s,
        )

    def _on_answer(self, peer: Peer, envelope: Envelope) -> None:
        for way in self._ways.get(peer, ()):
            if way.session != envelope.session or way.outlet is None:
                continue
            if envelope.kind is Kind.READY:
                way.state = _WayState.OPEN
            elif envelope.kind is Kind.BROKEN:
                self._cool(peer, way, envelope.body.decode(errors="replace"))
            elif envelope.kind is Kind.NOTE:
                try:
                    way.outlet.on_note(envelope.body)
                except TransferError as error:
                    self._cool(peer, way, error.message)

    # The receiver's side.

    def _on_message(self, message: Message) -> None:
        peer, parts = message.peer, message.parts
        if len(parts) != 3:
            if peer in self._arriving:
                self._arriving[peer].append(_Arrival(message, None, None, math.inf))
            else:
                self._events.append(message)
            return
        try:
            envelope = Envelope.unpack(parts[2])
        except TransferError as error:
            self._log.debug("envelope refused", peer=peer.decode(errors="replace"), reason=error.message)
            return
        if envelope.kind is Kind.OFFER:
            self._on_offer(peer, envelope)
        elif envelope.kind is Kind.CARRIED:
            self._on_carried(peer, parts[0], envelope)
        else:
            self._on_answer(peer, envelope)

    def _on_offer(self, peer: Peer, envelope: Envelope) -> None:
        known = self._inlets.get((peer, envelope.carrier))
        if known is not None and known.session == envelope.session:
            return
        if known is not None:
            self._drop_inlet(peer, known)
        try:
            if envelope.carrier not in self._carriers:
                raise TransferError("not in use here")
            if len(self._inlets) >= _MAX_INLETS:
                raise TransferError(f"{_MAX_INLETS} are open already")
            inlet = self._carriers[envelope.carrier].inlet(envelope.body, self.wake)
        except TransferError as error:
            self._break(peer, envelope, error.message)
            return
        self._inlets[peer, envelope.carrier] = _Entrance(envelope.carrier, envelope.session, inlet)
        self._tend(peer, self._inlets[peer, envelope.carrier])

    def _on_carried(self, peer: Peer, header: Part, envelope: Envelope) -> None:
        entrance = self._inlets.get((peer, envelope.carrier))
        if entrance is None or entrance.session != envelope.session:
            self.counts["lost"] += 1
            self._break(peer, envelope, "not open here")
            return
        payload = entrance.inlet.take(envelope.body)
        due = math.inf if payload.done() else self._clock.now() + self._limits.arrival_timeout_s
        arrival = _Arrival(Message(peer, [header]), payload, entrance, due)
        self._arriving.setdefault(peer, deque()).append(arrival)

    def _deliver_arrived(self) -> None:
        """Pass on what is there, in each peer's order; give up what is overdue."""
        now = self._clock.now()
        for peer, queue in list(self._arriving.items()):
            while queue:
                arrival = queue[0]
                if not arrival.settled() and now < arrival.due:
                    break
                queue.popleft()
                whole = arrival.whole()
                if isinstance(whole, Message):
                    self._events.append(whole)
                else:
                    self.counts["lost"] += 1
                    self._fail_inlet(peer, arrival, whole)
            if not queue:
                del self._arriving[peer]

    def _keep_up(self) -> None:
        """What the other ends should know; and once in a while, whether they are still there."""
        for peer, ways in self._ways.items():
            for way in ways:
                if way.to_offer:
                    self._make_offer(peer, way)
        now = self._clock.now()
        checking = now >= self._check_at
        if checking:
            self._check_at = now + _CHECK_INTERVAL_S
        for (peer, _), entrance in list(self._inlets.items()):
            if checking and (reason := entrance.inlet.broken()) is not None:
                self._drop_inlet(peer, entrance)
                self._break(peer, entrance, reason)
            else:
                self._tend(peer, entrance)

    def _tend(self, peer: Peer, entrance: _Entrance) -> None:
        if not entrance.told_ready and entrance.inlet.ready():
            entrance.told_ready = True
            self._tell(peer, Envelope(Kind.READY, entrance.carrier, entrance.session, b""))
        note = entrance.inlet.note()
        if note is not None:
            self._tell(peer, Envelope(Kind.NOTE, entrance.carrier, entrance.session, note))

    def _fail_inlet(self, peer: Peer, arrival: _Arrival, reason: str) -> None:
        entrance = arrival.entrance
        assert entrance is not None
        if self._inlets.get((peer, entrance.carrier)) is entrance:
            self._drop_inlet(peer, entrance)
            self._break(peer, entrance, reason)

    def _drop_inlet(self, peer: Peer, entrance: _Entrance) -> None:
        """What is on its way through it is lost, what has come stays valid."""
        del self._inlets[peer, entrance.carrier]
        entrance.inlet.close()
        for arrival in self._arriving.get(peer, ()):
            if arrival.entrance is entrance:
                arrival.due = -math.inf

    def _break(self, peer: Peer, of: Envelope | _Entrance, reason: str) -> None:
        self._tell(peer, Envelope(Kind.BROKEN, of.carrier, of.session, reason.encode()[:512]))

    def _tell(self, peer: Peer, envelope: Envelope, header: Part = b"") -> None:
        self._inner.send(peer, [header, b"", envelope.pack()])


class _WayState(StrEnum):
    OFFERED = "offered"
    OPEN = "open"
    COOLING = "cooling"


class _Way:
    """One carrier's way to one peer."""

    def __init__(self, carrier: Carrier) -> None:
        self.carrier = carrier
        self.state = _WayState.COOLING
        self.since = -math.inf
        self.session = b""
        self.outlet: Outlet | None = None
        self.to_offer = False
        self.warned = False

    def close(self) -> None:
        if self.outlet is not None:
            self.outlet.close()
            self.outlet = None


@dataclass(slots=True, eq=False)
class _Entrance:
    """An inlet and whose it is."""

    carrier: str
    session: bytes
    inlet: Inlet
    told_ready: bool = False


@dataclass(slots=True, eq=False)
class _Arrival:
    """A message that came: complete without `payload`, else it lacks what that will bring, by `due`."""

    message: Message
    payload: Future[memoryview] | None
    entrance: _Entrance | None
    due: float

    def settled(self) -> bool:
        return self.payload is None or self.payload.done()

    def whole(self) -> Message | str:
        """The message, or why it will never be whole. The error is not raised: its traceback would hold this frame,
        which holds the error, and all that waits would stay until the garbage collector comes by."""
        if self.payload is None:
            return self.message
        if not self.payload.done():
            return "a payload did not come in time"
        problem = self.payload.exception()
        return str(problem) if problem else Message(self.message.peer, [*self.message.parts, self.payload.result()])
