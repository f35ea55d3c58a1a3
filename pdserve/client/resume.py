"""How a stream outlives its router. Pure: an event goes in, and what to do next comes out. No gRPC, clock or sleep.

    start ──► OpenCall ──► Receive ──message──► Deliver, or Receive again
                 ▲            │  └─────end────► Done
                 │            │ the call fails
          it serves           ▼
                 └──── AskRouter ◄──► Wait      one router after the other, until the time to look is over ──► Fail

The first message of a stream says all that the request was made into. With the token ids received so far and the latest
resume states, any router gives the rest of the same stream.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Final

from pdserve.client.stream import Delta, Result, Started, StreamFold
from pdserve.errors import Cancelled, DeadlineExceeded, PdserveError, ProtocolError, ResourceExhausted, Unavailable
from pdserve.rpc import inference_pb2 as pb

RESUME_TIMEOUT_S: Final = 30.0  # how long a stream whose router is gone looks for one
CONNECT_TIMEOUT_S: Final = 1.0  # for each router it asks meanwhile
LOOK_PAUSE_S: Final = 0.05  # between two of them
MAX_RETRY_PAUSE_S: Final = 5.0  # before a full router is asked again, whatever it says
MAX_LOSSES: Final = 20  # of its connection, after which a stream gives up
ENDED: Final = "the stream was cancelled, or its client closed"


class ConnectionLost(Unavailable):
    """Nobody answered, or the answer broke off: not a refusal by a router."""


@dataclass(frozen=True, slots=True)
class OpenCall:
    """Send this request to this router, to be answered within `timeout_s`. Then tell `on_opened`."""

    router: int
    request: pb.GenerateRequest
    timeout_s: float | None


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for what the open call brings: `on_message`, `on_end` or `on_failure`."""


@dataclass(frozen=True, slots=True)
class AskRouter:
    """Ask this router whether it serves, and wait at most so long, the connection's making included. Then tell
    `on_health`."""

    router: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait so long, which is never longer than LOOK_PAUSE_S. Then tell `on_time`."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Deliver:
    """This is the caller's. Then receive."""

    delta: Delta


@dataclass(frozen=True, slots=True)
class Fail:
    """The stream has ended with this error."""

    error: PdserveError


@dataclass(frozen=True, slots=True)
class Done:
    """The stream has ended, and has its result."""


StreamAction = OpenCall | Receive | AskRouter | Wait | Deliver | Fail | Done


class Routers:
    """The routers that a client knows, by index, and the one that it asks now. Shared by the client's streams."""

    def __init__(self, count: int, current: int = 0) -> None:
        self.count = count
        self.current = current
        self.closed = False  # the client is

    @property
    def has_others(self) -> bool:
        """Whether there is more than one router to ask."""
        return self.count > 1


class RouterSearch:
    """A look for a router that serves: each in turn, beginning with the one after the current one."""

    def __init__(self, routers: Routers, until_s: float) -> None:
        self._routers = routers
        self._until_s = until_s
        self._asked: int | None = None  # it has not answered yet
        self._asked_count = 0
        self._pauses = False

    def next(self, now: float) -> AskRouter | Wait | None:
        """What to do next; None: the time is over."""
        if self._pauses:
            self._pauses = False
            return Wait(LOOK_PAUSE_S)
        remaining_s = self._until_s - now
        if remaining_s <= 0:
            return None
        self._asked = (self._routers.current + 1 + self._asked_count) % self._routers.count
        self._asked_count += 1
        return AskRouter(self._asked, min(CONNECT_TIMEOUT_S, remaining_s))

    def answered(self, serves: bool) -> bool:
        """Note the asked router's answer. True: it is the current one now."""
        assert self._asked is not None
        if serves:
            self._routers.current = self._asked
        self._asked = None
        self._pauses = not serves
        return serves


class ResumeMachine:
    """One stream: what to do after each event, until the action is Fail or Done. One thread tells events and does what
    the answer says; `cancel` may be called by any."""

    def __init__(self, request: pb.GenerateRequest, routers: Routers, now: float, timeout_s: float | None) -> None:
        """`timeout_s`: for the whole stream, with everything it takes to resume it."""
        self._request = identified(request)
        self._routers = routers
        self._timeout_s = timeout_s
        self._deadline_s = None if timeout_s is None else now + timeout_s
        self._fold = StreamFold(now)
        self._cancelled = False
        self._losses = 0  # of the connection
        self._error: PdserveError = ConnectionLost("no call was made")  # of the last call
        self._look_until_s = now  # after the last loss
        self._pause_until_s = now
        self._search = RouterSearch(routers, now)

    @property
    def started(self) -> Started | None:
        """What the router made of the request, once it has said so."""
        return self._fold.started

    @property
    def result(self) -> Result | None:
        return self._fold.result

    @property
    def ended(self) -> bool:
        """Whether the caller wants no more of it."""
        return self._cancelled or self._routers.closed

    def cancel(self) -> None:
        """The caller wants no more of it. What comes next is Fail, unless the result is there."""
        self._cancelled = True

    # Events. Each returns what to do next.

    def start(self) -> OpenCall:
        return OpenCall(self._routers.current, self._request, self._timeout_s)

    def on_opened(self) -> StreamAction:
        """The call is made. It may have been cancelled meanwhile, with an earlier call in mind."""
        return self._cancel() if self.ended else Receive()

    def on_message(self, message: pb.GenerateResponse, now: float) -> StreamAction:
        try:
            delta = self._fold.accept(message, now)
        except ProtocolError as error:
            return Fail(error)
        return Receive() if delta is None else Deliver(delta)

    def on_end(self) -> StreamAction:
        """The call ended without an error."""
        if self._fold.result is not None:
            return Done()
        missing = "it started" if self._fold.started is None else "it had a result"
        return Fail(ProtocolError(f"the router ended the stream before {missing}"))

    def on_failure(self, error: PdserveError, now: float) -> StreamAction:
        """The call failed."""
        if self._fold.result is not None:
            return Done()  # all is there: how the call ends does not matter
        if self.ended:
            return self._cancel()
        self._error = error
        if isinstance(error, ResourceExhausted) and self._fold.resuming:  # it refused; what broke off is the last loss
            self._pause_until_s = now + retry_pause_s(error)
        else:
            self._losses += 1
            if not may_resume(error, self._routers.has_others) or self._losses > MAX_LOSSES:
                return Fail(error)
            self._look_until_s = self._time_to_look(now)
        self._search = RouterSearch(self._routers, self._look_until_s)
        return self._look(now)

    def on_health(self, serves: bool, now: float) -> StreamAction:
        """The router that was asked serves, or it does not or has not answered in time."""
        if self._search.answered(serves) and not self.ended:
            return self._open_again(now)
        return self._look(now)

    def on_time(self, now: float) -> StreamAction:
        """The wait is over."""
        return self._look(now)

    def on_cancelled(self) -> StreamAction:
        """What was being done is cut short by `cancel` or by the client's closing."""
        return self._cancel()

    # What they have in common.

    def _cancel(self) -> StreamAction:
        return Fail(Cancelled(ENDED)) if self._fold.result is None else Done()

    def _time_to_look(self, now: float) -> float:
        """Until when. Who never answered is down; who broke off may be back soon."""
        never = self._fold.started is None
        until_s = now + (CONNECT_TIMEOUT_S * (self._routers.count - 1) if never else RESUME_TIMEOUT_S)
        return until_s if self._deadline_s is None else min(until_s, self._deadline_s)

    def _look(self, now: float) -> StreamAction:
        if self.ended:
            return self._cancel()
        pause_s = min(self._pause_until_s, self._look_until_s) - now
        if pause_s > 0:
            return Wait(min(pause_s, LOOK_PAUSE_S))
        return self._search.next(now) or Fail(self._error)

    def _open_again(self, now: float) -> StreamAction:
        remaining_s = None if self._deadline_s is None else self._deadline_s - now
        if remaining_s is not None and remaining_s <= 0:
            return Fail(DeadlineExceeded("the time was over when another router was found"))
        if self._fold.started is not None:
            self._fold.resume()
        return OpenCall(self._routers.current, resumption(self._request, self._fold), remaining_s)


def identified(request: pb.GenerateRequest) -> pb.GenerateRequest:
    """The request with an id of its own, so that it can be asked for again."""
    if not request.request_id:
        request.request_id = uuid.uuid4().hex
    return request


def may_resume(error: PdserveError, others: bool) -> bool:
    """Whether to ask again. A router that refuses because it is shutting down, or has no worker, is only one of several
    where there are `others`."""
    return isinstance(error, ConnectionLost) or (others and isinstance(error, Unavailable))


def retry_pause_s(error: ResourceExhausted) -> float:
    """How long to leave a full router alone: what it asks for, within reason."""
    return min(max(error.retry_after_s, LOOK_PAUSE_S), MAX_RETRY_PAUSE_S)


def resumption(request: pb.GenerateRequest, fold: StreamFold) -> pb.GenerateRequest:
    """What to send to go on where the stream broke off."""
    again = pb.GenerateRequest()
    again.CopyFrom(request)
    again.resume.SetInParent()
    if fold.started is not None:
        again.model = fold.started.model
        again.prompt_token_ids.CopyFrom(pb.TokenIds(ids=fold.started.prompt_token_ids))
        again.sampling.seed = fold.started.seed
        again.resume.outputs.extend(pb.TokenIds(ids=token_ids) for token_ids in fold.token_ids())
        again.resume.states.extend(fold.resume_states())
    return again
