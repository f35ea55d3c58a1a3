"""The operations of a decoder and their numeric contract, behind one table chosen once at start.

`kernels.ops` states the table; `kernels.reference` is the plain torch implementation, the oracle; `kernels.cpu` is the
one in C.
"""

from __future__ import annotations

from kernels.cpu.table import CpuKernels
from kernels.ops import CacheShape, Kernels, SequenceRows, StepBatch
from kernels.reference import ReferenceKernels
from pdserve import logs
from pdserve.errors import ConfigError

__all__ = ["CacheShape", "Kernels", "SequenceRows", "StepBatch", "select"]

_log = logs.logger("kernels")


def select(name: str, cpu_path: str = "auto") -> Kernels:
    """The implementation called `name`; "auto" is the best one for this machine. Raises ConfigError.

    `cpu_path`: the instruction-set path of the CPU kernels. One that is asked for by name must be there.
    """
    if name == "reference":
        return ReferenceKernels()
    if name == "cpu" or (name == "auto" and cpu_path != "auto"):
        return CpuKernels(cpu_path)
    if name == "auto":
        try:
            return CpuKernels()
        except ConfigError as error:
            _log.warning("the slow reference kernels run", reason=str(error))
            return ReferenceKernels()
    raise ConfigError(f"kernels {name!r}: must be auto, cpu or reference")
