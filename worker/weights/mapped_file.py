"""A file mapped into memory, read-only in effect: pages are read when touched and can be given back."""

from __future__ import annotations

import mmap
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from allspan.protos.api.errors import CheckpointError
from allspan.protos.model_files.regular_file import open_regular


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
