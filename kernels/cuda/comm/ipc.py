"""Memory of one GPU that other processes of the host may open: CUDA's inter-process handles, by CuPy."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from allspan.kernels.errors import BackendUnavailable

HANDLE_BYTES = 64


@dataclass(frozen=True, slots=True)
class OwnMemory:
    """`address` is this process's; `handle` is what others open it by, on whichever GPU they run."""

    address: int
    handle: bytes
    free: Callable[[], None]
    """To be called once no rank uses the memory any more."""


def take(parts: tuple[tuple[int, int], ...]) -> OwnMemory:
    """Memory of the current device, filled part by part with a byte: (bytes, value) each; filled when this returns.

    Raises BackendUnavailable where there is no such memory, or none that others can open.
    """
    cuda = _cuda()
    try:
        address = cuda.malloc(sum(count for count, _ in parts))
        handle: bytes = cuda.ipcGetMemHandle(address)
        at = address
        for count, value in parts:
            cuda.memset(at, value, count)
            at += count
        cuda.deviceSynchronize()
    except cuda.CUDARuntimeError as error:
        raise BackendUnavailable(f"memory that other processes can open cannot be had: {error}") from error
    return OwnMemory(address, handle, lambda: cuda.free(address))


def open_memory(handle: bytes) -> tuple[int, Callable[[], None]]:
    """Where another process's memory lies in this one, and what closes it. Its GPU need not be visible here.

    Raises BackendUnavailable where the GPUs do not reach each other's memory.
    """
    cuda = _cuda()
    try:
        address: int = cuda.ipcOpenMemHandle(handle)
    except cuda.CUDARuntimeError as error:
        raise BackendUnavailable(f"another GPU's memory cannot be opened: {error}") from error
    return address, lambda: cuda.ipcCloseMemHandle(address)


def _cuda() -> Any:
    try:
        return importlib.import_module("cupy").cuda.runtime
    except ImportError as error:
        raise BackendUnavailable(f"CuPy is not installed: {error}") from error
