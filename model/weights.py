"""Reads a checkpoint's tensors, one at a time, and names its bytes.

It knows safetensors files, single or sharded with an index; not what the tensors mean.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from pdserve.errors import ConfigError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DIGEST_CHUNK_BYTES = 8 * 1024 * 1024


def iterate_weights(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the checkpoint with its name. A tensor may be a view of the file: copy what you keep.

    Raises ConfigError naming a missing or damaged file, before the first tensor where the files can tell.
    """
    files = _tensor_files(directory)
    for path, listed in files.items():
        try:
            with safe_open(path, framework="pt") as shard:
                names = list(shard.keys())
                if listed is not None and (absent := sorted(listed - set(names))):
                    raise ConfigError(f"{path}: lacks {_listing(absent)}, which {_INDEX} says it holds")
                for name in names:
                    yield name, shard.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path}: not a readable safetensors file: {error}") from None


def weights_digest(directory: Path) -> str:
    """xxh3-128, in hex, over config.json and the tensor files: equal digests mean the same model."""
    digest = xxhash.xxh3_128()
    for path in (directory / "config.json", *_tensor_files(directory)):
        try:
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            with open(path, "rb", buffering=0) as file:
                while chunk := file.read(_DIGEST_CHUNK_BYTES):
                    digest.update(chunk)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def _tensor_files(directory: Path) -> dict[Path, set[str] | None]:
    """The files in order of their names, each with the tensors that an index expects in it."""
    if (directory / _SINGLE).is_file():
        return {directory / _SINGLE: None}
    if not (directory / _INDEX).is_file():
        raise ConfigError(f"{directory}: holds neither {_SINGLE} nor {_INDEX}: only safetensors is supported")
    files: dict[Path, set[str] | None] = {}
    by_shard: dict[str, set[str]] = {}
    for name, shard in _weight_map(directory / _INDEX).items():
        by_shard.setdefault(shard, set()).add(name)
    for shard in sorted(by_shard):
        if Path(shard).name != shard or not (directory / shard).is_file():
            raise ConfigError(f"{directory}: the shard {shard}, named in {_INDEX}, is missing")
        files[directory / shard] = by_shard[shard]
    return files


def _weight_map(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path}: not a valid index: it must hold an object weight_map") from None
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ConfigError(f"{path}: not a valid index: weight_map must map tensor names to files")
    return weight_map


def _listing(names: list[str]) -> str:
    """The first few names."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
