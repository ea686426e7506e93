"""A file mapped into memory, read-only in effect: pages are read when touched and can be given back."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt

from allspan.protos.api.errors import CheckpointError


class MappedFile:
    """A memory-mapped file. `view` makes arrays over the mapping; nothing is read before they are."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError when the file cannot be opened or is empty."""
        self.path = path
        try:
            with path.open("rb") as file:
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
        self.size = len(self.map)

    def view(self, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self.map, np.uint8, num_bytes, offset)

    def release(self) -> None:
        """Drops the pages from this process (they stay in the system's page cache)."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.map.madvise(mmap.MADV_DONTNEED)
