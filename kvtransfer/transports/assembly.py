"""A worker's transport, put together from its settings.

transfer.network   what the transport is        transfer.payload   what large payloads go by
ipc                sockets in a private folder  auto               shared with ipc, inline with tcp
tcp                CURVE, with the cluster's    inline             the transport itself
                   key                          shared             memory of the sender's process
                                                gloo, nccl         a torch.distributed group for each pair
"""

from __future__ import annotations

from pathlib import Path

from kvtransfer.transports.base import Transport
from kvtransfer.transports.carried import CarriedLimits, CarriedTransport
from kvtransfer.transports.carrier import Carrier
from kvtransfer.transports.shared import SharedCarrier
from kvtransfer.transports.zmq import CurveKey, ZmqTransport, ipc_endpoint
from pdserve.clock import Clock
from pdserve.config import TransferConfig
from pdserve.errors import ConfigError
from pdserve.logs import Logger

_RINGS_PER_WINDOW = 2  # a window that waits to be released, and the next one, which may be granted by then
_ARRIVAL_SHARE = 0.4  # of the ttl: whoever waits for a payload must hear what comes after it in time


def worker_transport(
    config: TransferConfig, incarnation: str, socket_folder: Path, key: CurveKey | None, clock: Clock, log: Logger
) -> Transport:
    """Raises ConfigError for settings that do not work here."""
    inner = _network(config, incarnation, socket_folder, key)
    ttl_s = config.ticket_ttl_ms / 1000
    try:
        carriers = _carriers(config, _ARRIVAL_SHARE * ttl_s)
    except ConfigError:
        inner.close()
        raise
    limits = CarriedLimits(answer_timeout_s=ttl_s, arrival_timeout_s=_ARRIVAL_SHARE * ttl_s)
    return CarriedTransport(inner, carriers, clock, log, limits)


def _network(config: TransferConfig, incarnation: str, socket_folder: Path, key: CurveKey | None) -> ZmqTransport:
    identity = incarnation.encode()
    if config.network == "ipc":
        return ZmqTransport(ipc_endpoint(socket_folder, incarnation), identity)
    if key is None:
        raise ConfigError("transfer.network = 'tcp' needs the cluster's key")
    return ZmqTransport(f"tcp://{config.host}:*", identity, key=key)


def _carriers(config: TransferConfig, timeout_s: float) -> list[Carrier]:
    payload = config.payload
    if payload == "auto":
        payload = "shared" if config.network == "ipc" else "inline"
    if payload == "inline":
        return []
    if payload == "shared":
        return [SharedCarrier(_RINGS_PER_WINDOW * config.window_bytes)]
    from kvtransfer.transports.distributed import DistributedCarrier, GroupSettings  # only they need torch

    return [DistributedCarrier(GroupSettings(config.host, backend=payload, timeout_s=timeout_s))]
