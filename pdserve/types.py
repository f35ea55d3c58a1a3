"""The values that every part of pdserve passes around.

Frozen dataclasses without behaviour beyond what follows from their own fields. Nothing here knows
a socket, a tensor or a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Role(StrEnum):
    """What a worker does. A runtime setting: the same process can take another role."""

    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(StrEnum):
    STOP = "stop"  # end-of-sequence id, stop id or stop string
    LENGTH = "length"  # max_tokens reached


@dataclass(frozen=True, slots=True)
class Finish:
    """A regular end of an output. `stop_token_id` or `stop` says what matched where the reason is STOP."""

    reason: FinishReason
    stop_token_id: int | None = None
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds blocks, transfers and tickets. It fences everything: two attempts never share one.

    `tenant` separates callers who must learn nothing of each other, such as whose prompt is refused; the front knows
    only one so far. `router` is the incarnation of the router process, `attempt` counts all that it has made: a request
    id may come again, an owner never does. `output` says which of the request's n outputs it works on.
    """

    tenant: str
    request_id: str
    router: str
    attempt: int
    output: int = 0

    def __str__(self) -> str:
        output = f"[{self.output}]" if self.output else ""
        return f"{self.tenant}/{self.request_id}@{self.router}#{self.attempt}{output}"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. `temperature` 0 is greedy; top_k 0 and min_p 0 are off.

    First the logits are adjusted, in this order: logit_bias, repetition_penalty (of tokens in prompt or output),
    frequency_penalty and presence_penalty (of tokens in the output), min_tokens (no stop id before). Then the filters
    apply: temperature, top_k, top_p, min_p. `logprobs` None: none are returned; n >= 0: the chosen token's, and the n
    most likely ones'.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def stops_at(self, token_id: int, eos_token_ids: Sequence[int]) -> bool:
        """Whether this token ends an output."""
        return token_id in self.stop_token_ids or (token_id in eos_token_ids and not self.ignore_eos)

    def end_of(self, output_ids: Sequence[int], eos_token_ids: Sequence[int]) -> Finish | None:
        """The regular end that the last of `output_ids` brings, or None: the one rule, for worker and router."""
        if not output_ids:
            return None
        last = output_ids[-1]
        if self.stops_at(last, eos_token_ids) and len(output_ids) > self.min_tokens:
            return Finish(FinishReason.STOP, stop_token_id=last)
        if len(output_ids) >= self.max_tokens:
            return Finish(FinishReason.LENGTH)
        return None


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One sampled token. Logprobs are of the model's own distribution, before any filter."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a finished request, counted at the original border of prompt and output."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Ticket:
    """A decode worker's promise to receive an attempt's KV.

    The holder connects to `endpoint` and opens transfer `transfer_id` under `epoch`. The first
    `cached_tokens` tokens need not be sent. It expires `ttl_ms` after the last sign of life.
    """

    transfer_id: bytes
    epoch: int
    endpoint: str
    cached_tokens: int
    ttl_ms: int


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """How a worker's KV blocks are divided. Every block is in exactly one of the three states."""

    free: int = 0
    cached: int = 0
    leased: int = 0

    @property
    def total(self) -> int:
        return self.free + self.cached + self.leased


@dataclass(frozen=True, slots=True)
class Load:
    """What a worker tells the routers about itself, several times a second.

    `queued`: requests that wait for blocks or KV. `running`: requests in the batch. `draining`: it finishes what it
    has and wants nothing new.
    """

    queued: int = 0
    running: int = 0
    blocks: BlockCounts = field(default_factory=BlockCounts)
    draining: bool = False


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a worker can hold: bounds that a request must fit."""

    vocab_size: int
    max_model_len: int
    pool_tokens: int


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One incarnation of a worker, as it introduces itself to a router.

    Equal `fingerprint`s mean bit-equal results (see docs/ARCHITECTURE.md, numeric contract).
    """

    worker_id: str
    incarnation: str
    role: Role
    pid: int
    host: str
    kv_endpoint: str
    fingerprint: str
    model: str
    limits: ModelLimits
    eos_token_ids: tuple[int, ...] = ()
    crash_report: str = ""  # the file it writes when it crashes; see pdserve.crash_report
