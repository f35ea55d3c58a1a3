"""Compiles the C sources into one shared library beside them, with whatever C compiler there is.

    python -m kernels.cpu.build      compiles unless the library of these sources is there already; prints its path

The library's name carries a hash of sources and flags, so a stale one is never loaded. It is written beside its
place and renamed into it: any number of processes may build at once. A compiler that does not know the flags of an
instruction set leaves that path out, with a note. Needs nothing but the standard library.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "native"
# Definitions of builds for tests: the AVX-512 and AMX paths over plain C, runnable anywhere; one path only, which takes
# less time; threads that stop in the middle of their work; and known faults.
EMULATED = "PDK_EMULATED"
PORTABLE_ONLY = "PDK_PORTABLE_ONLY"
STALLS = "PDK_STALLS"
MUTANTS = ("PDK_MUTANT_UNMASKED", "PDK_MUTANT_SPLIT_REDUCTION", "PDK_MUTANT_BLOCK_EDGE")

_DIGEST_DIGITS = 16
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = (
    *("-std=gnu11", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread"),
    *(
        "-ffp-contract=off",
        "-fno-math-errno",
    ),  # contraction would change bits; without errno sqrtf is one instruction
    *("-Wall", "-Wextra", "-Wno-psabi"),
)
# Where the compiler has them: gcc would move a product's sums about, and compute addresses apart.
_GCC_FLAGS = ("-fno-tree-coalesce-vars", "-fno-ivopts")
_LINK_FLAGS = ("-shared", "-pthread", "-lm")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16", "-mfma")
_AVX2 = ("-mavx2", "-mfma")


class BuildError(Exception):
    """The library could not be compiled. The first line says what; the compiler's own words may follow."""


@dataclass(frozen=True, slots=True)
class _InstructionSet:
    """A path that wants flags of its own. Where the compiler takes them, `definition` makes the path known."""

    source: str
    flags: tuple[str, ...]
    definition: str


_INSTRUCTION_SETS = (
    _InstructionSet("path_avx2.c", _AVX2, "PDK_WITH_AVX2"),
    _InstructionSet("path_avx512.c", _AVX512, "PDK_WITH_AVX512"),
    _InstructionSet("path_amx.c", (*_AVX512, "-mamx-tile", "-mamx-bf16"), "PDK_WITH_AMX"),
)


def library_path(definitions: Sequence[str] = ()) -> Path:
    """Where the library of the present sources, compiled with `definitions`, lies once it is built."""
    digest = hashlib.blake2b(digest_size=_DIGEST_DIGITS // 2)
    for path in sorted(SOURCES.glob("*.[ch]")):
        digest.update(f"{path.name}\n".encode() + path.read_bytes())
    digest.update(repr((_FLAGS, _GCC_FLAGS, _LINK_FLAGS, _INSTRUCTION_SETS, tuple(definitions))).encode())
    return SOURCES / f"{_stem(definitions)}{digest.hexdigest()}.so"


def build(definitions: Sequence[str] = ()) -> tuple[Path, list[str]]:
    """Compile unless it is there; the library and notes on what was left out. Raises BuildError."""
    library = library_path(definitions)
    if library.exists():
        return library, []
    compiler = _compiler()
    with tempfile.TemporaryDirectory(prefix="pdserve-cpu-") as folder:
        if PORTABLE_ONLY in definitions:
            sets, notes = {}, []
        else:
            sets, notes = _known_sets(compiler, Path(folder), EMULATED in definitions)
        flags = (*_FLAGS, *(flag for flag in _GCC_FLAGS if _takes(compiler, (flag,), Path(folder))))
        objects = _compile_all(compiler, flags, sets, definitions, Path(folder))
        _link(compiler, objects, library)
    for stale in SOURCES.glob(f"{_stem(definitions)}{'?' * _DIGEST_DIGITS}.so"):
        if stale != library:
            stale.unlink(missing_ok=True)  # whoever has it loaded keeps it
    return library, notes


def _stem(definitions: Sequence[str]) -> str:
    return "-".join(("pdserve-cpu", *(name.removeprefix("PDK_").lower() for name in definitions), ""))


def _compiler() -> str:
    for name in (os.environ.get("CC", ""), *_COMPILERS):
        if name and (found := shutil.which(name)):
            return found
    raise BuildError(f"no C compiler found: looked for {', '.join(_COMPILERS)} and $CC")


def _known_sets(compiler: str, folder: Path, emulated: bool) -> tuple[dict[str, _InstructionSet], list[str]]:
    """The instruction sets whose flags the compiler takes, by source."""
    known, notes = {}, []
    for each in _INSTRUCTION_SETS:
        flags = _emulation_flags() if emulated and each.source != "path_avx2.c" else each.flags
        if _takes(compiler, flags, folder):
            known[each.source] = _InstructionSet(each.source, flags, each.definition)
        else:
            notes.append(f"{Path(compiler).name} does not know {' '.join(flags)}: built without {each.source}")
    return known, notes


def _takes(compiler: str, flags: Sequence[str], folder: Path) -> bool:
    """Whether the compiler knows these flags."""
    probe = folder / "probe.c"
    probe.write_text("#include <stdint.h>\n", encoding="ascii")
    command = [compiler, *flags, "-c", str(probe), "-o", str(folder / "probe.o")]
    return subprocess.run(command, capture_output=True, timeout=60).returncode == 0


def _emulation_flags() -> tuple[str, ...]:
    """Emulation runs faster with what this machine has; optimised further, vectors of 16 take minutes to compile."""
    try:
        cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        cpu = ""
    return ("-O1", *(_AVX2 if " avx2 " in cpu and " fma " in cpu else ()))


def _compile_all(
    compiler: str, flags: Sequence[str], sets: dict[str, _InstructionSet], definitions: Sequence[str], folder: Path
) -> list[Path]:
    left_out = {each.source for each in _INSTRUCTION_SETS} - sets.keys()
    sources = [path for path in sorted(SOURCES.glob("*.c")) if path.name not in left_out]
    common = [f"-D{name}" for name in (*definitions, *(each.definition for each in sets.values()))]

    def compile_one(source: Path) -> Path:
        out = folder / f"{source.stem}.o"
        own = sets[source.name].flags if source.name in sets else ()
        _run([compiler, *flags, *own, *common, "-c", str(source), "-o", str(out)], f"cannot compile {source.name}")
        return out

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(compile_one, sources))


def _link(compiler: str, objects: list[Path], library: Path) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{library.stem}-", suffix=".so", dir=library.parent)
    os.close(handle)
    beside = Path(name)
    try:
        _run([compiler, *map(str, objects), *_LINK_FLAGS, "-o", str(beside)], "cannot link")
        beside.chmod(0o755)
        beside.replace(library)
    finally:
        beside.unlink(missing_ok=True)


def _run(command: list[str], failure: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{failure}: {error}") from error
    if done.returncode != 0:
        raise BuildError(f"{failure} with {command[0]}:\n{done.stderr.strip()}")


def main() -> int:
    """Build for this machine; a failure is one warning line, as the reference can serve."""
    try:
        library, notes = build()
    except (BuildError, OSError) as error:
        print(f"warning: no CPU kernels, the slow reference will run: {error}", file=sys.stderr)
        return 1
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print(library)
    return 0


if __name__ == "__main__":
    sys.exit(main())
