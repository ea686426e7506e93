"""Hugging Face folders: one file of safetensors or of torch.save, or several with an index."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from allspan.protos.api.errors import CheckpointError
from allspan.protos.model_files.regular_file import Opener, open_regular
from allspan.protos.model_files.weight_files import check_index, tensors_of, weight_files
from allspan.worker.weights.mapped_file import MappedFile, ReadFile
from allspan.worker.weights.usual_names import usual_names

_FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
_CODES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
_DTYPES = _FLOATS | _CODES
_CHUNK = 1 << 25
"""Bytes copied before the pages of the file are given back: bounds what loading takes beside the weights themselves."""


@dataclass(frozen=True, slots=True)
class Stored:
    file: MappedFile | ReadFile
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class TensorFolder:
    """See `allspan.worker.weights.checkpoint.Checkpoint`. Names are the usual ones: `usual_names`."""

    naming = "hugging_face"

    def __init__(self, folder: Path, file: str = "", opener: Opener = open_regular) -> None:
        """Maps every file and checks its header; of a `file` that is named reads what is asked for, since it may be
        written while others are served. Raises CheckpointError naming the file and the tensor."""
        self._folder, self._opener = folder, opener
        self._files: list[MappedFile | ReadFile] = []
        self._tensors: dict[str, Stored] = {}
        for path in [folder / file] if file else weight_files(folder):
            self._open(path, ReadFile if file else MappedFile)
        if not file:
            check_index(folder, {name: stored.file.path for name, stored in self._tensors.items()})
        usual = usual_names(self._tensors)
        self._tensors = {usual[name]: stored for name, stored in self._tensors.items()}

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def where(self, name: str) -> Path:
        stored = self._tensors.get(name)
        return self._folder if stored is None else stored.file.path

    def read(self, name: str, ranges: Sequence[range], out: Tensor) -> None:
        wanted = self._view(name, _FLOATS)[tuple(slice(part.start, part.stop, part.step) for part in ranges)]
        step = max(1, _CHUNK * len(wanted) // max(1, wanted.nbytes))
        for source, target in zip(torch.split(wanted, step), torch.split(out, step), strict=True):
            target.copy_(source)
            self._tensors[name].file.release()

    def dtype(self, name: str) -> str:
        """Returns a tensor's dtype as the file names it ("BF16")."""
        return self._tensors[name].dtype

    def view(self, name: str) -> Tensor:
        """The whole tensor where it lies, not to be written: nothing is read before it is used."""
        return self._view(name, _DTYPES)

    def floats(self, name: str) -> Tensor:
        """Returns the whole of a tensor of numbers, read anew where its file is one that is read."""
        return self._view(name, _FLOATS)

    def release(self) -> None:
        for file in self._files:
            file.release()

    def _view(self, name: str, dtypes: Mapping[str, torch.dtype]) -> Tensor:
        stored = self._tensors[name]
        dtype = dtypes.get(stored.dtype)
        if dtype is None:
            raise CheckpointError(
                f"{stored.file.path}: tensor {name!r} has dtype {stored.dtype}, which is not supported "
                f"(supported: {', '.join(dtypes)})"
            )
        raw = torch.from_numpy(stored.file.view(stored.offset, stored.num_bytes))
        if stored.offset % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).view(stored.shape)

    def _open(self, path: Path, kind: type[MappedFile | ReadFile]) -> None:
        with self._opener(path) as opened:
            tensors = tensors_of(opened, path)
            file = kind(path, opened)
        self._files.append(file)
        for name, stored in tensors.items():
            if name in self._tensors:
                first = self._tensors[name].file.path.name
                raise CheckpointError(f"{path}: tensor {name!r} is in {first}, too: remove one of the files")
            self._tensors[name] = Stored(file, stored.dtype, stored.shape, stored.offset, stored.num_bytes)
