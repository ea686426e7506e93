"""Sums over GPUs by NCCL, through torch: for what is too long for our own, and where GPUs do not reach each other."""

from __future__ import annotations

import ipaddress
import os
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SETTINGS = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""NVLink's multicast stays off: a program that fails in it can take all GPUs of a host with it."""
_RANKS_NETWORK = "OMPI_MCA_btl_tcp_if_include"
"""The variable that holds the network of the ranks, as Open MPI reads it."""


class Nccl:
    """The ranks' communicator; every rank makes one at once."""

    def __init__(self, rank: int, size: int, store: Any, timeout_s: float) -> None:
        """`store`: a torch.distributed.Store, where the ranks find each other. Raises RuntimeError."""
        os.environ.update(SETTINGS)
        torch.distributed.init_process_group(
            "nccl",
            store=store,
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


def own_address(network: str) -> str:
    """The address that this host has in a network such as "10.1.0.0/16"; its name where none is given."""
    try:
        known = ipaddress.ip_network(network.split(",")[0], strict=False)
    except ValueError:  # an interface, or nothing
        return socket.gethostname()
    family = socket.AF_INET if known.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as asked:
        asked.connect((str(known.network_address + 1), 9))  # sends nothing, but chooses a route
        return str(asked.getsockname()[0])


def meet(rank: int, size: int, share: Callable[[bytes], list[bytes]], timeout_s: float) -> Any:
    """The store in which the ranks of several hosts find each other, at a port of rank 0, whose address it shares.
    Every rank calls it at once. Raises RuntimeError."""
    limit = timedelta(seconds=timeout_s)
    store: Any = None
    make: Any = torch.distributed.TCPStore  # type: ignore[attr-defined]
    address = b""
    if rank == 0:
        with suppress(RuntimeError, OSError):  # the others must hear of it
            host = own_address(os.environ.get(_RANKS_NETWORK, ""))
            store = make(host, 0, size, True, limit, wait_for_workers=False)
            address = f"{host} {store.port}".encode()
    told = share(address)[0].decode().split()
    if not told:
        raise RuntimeError("rank 0 could not open a port for NCCL")
    if store is None:
        store = make(told[0], int(told[1]), size, False, limit, wait_for_workers=False)
    return store


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
        # A rank that does not see the folder of rank 0 is on another host.
        is_one_host = all(each == b"here" for each in share(b"here" if Path(folder).is_dir() else b"elsewhere"))
        with suppress(RuntimeError):  # said by the caller, with what is used instead
            store: Any
            if is_one_host:
                store = torch.distributed.FileStore(str(Path(folder) / "meeting"), size)  # type: ignore[attr-defined]
            else:
                store = meet(rank, size, share, timeout_s)
            opened = Nccl(rank, size, store, timeout_s)
        everyone = share(b"ready" if opened else b"failed")
    if b"failed" in everyone:
        if opened is not None:
            opened.close()
        return None
    return opened
