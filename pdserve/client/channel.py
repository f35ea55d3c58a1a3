"""What both clients' channels share: their options, and how a failed call becomes an error of pdserve.errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from pdserve.client.resume import ConnectionLost
from pdserve.errors import InvalidArgument, PdserveError, ResourceExhausted, error_from_code

DEFAULT_TIMEOUT_S: Final = 600.0  # of a generation
LONGEST_TIMEOUT_S: Final = 365.0 * 24 * 3600  # whoever waits longer has no limit
UNARY_TIMEOUT_S: Final = 10.0  # of the calls that only ask
MAX_MESSAGE_BYTES: Final = 32 * 1024 * 1024  # received; what is sent, the router bounds

CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A router that is frozen, or whose machine has vanished, sends no goodbye: it is asked for a sign of life.
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),  # gRPC's core waits for this one, a minute by default
    ("grpc.http2.max_pings_without_data", 0),  # no limit: who only listens sends no data
    # A router is reached directly; a proxy meant for the web would swallow even calls to this host.
    ("grpc.enable_http_proxy", 0),
)


def address_list(addresses: str | Sequence[str]) -> tuple[str, ...]:
    """One address or several (a string with commas between, or a sequence), the first tried first. Raises
    InvalidArgument for none."""
    parts = addresses.split(",") if isinstance(addresses, str) else addresses
    listed = tuple(part.strip() for part in parts)
    if not all(listed) or not listed:
        raise InvalidArgument(
            "addresses", f"at least one router's host:port is needed and none may be empty, not {addresses!r}"
        )
    return listed


def checked_timeout(timeout_s: float | None) -> float | None:
    """A generation's time limit; None where it is so long that it is none. Raises InvalidArgument where nothing could
    be generated in it."""
    if timeout_s is None:
        return None
    if not timeout_s > 0:
        raise InvalidArgument("timeout_s", f"must be above 0, or None for no limit, not {timeout_s:g}")
    return timeout_s if timeout_s <= LONGEST_TIMEOUT_S else None


def bounded(timeout_s: float) -> float:
    """A time limit that gRPC can count: it takes one of some centuries for one that has passed."""
    return min(timeout_s, LONGEST_TIMEOUT_S)


@contextmanager
def own_errors() -> Iterator[None]:
    """Raises what a failed call inside means as one of pdserve.errors."""
    try:
        yield
    except grpc.RpcError as error:
        raise error_from_rpc(error) from error


def error_from_rpc(error: grpc.RpcError) -> PdserveError:
    """The error that the server raised, or what stands for a broken connection or a passed deadline."""
    code, details = error.code().name, error.details() or "no details"
    if code == "UNAVAILABLE" and rpc_status.from_call(error) is None:  # a router's own refusals carry a status
        return ConnectionLost(details)
    if code == "RESOURCE_EXHAUSTED" and (retry_after_s := _retry_after_s(error)) is not None:
        return ResourceExhausted(details, retry_after_s)
    return error_from_code(code, details)


def _retry_after_s(error: grpc.RpcError) -> float | None:
    """The server's google.rpc.RetryInfo, if it sent one."""
    status = rpc_status.from_call(error)
    info = error_details_pb2.RetryInfo()
    for detail in status.details if status is not None else ():
        if detail.Unpack(info):
            return float(info.retry_delay.seconds + info.retry_delay.nanos / 1e9)
    return None
