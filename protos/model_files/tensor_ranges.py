"""Where the tensors of a file lie: each within it, and none over another."""

from __future__ import annotations

from collections.abc import Iterable

from allspan.protos.api.errors import CheckpointError
from allspan.protos.model_files.json_values import shown


def check_ranges(source: str, ranges: Iterable[tuple[int, int, str]], file_bytes: int) -> None:
    """Checks (begin, end, name) of a file's tensors, in bytes from its start. Raises CheckpointError for one that ends
    behind the file or overlaps another."""
    before_end, before = 0, ""
    found = sorted(ranges)
    for begin, end, name in found:
        if end > file_bytes:
            longest = max(last for _, last, _ in found)
            raise CheckpointError(
                f"{source}: truncated: tensor {shown(name)} ends at byte {end}, but the file has {file_bytes} bytes, "
                f"must have {longest}"
            )
        if begin < before_end and end > begin:
            raise CheckpointError(
                f"{source}: tensors {shown(before)} and {shown(name)} overlap: the first ends at byte {before_end}, "
                f"the second begins at {begin}; fetch the file again"
            )
        if end > before_end:
            before_end, before = end, name
