"""An adapter in host memory, and whether all ranks have read the same one."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from allspan.worker.adapters.peft_folder import LowRank


@dataclass(frozen=True, slots=True)
class StagedAdapter:
    """What a slot of each tensor is to hold, by the tensors' names, and the checksum of what that was made of."""

    tensors: Mapping[str, Tensor]
    checksum: str
    """See `checksum_of`; the same on all ranks, though each holds its part."""


def checksum_of(matrices: Mapping[str, LowRank]) -> str:
    """Returns a checksum of whole matrices as they were read, so of the files and the factors that the config says.

    It tells versions of a file apart, not forgeries (who may write the folder needs none). So each matrix has its
    CRC-32, of which 80 MB take 20 ms, a third of what SHA-256 takes with instructions of its own.
    """
    told = [
        (name, side, tuple(matrix.shape), str(matrix.dtype), zlib.crc32(matrix.view(torch.uint8).numpy().data))
        for name, found in sorted(matrices.items())
        for side, matrix in (("a", found.a), ("b", found.b))
    ]
    return hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest()


def difference(checksums: Sequence[str]) -> str:
    """Returns what is wrong where ranks have read different matrices, whose checksums these are; "" for nothing."""
    others = [str(rank) for rank, each in enumerate(checksums) if each != checksums[0]]
    if not others:
        return ""
    return (
        f"rank{'s' if len(others) > 1 else ''} {', '.join(others)} read other matrices than rank 0: the files were "
        "replaced meanwhile, or differ between hosts; give all hosts the same files, then load it again"
    )
