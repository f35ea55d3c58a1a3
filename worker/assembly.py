"""Puts a worker's control together, beside an engine and a link: the same one for a process and for a simulation."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from decode_worker.ladder import Ladder, LadderLimits
from decode_worker.role import DecodeRole
from pdserve.clock import Clock
from pdserve.config import TransferConfig
from pdserve.tracing import Trace
from pdserve.types import Load
from prefill_worker.outlet import LinkOutlet, SendingLink
from prefill_worker.role import PrefillRole
from worker.control import Control
from worker.ports import EngineCommands, LinkCommands, Observer, Turns


class WholeLink(LinkCommands, SendingLink, Protocol):
    """A link: what a control commands, and what the engine's thread gives to it."""


def make_control(
    engine: EngineCommands,
    link: WholeLink,
    turns: Turns,
    observer: Observer,
    clock: Clock,
    trace: Trace,
    config: TransferConfig,
    *,
    layer_count: int,
    max_queued: int,
    load: Load,
) -> Control:
    """`max_queued`: of each role; `load`: the engine's before its first step."""
    return Control(
        PrefillRole(partial(LinkOutlet, link, trace, config.mode, layer_count), max_queued),
        DecodeRole(Ladder(LadderLimits.from_config(config)), max_queued),
        engine,
        link,
        turns,
        clock,
        observer,
        load,
    )
