"""The error tree.

    PdserveError
    ├── InvalidArgument       the request is wrong; names the field and the allowed range
    ├── ConfigError           a setting, a config file or a model directory is wrong (exit code 2)
    ├── ResourceExhausted     full; retry after `retry_after_s`
    ├── Unavailable           nothing alive that could serve it
    ├── FailedPrecondition    two sides disagree on layout, role or model
    ├── AlreadyExists         the request id is in flight
    ├── NotFound              no such request
    ├── DeadlineExceeded      the caller's deadline passed
    ├── Cancelled             the caller went away
    ├── TransferError         a KV transfer ended without success; the attempt can be repeated
    ├── ProtocolError         a peer sent what the protocol does not allow
    ├── DataLoss              KV beyond repair
    ├── Uncomputable          the request's own numbers have no next token, at any worker
    └── InternalError         a bug

`code` is the gRPC status name. `retryable` says whether another attempt may succeed; `blames_worker`
whether the error speaks against the worker's health (a client's error never does).
"""

from __future__ import annotations


class PdserveError(Exception):
    """Base of all errors a caller may see."""

    code = "INTERNAL"
    retryable = False
    blames_worker = False

    @property
    def message(self) -> str:
        return str(self)


class InvalidArgument(PdserveError):
    """The request is wrong. `field` is the name in the public interface."""

    code = "INVALID_ARGUMENT"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class ConfigError(PdserveError):
    """A setting, a config file or a model directory is wrong. The command exits with 2."""

    code = "FAILED_PRECONDITION"


class ResourceExhausted(PdserveError):
    """A queue or pool is full. `retry_after_s` is a hint for the client."""

    code = "RESOURCE_EXHAUSTED"
    retryable = True

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(PdserveError):
    """No worker alive that could serve the request."""

    code = "UNAVAILABLE"
    retryable = True
    blames_worker = True


class FailedPrecondition(PdserveError):
    """Two sides disagree on layout, role or model. Repeating does not help."""

    code = "FAILED_PRECONDITION"


class AlreadyExists(PdserveError):
    """The request id is in flight."""

    code = "ALREADY_EXISTS"


class NotFound(PdserveError):
    """No such request."""

    code = "NOT_FOUND"


class DeadlineExceeded(PdserveError):
    """The caller's deadline passed."""

    code = "DEADLINE_EXCEEDED"


class Cancelled(PdserveError):
    """The caller went away or asked for the end."""

    code = "CANCELLED"


class TransferError(PdserveError):
    """A KV transfer ended without success. Another attempt may succeed."""

    code = "UNAVAILABLE"
    retryable = True


class ProtocolError(PdserveError):
    """A peer sent what the protocol does not allow."""

    code = "INTERNAL"
    retryable = True
    blames_worker = True


class DataLoss(PdserveError):
    """KV beyond repair. Should never be seen."""

    code = "DATA_LOSS"
    retryable = True
    blames_worker = True


class Uncomputable(PdserveError):
    """The request's own numbers have no next token: its logits are not finite, or sampling from them failed. Every
    worker would meet it, so it is not repeated and speaks against none."""

    code = "OUT_OF_RANGE"


class InternalError(PdserveError):
    """A bug in pdserve. Another worker may not meet it; how often that is tried is bounded."""

    code = "INTERNAL"
    retryable = True
    blames_worker = True


_BY_CODE: dict[str, type[PdserveError]] = {
    "RESOURCE_EXHAUSTED": ResourceExhausted,
    "UNAVAILABLE": Unavailable,
    "FAILED_PRECONDITION": FailedPrecondition,
    "ALREADY_EXISTS": AlreadyExists,
    "NOT_FOUND": NotFound,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "CANCELLED": Cancelled,
    "DATA_LOSS": DataLoss,
    "OUT_OF_RANGE": Uncomputable,
    "INTERNAL": InternalError,
}


def error_from_code(code: str, message: str) -> PdserveError:
    """Rebuild an error that crossed a wire as its code and message."""
    if code == "INVALID_ARGUMENT":
        field, _, problem = message.partition(": ")
        return InvalidArgument(field, problem)
    return _BY_CODE.get(code, InternalError)(message)
