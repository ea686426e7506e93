"""Kernels of this folder as values, and what compiles and launches them: CuPy, on torch's current stream."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

from allspan.kernels.errors import BackendUnavailable

FOLDER = Path(__file__).parent


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


class Driver(Protocol):
    """Compiles and launches."""

    def gpu(self, device: torch.device) -> Gpu: ...

    def launch(
        self, kernel: Kernel, blocks: tuple[int, ...], threads: int, arguments: Sequence[Any], shared_bytes: int
    ) -> None: ...


def kernel(file: str, name: str, **defines: int) -> Kernel:
    """The kernel `name` of a source file, with macros set."""
    return Kernel(file, name, tuple(sorted(defines.items())))


def launch(
    what: Kernel, blocks: tuple[int, ...], threads: int, arguments: Sequence[Any], shared_bytes: int = 0
) -> None:
    """On torch's current stream, so that it can be captured into torch's graphs. Tensors go by address (None: null),
    numbers as NumPy scalars of the parameter's type. Raises BackendUnavailable without CuPy, and for more shared memory
    than the GPU has."""
    driver().launch(what, blocks, threads, arguments, shared_bytes)


def gpu(device: torch.device) -> Gpu:
    """Raises BackendUnavailable without CuPy."""
    return driver().gpu(device)


@cache
def driver() -> Driver:
    """The only one there is; tests put their own here. Raises BackendUnavailable without CuPy."""
    try:
        return CupyDriver(importlib.import_module("cupy"))
    except ImportError as error:
        raise BackendUnavailable(f"CuPy is not installed: {error}; install cupy-cuda12x or cupy-cuda13x") from error


class CupyDriver:
    """Compiles at the first launch; CuPy keeps what it compiled for later processes."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._functions: dict[Kernel, Any] = {}
        self._gpus: dict[torch.device, Gpu] = {}

    def gpu(self, device: torch.device) -> Gpu:
        if device not in self._gpus:
            found: Any = torch.cuda.get_device_properties(device)
            self._gpus[device] = Gpu(found.multi_processor_count, found.shared_memory_per_block_optin)
        return self._gpus[device]

    def launch(
        self, kernel: Kernel, blocks: tuple[int, ...], threads: int, arguments: Sequence[Any], shared_bytes: int
    ) -> None:
        function = self._functions.get(kernel) or self._compile(kernel)
        limit = function.max_dynamic_shared_size_bytes
        if shared_bytes > limit:
            raise BackendUnavailable(
                f"{kernel.name}: needs {shared_bytes} bytes of shared memory, this GPU has {limit}"
            )
        null = self._cupy.uint64(0)
        plain = tuple(null if a is None else a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments)
        with self._cupy.cuda.Stream.from_external(torch.cuda.current_stream()):
            function(blocks, (threads,), plain, shared_mem=shared_bytes)

    def _compile(self, kernel: Kernel) -> Any:
        options = ("-std=c++17", f"-I{FOLDER}", *(f"-D{macro}={value}" for macro, value in kernel.defines))
        source = (FOLDER / kernel.file).read_text(encoding="utf-8")
        function = self._cupy.RawModule(code=source, options=options).get_function(kernel.name)
        limit = self.gpu(torch.device("cuda", torch.cuda.current_device())).shared_bytes
        function.max_dynamic_shared_size_bytes = limit - function.shared_size_bytes
        self._functions[kernel] = function
        return function
