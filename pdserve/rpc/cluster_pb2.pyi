from pdserve.rpc import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerMessage(_message.Message):
    __slots__ = ("hello", "load", "ticket", "tokens", "terminal", "local_prefill", "goodbye")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TERMINAL_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    load: Load
    ticket: Ticket
    tokens: Tokens
    terminal: Terminal
    local_prefill: LocalPrefill
    goodbye: Goodbye
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., ticket: _Optional[_Union[Ticket, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., terminal: _Optional[_Union[Terminal, _Mapping]] = ..., local_prefill: _Optional[_Union[LocalPrefill, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ...) -> None: ...

class RouterMessage(_message.Message):
    __slots__ = ("welcome", "start_decode", "start_prefill", "abort", "renew", "sender_lost", "prefill_locally", "drain", "drain_noted")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    START_DECODE_FIELD_NUMBER: _ClassVar[int]
    START_PREFILL_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    SENDER_LOST_FIELD_NUMBER: _ClassVar[int]
    PREFILL_LOCALLY_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    DRAIN_NOTED_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    start_decode: StartDecode
    start_prefill: StartPrefill
    abort: Abort
    renew: Renew
    sender_lost: SenderLost
    prefill_locally: PrefillLocally
    drain: Drain
    drain_noted: DrainNoted
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., start_decode: _Optional[_Union[StartDecode, _Mapping]] = ..., start_prefill: _Optional[_Union[StartPrefill, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., renew: _Optional[_Union[Renew, _Mapping]] = ..., sender_lost: _Optional[_Union[SenderLost, _Mapping]] = ..., prefill_locally: _Optional[_Union[PrefillLocally, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., drain_noted: _Optional[_Union[DrainNoted, _Mapping]] = ...) -> None: ...

class Owner(_message.Message):
    __slots__ = ("tenant", "request_id", "router", "attempt", "output")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    request_id: str
    router: str
    attempt: int
    output: int
    def __init__(self, tenant: _Optional[str] = ..., request_id: _Optional[str] = ..., router: _Optional[str] = ..., attempt: _Optional[int] = ..., output: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("version", "worker_id", "incarnation", "role", "pid", "host", "kv_endpoint", "fingerprint", "model", "vocab_size", "max_model_len", "pool_tokens", "eos_token_ids", "crash_report")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    KV_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    POOL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CRASH_REPORT_FIELD_NUMBER: _ClassVar[int]
    version: int
    worker_id: str
    incarnation: str
    role: str
    pid: int
    host: str
    kv_endpoint: str
    fingerprint: str
    model: str
    vocab_size: int
    max_model_len: int
    pool_tokens: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    crash_report: str
    def __init__(self, version: _Optional[int] = ..., worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[str] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., kv_endpoint: _Optional[str] = ..., fingerprint: _Optional[str] = ..., model: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., pool_tokens: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., crash_report: _Optional[str] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("version", "router", "renew_interval_ms", "timeout_ms")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    RENEW_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    version: int
    router: str
    renew_interval_ms: int
    timeout_ms: int
    def __init__(self, version: _Optional[int] = ..., router: _Optional[str] = ..., renew_interval_ms: _Optional[int] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("queued", "running", "blocks", "draining")
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    queued: int
    running: int
    blocks: _inference_pb2.BlockCounts
    draining: bool
    def __init__(self, queued: _Optional[int] = ..., running: _Optional[int] = ..., blocks: _Optional[_Union[_inference_pb2.BlockCounts, _Mapping]] = ..., draining: _Optional[bool] = ...) -> None: ...

class Sequence(_message.Message):
    __slots__ = ("owner", "prompt_ids", "output_ids", "sampling")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    owner: Owner
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    output_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    def __init__(self, owner: _Optional[_Union[Owner, _Mapping]] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., output_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "stop_token_ids", "ignore_eos", "logprobs", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "logit_bias")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logprobs: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    min_tokens: int
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., min_tokens: _Optional[int] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ...) -> None: ...

class LogitBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class StartDecode(_message.Message):
    __slots__ = ("sequence", "local_prefill", "share")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    sequence: Sequence
    local_prefill: bool
    share: Owner
    def __init__(self, sequence: _Optional[_Union[Sequence, _Mapping]] = ..., local_prefill: _Optional[bool] = ..., share: _Optional[_Union[Owner, _Mapping]] = ...) -> None: ...

class StartPrefill(_message.Message):
    __slots__ = ("sequence", "ticket")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    sequence: Sequence
    ticket: Ticket
    def __init__(self, sequence: _Optional[_Union[Sequence, _Mapping]] = ..., ticket: _Optional[_Union[Ticket, _Mapping]] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("owner",)
    OWNER_FIELD_NUMBER: _ClassVar[int]
    owner: Owner
    def __init__(self, owner: _Optional[_Union[Owner, _Mapping]] = ...) -> None: ...

class Renew(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Drain(_message.Message):
    __slots__ = ("cancel",)
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    cancel: bool
    def __init__(self, cancel: _Optional[bool] = ...) -> None: ...

class DrainNoted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SenderLost(_message.Message):
    __slots__ = ("owner", "epoch", "error_code", "error_message")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    owner: Owner
    epoch: int
    error_code: str
    error_message: str
    def __init__(self, owner: _Optional[_Union[Owner, _Mapping]] = ..., epoch: _Optional[int] = ..., error_code: _Optional[str] = ..., error_message: _Optional[str] = ...) -> None: ...

class PrefillLocally(_message.Message):
    __slots__ = ("owner",)
    OWNER_FIELD_NUMBER: _ClassVar[int]
    owner: Owner
    def __init__(self, owner: _Optional[_Union[Owner, _Mapping]] = ...) -> None: ...

class LocalPrefill(_message.Message):
    __slots__ = ("owner", "reason")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    owner: Owner
    reason: str
    def __init__(self, owner: _Optional[_Union[Owner, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("owner", "transfer_id", "epoch", "endpoint", "cached_tokens", "ttl_ms")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    owner: Owner
    transfer_id: bytes
    epoch: int
    endpoint: str
    cached_tokens: int
    ttl_ms: int
    def __init__(self, owner: _Optional[_Union[Owner, _Mapping]] = ..., transfer_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., endpoint: _Optional[str] = ..., cached_tokens: _Optional[int] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("batch",)
    BATCH_FIELD_NUMBER: _ClassVar[int]
    batch: _containers.RepeatedCompositeFieldContainer[OwnerTokens]
    def __init__(self, batch: _Optional[_Iterable[_Union[OwnerTokens, _Mapping]]] = ...) -> None: ...

class OwnerTokens(_message.Message):
    __slots__ = ("owner", "first_position", "tokens")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    owner: Owner
    first_position: int
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    def __init__(self, owner: _Optional[_Union[Owner, _Mapping]] = ..., first_position: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("token_id", "logprob", "top")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[_inference_pb2.TopLogprob]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[_inference_pb2.TopLogprob, _Mapping]]] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Terminal(_message.Message):
    __slots__ = ("owner", "finish_reason", "stop_token_id", "error_code", "error_message", "epoch")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    owner: Owner
    finish_reason: str
    stop_token_id: int
    error_code: str
    error_message: str
    epoch: int
    def __init__(self, owner: _Optional[_Union[Owner, _Mapping]] = ..., finish_reason: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., error_code: _Optional[str] = ..., error_message: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...
