"""The weights of one rank in a file: the very tensors that it holds, so that a later start only maps them.

A safetensors file (see `allspan.worker.weights.tensor_folder`). Its data begins on a page; tensors follow each
other without holes, as the format demands, those whose sizes have the most trailing zero bits first: so each is aligned
like its size, packed weights to 32 bytes or more.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from allspan.protos.api.errors import CheckpointError
from allspan.protos.model_files.regular_file import open_regular
from allspan.protos.model_files.safetensors_header import safetensors_header
from allspan.worker.weights.held_tensor import HeldTensor
from allspan.worker.weights.mapped_file import MappedFile

_NAMES = {
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}
_MOST_ALIGNED = 64
_POPULATE_BYTES = 64 << 20
_POPULATE_READ = 22  # MADV_POPULATE_READ, since Linux 5.14

Release = Callable[[], None]


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A new file, filled through `tensors`; `release` lets go of what has been written so far (it is in the file)."""

    tensors: dict[str, Tensor]
    num_bytes: int
    header_sha256: str
    release: Release


@contextmanager
def new_rank_file(path: Path, held: Mapping[str, HeldTensor], metadata: Mapping[str, str]) -> Iterator[WrittenFile]:
    """Makes the file in its full length and maps it; afterwards it is on the disk. OSError when that has no room."""
    header, starts = _layout(held, metadata)
    num_bytes = len(header) + sum(tensor.num_bytes for tensor in held.values())
    with path.open("w+b") as file:
        os.posix_fallocate(file.fileno(), 0, num_bytes)  # writing to a map of a full disk would end the process
        file.write(header)
        file.flush()
        memory = mmap.mmap(file.fileno(), num_bytes)
        tensors = {name: _view(memory, len(header) + starts[name], tensor) for name, tensor in held.items()}
        digest = hashlib.sha256(header).hexdigest()
        yield WrittenFile(tensors, num_bytes, digest, lambda: memory.madvise(mmap.MADV_DONTNEED))
        memory.flush()
        os.fsync(file.fileno())


class RankFile:
    """One that was written so, mapped privately: its pages are the system's own copy of the file."""

    def __init__(self, path: Path, num_bytes: int, header_sha256: str) -> None:
        """Checks length and header against what the manifest says of them. Raises CheckpointError."""
        self.path = path
        with open_regular(path) as opened:
            self._file = MappedFile(path, opened)
            self._check_size(num_bytes)
            header = safetensors_header(opened, path)
        if hashlib.sha256(header.raw).hexdigest() != header_sha256:
            raise CheckpointError(f"{path}: altered: its header is not the one that was written: convert again")
        self._entries = header.tensors

    def _check_size(self, num_bytes: int) -> None:
        if self._file.size != num_bytes:
            raise CheckpointError(
                f"{self.path}: {'truncated' if self._file.size < num_bytes else 'altered'}: it has {self._file.size} "
                f"bytes, its manifest says {num_bytes}: convert the model again"
            )

    def tensors(self, held: Mapping[str, HeldTensor]) -> dict[str, Tensor]:
        """Views of the mapping; CheckpointError unless the file holds exactly these names, shapes and dtypes."""
        for name in self._entries:
            if name not in held:
                raise CheckpointError(
                    f"{self.path}: tensor {name!r} is not part of the model that the manifest names: convert the model "
                    "again"
                )
        views = {}
        for name, tensor in held.items():
            entry = self._entries.get(name)
            if entry is None:
                raise CheckpointError(f"{self.path}: tensor {name!r} is missing: convert the model again")
            if (entry.dtype, entry.shape) != (_NAMES[tensor.dtype], tensor.shape):
                raise CheckpointError(
                    f"{self.path}: tensor {name!r} is {entry.dtype} {list(entry.shape)}, this version holds it as "
                    f"{_NAMES[tensor.dtype]} {list(tensor.shape)}: convert the model again"
                )
            views[name] = _view(self._file.map, entry.offset, tensor)
        return views

    def populate(self, on_progress: Callable[[int, int], None] | None) -> None:
        """Brings all pages into memory, the longest part first if they come from a disk. CheckpointError if that
        fails (later it would end the process)."""
        size = self._file.size
        for start in range(0, size, _POPULATE_BYTES):
            length = min(_POPULATE_BYTES, size - start)
            try:
                self._file.map.madvise(_POPULATE_READ, start, length)
            except OSError as error:
                if error.errno != 22:  # an older kernel: its pages are read as they are touched
                    raise CheckpointError(f"{self.path}: cannot be read: {error}") from error
                self._file.map.madvise(mmap.MADV_WILLNEED, start, length)
            if on_progress is not None:
                on_progress(start + length, size)

    def release(self) -> None:
        self._file.release()


def _layout(held: Mapping[str, HeldTensor], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """The header, padded to a page, and where each tensor starts behind it."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    starts, end = {}, 0
    for name in sorted(held, key=lambda name: -_alignment(held[name].num_bytes)):  # stable: else in the given order
        tensor = held[name]
        starts[name], end = end, end + tensor.num_bytes
        offsets = [starts[name], end]
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(entries, separators=(",", ":")).encode()
    length = -(-(8 + len(text)) // mmap.PAGESIZE) * mmap.PAGESIZE - 8
    return length.to_bytes(8, "little") + text.ljust(length), starts


def _alignment(num_bytes: int) -> int:
    return min(num_bytes & -num_bytes, _MOST_ALIGNED) or _MOST_ALIGNED


def _view(memory: mmap.mmap, offset: int, tensor: HeldTensor) -> Tensor:
    count = torch.Size(tensor.shape).numel()
    if count == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    return torch.frombuffer(memory, dtype=tensor.dtype, count=count, offset=offset).view(tensor.shape)
