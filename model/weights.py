"""Reads a checkpoint's tensors, one at a time, and names its bytes.

It knows not what the tensors mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from model.files import INDEX, tensor_files
from pdserve import logs
from pdserve.errors import ConfigError

_log = logs.logger("model")

_DIGEST_CHUNK_BYTES = 8 * 1024 * 1024


def iterate_weights(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the checkpoint with its name. A tensor may be a view of the file: copy what you keep.

    Where there is an index, it decides which file a tensor is taken from. What else a file has, such as an old copy of
    a tensor that is in another file now, is ignored with one line in the log. Raises ConfigError naming a missing or
    damaged file, before the first tensor where the files can tell.
    """
    ignored: list[str] = []
    for path, listed in tensor_files(directory).items():
        try:
            with safe_open(path, framework="pt") as shard:
                names = list(shard.keys())
                if listed is not None:
                    if absent := sorted(listed - set(names)):
                        raise ConfigError(f"{path}: lacks {_listing(absent)}, which {INDEX} says it holds")
                    ignored += [f"{name} in {path.name}" for name in names if name not in listed]
                    names = [name for name in names if name in listed]
                for name in names:
                    yield name, shard.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path}: not a readable safetensors file: {error}") from None
    if ignored:
        _log.warning("tensors that the index does not name are ignored", path=str(directory), tensors=_listing(ignored))


def weights_digest(directory: Path) -> str:
    """xxh3-128, in hex, over config.json and the tensor files: equal digests mean the same model."""
    digest = xxhash.xxh3_128()
    for path in (directory / "config.json", *tensor_files(directory)):
        try:
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            with open(path, "rb", buffering=0) as file:
                while chunk := file.read(_DIGEST_CHUNK_BYTES):
                    digest.update(chunk)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def _listing(names: list[str]) -> str:
    """The first few names."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
