"""What comes back, as values, and the fold that makes one result out of a stream's events.

    Started, Delta*, Finished        anything else is a ProtocolError

Pure: the events and the times at which they arrived come in as arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.errors import ProtocolError
from pdserve.rpc import inference_pb2 as pb
from pdserve.types import FinishReason, Usage

_FINISH_REASONS = {pb.FINISH_REASON_STOP: FinishReason.STOP, pb.FINISH_REASON_LENGTH: FinishReason.LENGTH}


@dataclass(frozen=True, slots=True)
class Started:
    """All that is needed to ask for the same stream again."""

    request_id: str
    model: str
    seed: int
    prompt_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's own logprob and the most likely ones' as (token id, logprob), the likeliest first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens. `text` may lag behind them. `arrived_s` is on the client's monotonic clock."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    output_index: int
    arrived_s: float


@dataclass(frozen=True, slots=True)
class OutputResult:
    """One of a request's n outputs. `stop` is the stop string or token id that ended it."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    stop: str | int | None


@dataclass(frozen=True, slots=True)
class Result:
    """A finished request. `text` to `stop` are those of its first output; `outputs` has all n.

    `exact` false: a failover had to compute part of it under another numerics fingerprint. `attempts` are the last
    router's; `resumptions`: how often the client went on at another router. Times are the client's: `ttft_ms` from the
    call to the first token, `tpot_ms` from the first output's first to its last arrival divided by tokens - 1, None
    below two tokens.
    """

    request_id: str
    model: str
    seed: int
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    stop: str | int | None
    outputs: tuple[OutputResult, ...]
    usage: Usage
    exact: bool
    attempts: int
    resumptions: int
    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float


class StreamFold:
    """The state of one stream. `sent_s`: when the call was made."""

    def __init__(self, sent_s: float) -> None:
        self.started: Started | None = None
        self.result: Result | None = None
        self.resumptions = 0
        self._sent_s = sent_s
        self._deltas: list[Delta] = []
        self._rests: set[int] = set()  # outputs whose held-back text has come
        self._resume_states: dict[int, pb.ResumeState] = {}
        self._awaits_start = True

    def accept(self, event: pb.GenerateResponse, now_s: float) -> Delta | None:
        """Take the next event; a delta with news is returned. Raises ProtocolError for one that cannot come here."""
        if event.HasField("resume_state"):
            self._resume_states[event.resume_state.output_index] = event.resume_state
        kind = event.WhichOneof("event")
        if kind is None:
            return None  # a resume state alone, or a kind that a newer server knows
        if self.result is not None or (kind == "started") != self._awaits_start:
            raise ProtocolError(f"the router sent {kind} out of order")
        if kind == "started":
            self._awaits_start = False
            self.started = self.started or _started(event.started)
        elif kind == "delta":
            if not self._is_news(event.delta):
                return None
            delta = _delta(event.delta, now_s)
            self._deltas.append(delta)
            return delta
        else:
            self.result = self._finish(event.finished, now_s)
        return None

    def token_ids(self) -> list[tuple[int, ...]]:
        """All that were received so far, by output."""
        count = 1 + max((delta.output_index for delta in self._deltas), default=-1)
        return [_token_ids(self._of(index)) for index in range(count)]

    def resume_states(self) -> list[pb.ResumeState]:
        """What the router last said of how its outputs stand, for the next one."""
        return list(self._resume_states.values())

    def _of(self, output_index: int) -> list[Delta]:
        return [delta for delta in self._deltas if delta.output_index == output_index]

    def _is_news(self, delta: pb.Delta) -> bool:
        """Whether this text has not come before. A router sends text without ids in one case only: at an output's end,
        what it had held back. The ids do not tell the next router whether that has come, so it sends it again."""
        if delta.token_ids or not delta.text:
            return True
        known = delta.output_index in self._rests
        self._rests.add(delta.output_index)
        return not known

    @property
    def resuming(self) -> bool:
        """Whether it broke off and no router has taken it over yet."""
        return self.started is not None and self._awaits_start

    def resume(self) -> None:
        """The stream broke off and begins again elsewhere, where it stood. Asked of several until one takes it over, it
        is one resumption."""
        if not self.resuming:
            self.resumptions += 1
        self._awaits_start = True

    def _finish(self, finished: pb.Finished, now_s: float) -> Result:
        assert self.started is not None
        if not finished.outputs:
            raise ProtocolError("the router finished without any output")
        outputs = tuple(_output(end, self._of(index)) for index, end in enumerate(finished.outputs))
        first = outputs[0]
        arrivals = [delta.arrived_s for delta in self._of(0) if delta.token_ids]
        return Result(
            request_id=self.started.request_id,
            model=self.started.model,
            seed=self.started.seed,
            prompt_token_ids=self.started.prompt_token_ids,
            text=first.text,
            token_ids=first.token_ids,
            logprobs=first.logprobs,
            finish_reason=first.finish_reason,
            stop=first.stop,
            outputs=outputs,
            usage=Usage(finished.usage.prompt_tokens, finished.usage.completion_tokens, finished.usage.cached_tokens),
            exact=finished.exact,
            attempts=finished.attempts,
            resumptions=self.resumptions,
            ttft_ms=(arrivals[0] - self._sent_s) * 1e3 if arrivals else None,
            tpot_ms=_tpot_ms(arrivals, len(first.token_ids)),
            e2e_ms=(now_s - self._sent_s) * 1e3,
        )


def _output(end: pb.OutputEnd, deltas: list[Delta]) -> OutputResult:
    stop_kind = end.WhichOneof("stop_match")
    return OutputResult(
        text="".join(delta.text for delta in deltas),
        token_ids=_token_ids(deltas),
        logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
        finish_reason=_finish_reason(end.finish_reason),
        stop=None if stop_kind is None else getattr(end, stop_kind),
    )


def _token_ids(deltas: list[Delta]) -> tuple[int, ...]:
    return tuple(token_id for delta in deltas for token_id in delta.token_ids)


def _tpot_ms(arrivals: list[float], tokens: int) -> float | None:
    return (arrivals[-1] - arrivals[0]) * 1e3 / (tokens - 1) if tokens > 1 else None


def _started(message: pb.Started) -> Started:
    return Started(message.request_id, message.model, message.seed, tuple(message.prompt_token_ids))


def _delta(message: pb.Delta, now_s: float) -> Delta:
    logprobs = tuple(
        TokenLogprob(token.logprob, tuple((top.token_id, top.logprob) for top in token.top))
        for token in message.logprobs
    )
    return Delta(message.text, tuple(message.token_ids), logprobs, message.output_index, now_s)


def _finish_reason(value: pb.FinishReason) -> FinishReason:
    try:
        return _FINISH_REASONS[value]
    except KeyError:
        raise ProtocolError(f"the router sent the unknown finish reason {value}") from None
