"""The weights of a Hugging Face folder: which files hold them, and where each tensor lies, whatever wrote the files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from allspan.protos.api.errors import CheckpointError
from allspan.protos.model_files.json_values import read_json_object, shown
from allspan.protos.model_files.limits import MAX_FILE_NAME, MAX_INDEX_BYTES
from allspan.protos.model_files.regular_file import is_there, names_in, open_regular
from allspan.protos.model_files.safetensors_header import StoredTensor, safetensors_header
from allspan.protos.model_files.torch_archive import torch_header


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A kind of files that hold tensors. A folder has its index, its one file, or files that begin and end so."""

    suffix: str
    index: str
    one: str
    beginning: str
    header: Callable[[BinaryIO, Path], Mapping[str, StoredTensor]]

    def names(self, folder: Path) -> list[str]:
        """Returns the files without an index."""
        if is_there(folder / self.one):
            return [self.one]
        return [name for name in names_in(folder) if name.endswith(self.suffix) and name.startswith(self.beginning)]


FORMATS = (
    WeightFormat(
        ".safetensors",
        "model.safetensors.index.json",
        "model.safetensors",
        "",
        lambda file, path: safetensors_header(file, path).tensors,
    ),
    WeightFormat(".bin", "pytorch_model.bin.index.json", "pytorch_model.bin", "pytorch_model", torch_header),
)
"""The first that a folder has files of counts."""


def tensors_of(file: BinaryIO, path: Path) -> Mapping[str, StoredTensor]:
    """Name → tensor of a file of one of the FORMATS; `file` is open, at its start. Raises CheckpointError."""
    return next(each for each in FORMATS if path.name.endswith(each.suffix)).header(file, path)


def format_of(folder: Path) -> WeightFormat | None:
    """The format of a folder's weights; None where there are none."""
    return next((each for each in FORMATS if is_there(folder / each.index) or each.names(folder)), None)


def weight_files(folder: Path) -> list[Path]:
    """Returns the files with a folder's weights: those that its index names, else the one of the usual name, else all
    of the format. Raises CheckpointError when one is missing, or there is none."""
    found = format_of(folder)
    if found is None:
        raise CheckpointError(f"{folder}: no *.safetensors and no pytorch_model*.bin file (no other formats are read)")
    weight_map = _read_index(folder, found)
    if weight_map is None:
        return [folder / name for name in found.names(folder)]
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        if not is_there(folder / shard):
            first = next(name for name, file in weight_map.items() if file == shard)
            raise CheckpointError(
                f"{folder / shard}: shard is missing ({found.index} expects tensor {shown(first)} in it)"
            )
    return [folder / shard for shard in shards]


def read_tensors(folder: Path) -> dict[str, tuple[Path, StoredTensor]]:
    """Every tensor of a folder with its file. Raises CheckpointError; for a tensor that is in two files, too, and for
    one that the index names and its file lacks."""
    tensors: dict[str, tuple[Path, StoredTensor]] = {}
    for path in weight_files(folder):
        with open_regular(path) as file:
            for name, stored in tensors_of(file, path).items():
                add_tensor(tensors, name, path, stored)
    check_index(folder, {name: path for name, (path, _) in tensors.items()})
    return tensors


def add_tensor(tensors: dict[str, tuple[Path, StoredTensor]], name: str, path: Path, stored: StoredTensor) -> None:
    """Raises CheckpointError for a name that another file has, too."""
    if name in tensors:
        raise CheckpointError(
            f"{path}: tensor {shown(name)} is in {tensors[name][0].name}, too: remove one of the files"
        )
    tensors[name] = path, stored


def check_index(folder: Path, found: Mapping[str, Path]) -> None:
    """Checks that each tensor lies where the folder's index says; CheckpointError otherwise."""
    kind = format_of(folder)
    for name, shard in ((_read_index(folder, kind) if kind else None) or {}).items():
        if found.get(name) != folder / shard:
            raise CheckpointError(
                f"{folder / shard}: tensor {shown(name)} is missing ({kind.index if kind else ''} expects it here)"
            )


def _read_index(folder: Path, kind: WeightFormat) -> dict[str, str] | None:
    """Tensor → the name of its file, as the folder's index says; None for a folder without an index. Raises
    CheckpointError for names that are no file of this folder."""
    index = folder / kind.index
    if not is_there(index):
        return None
    found = read_json_object(index, MAX_INDEX_BYTES).get("weight_map")
    what = f"{index}: not an index of *{kind.suffix} files"
    if not isinstance(found, dict) or not found:
        raise CheckpointError(f"{what}: weight_map must be an object of tensors and files")
    for shard in set(map(_shard, found.values())):
        is_name = shard.endswith(kind.suffix) and Path(shard).name == shard and shard.isprintable()
        if not is_name or len(shard) > MAX_FILE_NAME:
            raise CheckpointError(
                f"{what}: weight_map names the file {shown(shard)}, must be NAME{kind.suffix} in the same folder"
            )
    return found


def _shard(name: object) -> str:
    return name if isinstance(name, str) else ""
