"""Checks of a checkpoint's files before any process starts, so that a missing or truncated file is reported at once.

The ranks check every tensor once more when they read it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from allspan.protos.api.errors import CheckpointError
from allspan.protos.config.converted_manifest import is_converted, read_manifest
from allspan.protos.config.json_file import read_json_object

_INDEX = "model.safetensors.index.json"


def check_files(model: Path) -> None:
    """Checks a folder with safetensors: every shard that the index names is there, and every file is as long as its
    header says, or the manifest of converted weights. Raises CheckpointError naming the file, with its length and the
    one expected."""
    if is_converted(model):
        _check_converted(model)
        return
    if not model.is_dir():
        return
    index = model / _INDEX
    shards = read_json_object(index).get("weight_map") if index.is_file() else None
    if isinstance(shards, dict):
        for shard in sorted({str(name) for name in shards.values()}):
            if not (model / shard).is_file():
                raise CheckpointError(f"{model / shard}: shard is missing ({_INDEX} expects tensors in it)")
    for path in sorted(model.glob("*.safetensors")):
        _check_length(path)


def _check_converted(folder: Path) -> None:
    for rank in read_manifest(folder).ranks:
        path = folder / rank.name
        found = path.stat().st_size if path.is_file() else 0
        if found != rank.num_bytes:
            what = "altered" if found > rank.num_bytes else "truncated" if path.is_file() else "missing"
            raise CheckpointError(
                f"{path}: {what}: it has {found} bytes, its manifest says {rank.num_bytes}: convert the model again"
            )


def _check_length(path: Path) -> None:
    found = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if start == b"version ":
            return  # a Git LFS pointer, the ranks say
        if length > found - 8:
            raise CheckpointError(
                f"{path}: truncated or not safetensors: the header takes {length} bytes, the file has {found}"
            )
        header = file.read(length)
    try:
        entries = json.loads(header)
        expected = 8 + length + max((_end(entry) for entry in entries.values()), default=0)
    except (ValueError, AttributeError, KeyError, TypeError, IndexError):
        return
    if found < expected:
        raise CheckpointError(f"{path}: truncated: it has {found} bytes, its header says {expected}")


def _end(entry: dict[str, Any]) -> int:
    return int(entry["data_offsets"][1]) if "data_offsets" in entry else 0
