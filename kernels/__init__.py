"""The operations of a decoder and their numeric contract, behind one table chosen once at start.

`kernels.ops` states the table; `kernels.reference` is the plain torch implementation, the oracle.
"""

from __future__ import annotations

from kernels.ops import CacheShape, Kernels, SequenceRows, StepBatch
from kernels.reference import ReferenceKernels
from pdserve.errors import ConfigError

__all__ = ["CacheShape", "Kernels", "SequenceRows", "StepBatch", "select"]


def select(name: str) -> Kernels:
    """The implementation called `name`; "auto" is the best one for this machine. Raises ConfigError."""
    if name in ("auto", "reference"):
        return ReferenceKernels()
    raise ConfigError(f"kernels {name!r}: must be auto or reference")
