"""What a cluster under test is started with, so that something of it goes wrong: an intentional defect (defects.py), or
a KV wire whose faults can be switched on (faulty_wire.py).

A plain value that travels in the spec of each of its processes: see `worker.spec.UnderTest`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from drills import defects
from drills.faulty_wire import SwitchedFaults
from kvtransfer.transports.base import Transport
from pdserve.clock import Clock
from pdserve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Sabotage:
    """`defect`: one of defects.DEFECTS; `faults_file`: what switches the KV wire's faults on. "": none. Raises
    ConfigError for a defect that there is not."""

    defect: str = ""
    faults_file: str = ""

    def __post_init__(self) -> None:
        if self.defect and self.defect not in defects.DEFECTS:
            raise ConfigError(f"defect {self.defect!r}: there are {', '.join(defects.DEFECTS)}")

    def before_start(self) -> None:
        if self.defect:
            defects.install(self.defect)

    def transport(self, inner: Transport, clock: Clock) -> Transport:
        return SwitchedFaults(inner, Path(self.faults_file), clock) if self.faults_file else inner
