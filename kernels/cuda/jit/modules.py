"""Kernels of this folder as values, and what launches them: CuPy's modules, on torch's current stream."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from allspan.kernels.errors import BackendUnavailable

FOLDER = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Kernel:
    """A `__global__` function of a source file, compiled with these macros."""

    file: str
    name: str
    defines: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Gpu:
    """What kernels want to know of a device."""

    multiprocessors: int
    shared_bytes: int
    """Most that a thread block may have."""
    capability: tuple[int, int] = (8, 0)
    """(9, 0): Hopper, whose own units only some kernels use."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix in global memory, as Hopper copies tiles of it to and from shared memory, 128 bytes wide."""

    address: int
    """A multiple of 16, like `row_bytes`."""
    rows: int
    elements: int
    """Elements of a row."""
    row_bytes: int
    dtype: torch.dtype
    tile_rows: int
    places: int = 0
    """Matrices of these sizes; 0: one, which is no part of any."""
    place_bytes: int = 0
    """From one to the next."""

    @property
    def element_bytes(self) -> int:
        return self.dtype.itemsize

    @property
    def tile_elements(self) -> int:
        return 128 // self.element_bytes


def shared_limit(capability: tuple[int, int]) -> int:
    """`Gpu.shared_bytes` of a GPU that is not here."""
    if capability[0] in (9, 10, 11):
        return 232_448
    if capability < (8, 0):
        return 65_536
    return 166_912 if capability in ((8, 0), (8, 7)) else 101_376


class Driver(Protocol):
    """Compiles and launches."""

    def gpu(self, device: torch.device) -> Gpu: ...

    def tensor_map(self, matrix: Matrix) -> bytes: ...

    def prepare(self, kernels: Iterable[Kernel]) -> None:
        """Has them compiled, side by side, so that their first launches need not."""

    def launch(
        self,
        kernel: Kernel,
        blocks: tuple[int, ...],
        threads: int,
        arguments: Sequence[Any],
        shared_bytes: int,
        is_early: bool,
    ) -> None: ...


@cache
def kernel(file: str, name: str, **defines: int) -> Kernel:
    """The kernel `name` of a source file, with macros set."""
    return Kernel(file, name, tuple(sorted(defines.items())))


HALVES = (torch.bfloat16, torch.float16)
"""What goes from op to op; one of them in a call."""


def element_macro(*dtypes: torch.dtype | None) -> dict[str, int]:
    """Macro FP16 of ptx.cuh, for tensors of these types. Raises ValueError for bfloat16 beside float16."""
    if torch.float16 not in dtypes:
        return {}
    if torch.bfloat16 in dtypes:
        raise ValueError("dtype: bfloat16 and float16 in one call; convert one of them")
    return {"FP16": 1}


def launch(
    what: Kernel,
    blocks: tuple[int, ...],
    threads: int,
    arguments: Sequence[Any],
    shared_bytes: int = 0,
    is_early: bool = False,
) -> None:
    """On torch's current stream, so that it can be captured into torch's graphs. Tensors go by address (None: null),
    numbers as NumPy scalars of the parameter's type, structures by value as `bytes`.

    `is_early` lets the blocks begin before the kernel ahead has ended (programmatic dependent launch); the kernel then
    waits itself before it touches what that one reads or writes. Raises BackendUnavailable without CuPy, a compiler or
    a GPU, and for more shared memory than the GPU has; RuntimeError for what CUDA refuses.
    """
    if _noting.kernels is not None:
        _noting.kernels[what] = None
    else:
        driver().launch(what, blocks, threads, arguments, shared_bytes, is_early)


class _Noting(threading.local):
    kernels: dict[Kernel, None] | None = None


_noting = _Noting()


@contextmanager
def noting() -> Iterator[dict[Kernel, None]]:
    """What this thread launches inside is not launched, but noted: each kernel once, in order."""
    before, _noting.kernels = _noting.kernels, {}
    try:
        yield _noting.kernels
    finally:
        _noting.kernels = before


def is_noting() -> bool:
    """Whether this thread's launches are only noted."""
    return _noting.kernels is not None


def tensor_map(tensor: Tensor, tile_rows: int) -> bytes:
    """A kernel's parameter: `TensorMap` of ptx_sm90.cuh, for a matrix, or [places] of them, whose address and rows are
    multiples of 16 bytes (ValueError otherwise)."""
    *places, rows, elements = tensor.shape
    *place_bytes, row_bytes, _ = (stride * tensor.element_size() for stride in tensor.stride())
    address = tensor.data_ptr()
    if any(number % 16 for number in (address, row_bytes, *place_bytes)) or tensor.stride(-1) != 1:
        raise ValueError(f"matrix: at {address:#x}, in rows of {row_bytes} bytes; both must be multiples of 16")
    return driver().tensor_map(
        Matrix(address, rows, elements, row_bytes, tensor.dtype, tile_rows, *places, *place_bytes)
    )


def gpu(device: torch.device) -> Gpu:
    """Raises BackendUnavailable without CuPy."""
    return driver().gpu(device)


@cache
def driver() -> Driver:
    """The only one there is; tests put their own here. Raises BackendUnavailable without CuPy."""
    opened: Driver = importlib.import_module("allspan.kernels.cuda.jit.cupy_driver").CupyDriver()
    return opened


def can_launch() -> bool:
    """Whether there is a `driver`."""
    try:
        driver()
    except BackendUnavailable:
        return False
    return True
