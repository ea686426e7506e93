"""Compiles CUDA C++ of this folder, once a process and options, and launches it on torch's stream."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from allspan.kernels.errors import BackendUnavailable


@cache
def kernel(file: str, name: str, **defines: int) -> Any:
    """The kernel `name` of a source file, with macros set, and allowed all of a block's shared memory.

    Raises BackendUnavailable without CuPy.
    """
    folder = Path(__file__).parent
    options = ("-std=c++17", f"-I{folder}", *(f"-D{macro}={value}" for macro, value in defines.items()))
    source = (folder / file).read_text(encoding="utf-8")
    function = _cupy().RawModule(code=source, options=options).get_function(name)
    limit: int = getattr(torch.cuda.get_device_properties(), "shared_memory_per_block_optin")  # noqa: B009  (untyped)
    function.max_dynamic_shared_size_bytes = limit - function.shared_size_bytes
    return function


def launch(function: Any, blocks: tuple[int, ...], threads: int, arguments: Sequence[Any], shared_bytes: int) -> None:
    """On torch's current stream, so that it can be captured into torch's graphs. Tensors go by address, numbers as
    NumPy scalars of the parameter's type. Raises BackendUnavailable for more shared memory than the GPU has."""
    limit = function.max_dynamic_shared_size_bytes
    if shared_bytes > limit:
        raise BackendUnavailable(f"{function.name}: needs {shared_bytes} bytes of shared memory, this GPU has {limit}")
    plain = tuple(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments)
    with _cupy().cuda.Stream.from_external(torch.cuda.current_stream()):
        function(blocks, (threads,), plain, shared_mem=shared_bytes)


def _cupy() -> Any:
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise BackendUnavailable(f"CuPy is not installed: {error}; install cupy-cuda12x or cupy-cuda13x") from error
