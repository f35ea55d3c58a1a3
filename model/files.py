"""Which files hold a checkpoint's tensors: one safetensors file, or shards with an index. Without torch, so that a
command can refuse a damaged directory before it starts anything.
"""

from __future__ import annotations

import json
from pathlib import Path

from pdserve.errors import ConfigError

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def tensor_files(directory: Path) -> dict[Path, set[str] | None]:
    """The files in order of their names, each with the tensors that an index expects in it.

    Raises ConfigError naming a file that is missing or an index that is not valid.
    """
    if (directory / _SINGLE).is_file():
        return {directory / _SINGLE: None}
    if not (directory / INDEX).is_file():
        raise ConfigError(f"{directory}: holds neither {_SINGLE} nor {INDEX}: only safetensors is supported")
    files: dict[Path, set[str] | None] = {}
    by_shard: dict[str, set[str]] = {}
    for name, shard in _weight_map(directory / INDEX).items():
        by_shard.setdefault(shard, set()).add(name)
    for shard in sorted(by_shard):
        if Path(shard).name != shard or not (directory / shard).is_file():
            raise ConfigError(f"{directory}: the shard {shard}, named in {INDEX}, is missing")
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
