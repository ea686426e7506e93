"""A file mapped into memory, read-only in effect: pages are read when touched and can be given back. And one that is
read, for files that others may write meanwhile."""

from __future__ import annotations

import mmap
import os
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from allspan.protos.api.errors import CheckpointError
from allspan.protos.model_files.regular_file import open_regular, unreadable


class MappedFile:
    """A memory-mapped file. `view` makes arrays over the mapping; nothing is read before they are."""

    def __init__(self, path: Path, file: BinaryIO | None = None) -> None:
        """`file`: the path, open already (what was checked is what is mapped). Raises CheckpointError when the file
        cannot be opened, is no regular file or is empty."""
        self.path = path
        try:
            with open_regular(path) if file is None else nullcontext(file) as opened:
                self.map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
        self.size = len(self.map)

    def view(self, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self.map, np.uint8, num_bytes, offset)

    def release(self) -> None:
        """Drops the pages from this process (they stay in the system's page cache)."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.map.madvise(mmap.MADV_DONTNEED)


class ReadFile:
    """A file that is read where a `view` is made. It may be cut meanwhile, which ends a process that has it mapped."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        """`file`: the path, open already; it may be closed afterwards."""
        self.path = path
        self._handle = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._handle)

    def view(self, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Returns a copy. Raises CheckpointError where the file has become shorter, or cannot be read."""
        found, begin = np.empty(num_bytes, np.uint8), 0
        while begin < num_bytes:
            try:
                count = os.preadv(self._handle, [found[begin:].data], offset + begin)
            except OSError as error:
                raise unreadable(self.path, error) from error
            if not count:
                raise CheckpointError(
                    f"{self.path} was cut while it was read: let its writer finish, and load it again"
                )
            begin += count
        return found

    def release(self) -> None:
        """There is nothing to give back."""
