"""Sums over GPUs by NCCL, through torch: for what is too long for our own, and where GPUs do not reach each other."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor

SETTINGS = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""NVLink's multicast stays off: a program that fails in it can take all GPUs of a host with it."""


class Nccl:
    """The ranks' communicator; every rank makes one at once."""

    def __init__(self, rank: int, size: int, meeting_point: Path, timeout_s: float) -> None:
        """`meeting_point`: a file that is not there yet, the same for every rank. Raises RuntimeError."""
        os.environ.update(SETTINGS)
        torch.distributed.init_process_group(
            "nccl",
            store=torch.distributed.FileStore(str(meeting_point), size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
            device_id=torch.device("cuda", torch.cuda.current_device()),
        )
        self.all_reduce(torch.zeros(1, device="cuda"))  # connects now, not in the first step

    def all_reduce(self, x: Tensor) -> None:
        """In place, on the current stream, in an order and with roundings of NCCL's own."""
        torch.distributed.all_reduce(x)

    def close(self) -> None:
        torch.distributed.destroy_process_group()


def open_nccl(rank: int, size: int, share: Callable[[bytes], list[bytes]], timeout_s: float) -> Nccl | None:
    """None where a rank has no NCCL, two ranks have the same GPU, or it fails on a rank. `share` gives every rank each
    rank's bytes (at most 1 KiB)."""
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    gpus = share(str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid).encode() if has_nccl else b"")
    if b"" in gpus or len(set(gpus)) < size:
        return None
    opened: Nccl | None = None
    with tempfile.TemporaryDirectory(prefix="allspan-nccl-") as mine:
        folder = share(mine.encode())[0].decode()
        with suppress(RuntimeError):  # said by the caller, with what is used instead
            opened = Nccl(rank, size, Path(folder) / "meeting", timeout_s)
        everyone = share(b"ready" if opened else b"failed")
    if b"failed" in everyone:
        if opened is not None:
            opened.close()
        return None
    return opened
