"""Every implementation of the kernels that tests can run on this machine."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from kernels import Kernels
from kernels.cpu.build import EMULATED, PORTABLE_ONLY, STALLS, BuildError, build
from kernels.cpu.table import CpuKernels
from kernels.reference import ReferenceKernels
from pdserve.errors import ConfigError

# The instruction-set paths of the CPU kernels; one that the machine lacks runs over plain C where that exists.
IMPLEMENTATIONS = ("reference", "cpu-portable", "cpu-avx2", "cpu-avx512", "cpu-amx")
_EMULATED_PATHS = ("avx512", "amx")


def make_kernels(name: str) -> Kernels:
    """The implementation called so, on one thread. Skips the test where this machine has no way to run it."""
    if name == "reference":
        kernels: Kernels = ReferenceKernels()
    else:
        kernels = _cpu_kernels(name.removeprefix("cpu-"))
    kernels.set_threads(1)
    return kernels


def make_mutant(definition: str) -> Kernels:
    """The CPU kernels with a fault compiled in, on the path that any machine has."""
    kernels = CpuKernels("portable", _built(PORTABLE_ONLY, definition))
    kernels.set_threads(1)
    return kernels


def make_stalling() -> CpuKernels:
    """The CPU kernels with threads that stop now and then before they hand out what they computed."""
    return CpuKernels("portable", _built(PORTABLE_ONLY, STALLS))


def make_native_and_emulated(path: str) -> tuple[CpuKernels, CpuKernels]:
    """A path on this machine's instructions and over plain C. Skips the test where the machine lacks them."""
    _built()
    try:
        native = CpuKernels(path)
    except ConfigError:
        pytest.skip(f"this machine cannot run the path {path}")
    return native, CpuKernels(path, _built(EMULATED))


def _cpu_kernels(path: str) -> CpuKernels:
    _built()
    try:
        return CpuKernels(path)
    except ConfigError:
        if path not in _EMULATED_PATHS:
            pytest.skip(f"this machine cannot run the path {path}")
    return CpuKernels(path, _built(EMULATED))


@functools.cache
def _built(*definitions: str) -> Path:
    try:
        return build(definitions)[0]
    except BuildError as error:
        pytest.skip(f"cannot build the CPU kernels: {error}")
