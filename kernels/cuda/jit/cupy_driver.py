"""Loads compiled kernels through CuPy and launches them through the driver's own call.

CuPy's launch from Python takes some 14 µs. Here arguments are packed into one buffer by a format that is worked out
once for the types of a kernel's arguments; what is left is that and one foreign call.
"""

from __future__ import annotations

import ctypes
import importlib
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch

from allspan.kernels.cuda.jit.compiled import compile_missing, compiled
from allspan.kernels.cuda.jit.modules import Gpu, Kernel, Matrix
from allspan.kernels.cuda.jit.nvrtc import architecture, loaded_major, nvrtc
from allspan.kernels.errors import BackendUnavailable

_CONFIG = struct.Struct("=6IIxxxxQQIxxxx")
"""CUlaunchConfig: blocks and threads of three dimensions, shared bytes, stream, attributes and their number."""
_EARLY = struct.Struct("=IxxxxI60x").pack(6, 1)
"""CUlaunchAttribute: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, 1."""
_INVALID_CONTEXT = 201
_MAP_TYPES = {torch.float8_e4m3fn: 0, torch.int8: 0, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
"""CUtensorMapDataType."""
_SWIZZLE_128, _PROMOTION_256 = 3, 3
_FORMATS: dict[type, str] = {
    torch.Tensor: "Q",
    torch.nn.Parameter: "Q",
    type(None): "Q",
    np.int32: "i4x",
    np.uint32: "I4x",
    np.float32: "f4x",
    np.int64: "q",
    np.uint64: "Q",
    np.float64: "d",
}


class _Arguments:
    """A buffer for arguments of these types, and pointers to each."""

    def __init__(self, name: str, arguments: Sequence[Any]) -> None:
        formats = [_format(name, argument) for argument in arguments]
        self._format = struct.Struct("=" + "".join(formats))
        self._cells = ctypes.create_string_buffer(self._format.size + 1)
        begins = [struct.calcsize("=" + "".join(formats[:i])) for i in range(len(formats))]
        at = ctypes.addressof(self._cells)
        self._tensors = [i for i, argument in enumerate(arguments) if isinstance(argument, torch.Tensor)]
        self._nulls = [i for i, argument in enumerate(arguments) if argument is None]
        self.pointers = (ctypes.c_void_p * (len(formats) + 1))(*(at + begin for begin in begins))

    def fill(self, arguments: Sequence[Any]) -> None:
        values = list(arguments)
        for i in self._tensors:
            values[i] = values[i].data_ptr()
        for i in self._nulls:
            values[i] = 0
        self._format.pack_into(self._cells, 0, *values)


def _format(name: str, argument: Any) -> str:
    """Returns the argument's format for `struct`, padded to whole 8 bytes."""
    if isinstance(argument, bytes):
        return f"{len(argument)}s{-len(argument) % 8}x"
    if (kind := type(argument)) not in _FORMATS:
        raise TypeError(f"{name}: a {kind.__name__} is no kernel's argument; give a tensor, a NumPy scalar or bytes")
    return _FORMATS[kind]


class Launcher:
    """Launches one function on one device."""

    def __init__(
        self, name: str, call: Any, enter: Callable[[], None], function: Any, limit: int, has_early: bool
    ) -> None:
        """`call`: the driver's cuLaunchKernelEx(config, function, pointers, extra). `enter` makes the device that of a
        thread that has not used CUDA yet. `function`: CuPy's, which holds the module. `limit`: bytes of shared memory
        that a launch may ask for."""
        self._name = name
        self._call = call
        self._enter = enter
        self._function = function
        self._handle = ctypes.c_void_p(function.ptr)
        self._limit = limit
        self._has_early = has_early
        self._lock = threading.Lock()
        self._layouts: dict[tuple[type, ...], _Arguments] = {}
        self._config = ctypes.create_string_buffer(_CONFIG.size)
        self._early = ctypes.create_string_buffer(_EARLY, len(_EARLY))

    def __call__(
        self, blocks: tuple[int, ...], threads: int, arguments: Sequence[Any], shared_bytes: int, stream: int,
        is_early: bool,
    ) -> None:  # fmt: skip
        """Raises RuntimeError for what CUDA refuses, BackendUnavailable for too much shared memory, TypeError for what
        is no argument."""
        if shared_bytes > self._limit:
            raise BackendUnavailable(
                f"{self._name}: needs {shared_bytes} bytes of shared memory, this GPU has {self._limit}"
            )
        x, y, z = (*blocks, 1, 1)[:3]
        attributes = (ctypes.addressof(self._early), 1) if is_early and self._has_early else (0, 0)
        with self._lock:  # the buffers are read until the call returns
            types = tuple(map(type, arguments))
            if (packed := self._layouts.get(types)) is None:
                packed = self._layouts[types] = _Arguments(self._name, arguments)
            packed.fill(arguments)
            _CONFIG.pack_into(self._config, 0, x, y, z, threads, 1, 1, shared_bytes, stream, *attributes)
            result = self._call(self._config, self._handle, packed.pointers, None)
            if result == _INVALID_CONTEXT:
                self._enter()
                result = self._call(self._config, self._handle, packed.pointers, None)
        if result:
            raise RuntimeError(
                f"{self._name}: CUDA refuses to launch {blocks} blocks of {threads} threads: error {result}"
            )


class CupyDriver:
    """Compiles what no earlier process has compiled, at the first launch if nobody has asked for it before."""

    def __init__(self) -> None:
        """Raises BackendUnavailable without CuPy, a driver, or a torch that has CUDA."""
        if loaded_major() is None:
            raise BackendUnavailable("this torch is a CPU build; install one with CUDA (launch/demo.sh --gpu does)")
        try:
            self._cupy = importlib.import_module("cupy")
            library = ctypes.CDLL("libcuda.so.1")
            self._launch, self._encode = library.cuLaunchKernelEx, library.cuTensorMapEncodeTiled
        except ImportError as error:
            raise BackendUnavailable(
                f"CuPy cannot be had: {error}; pip install '.[cuda13]' in the checkout (or cuda12)"
            ) from error
        except (OSError, AttributeError) as error:
            raise BackendUnavailable(f"no NVIDIA driver for CUDA 12 or later: {error}") from error
        self._current_device: Any = torch._C._cuda_getDevice
        self._current_stream: Any = torch._C._cuda_getCurrentRawStream  # torch.cuda.current_stream makes an object
        self._launchers: dict[tuple[Kernel, int], Launcher] = {}
        self._gpus: dict[torch.device, Gpu] = {}
        self.tensor_map = lru_cache(maxsize=4096)(self._tensor_map)

    def gpu(self, device: torch.device) -> Gpu:
        if device not in self._gpus:
            found: Any = torch.cuda.get_device_properties(device)
            capability = found.major, found.minor
            self._gpus[device] = Gpu(found.multi_processor_count, found.shared_memory_per_block_optin, capability)
        return self._gpus[device]

    def prepare(self, kernels: Iterable[Kernel]) -> None:
        """Raises CompilationError."""
        gpu = self.gpu(torch.device("cuda", self._current_device()))
        compile_missing(kernels, architecture(gpu.capability), nvrtc(loaded_major()))

    def launch(
        self, kernel: Kernel, blocks: tuple[int, ...], threads: int, arguments: Sequence[Any], shared_bytes: int,
        is_early: bool,
    ) -> None:  # fmt: skip
        device = self._current_device()
        launcher = self._launchers.get((kernel, device)) or self._load(kernel, device)
        launcher(blocks, threads, arguments, shared_bytes, self._current_stream(device), is_early)

    def _tensor_map(self, matrix: Matrix) -> bytes:
        """Raises RuntimeError for what CUDA refuses."""
        made = (ctypes.c_char * 192)()
        at = ctypes.addressof(made) + -ctypes.addressof(made) % 64
        rank = 3 if matrix.places else 2
        sizes = (ctypes.c_uint64 * 3)(matrix.elements, matrix.rows, matrix.places)
        strides = (ctypes.c_uint64 * 2)(matrix.row_bytes, matrix.place_bytes)
        tile, ones = (ctypes.c_uint32 * 3)(matrix.tile_elements, matrix.tile_rows, 1), (ctypes.c_uint32 * 3)(1, 1, 1)
        to, kind, of = ctypes.c_void_p(at), _MAP_TYPES[matrix.dtype], ctypes.c_void_p(matrix.address)
        result = self._encode(to, kind, rank, of, sizes, strides, tile, ones, 0, _SWIZZLE_128, _PROMOTION_256, 0)
        if result:
            raise RuntimeError(f"{matrix}: CUDA refuses to copy tiles of it: error {result}")
        return ctypes.string_at(at, 128)

    def _load(self, kernel: Kernel, device: int) -> Launcher:
        gpu = self.gpu(torch.device("cuda", device))
        path = compiled(kernel, architecture(gpu.capability), nvrtc(loaded_major())).path
        function = self._cupy.RawModule(path=str(path)).get_function(kernel.name)
        limit = gpu.shared_bytes - function.shared_size_bytes
        function.max_dynamic_shared_size_bytes = limit
        enter = partial(self._cupy.cuda.runtime.setDevice, device)  # torch's own does nothing where it knows better
        launcher = Launcher(kernel.name, self._launch, enter, function.kernel, limit, gpu.capability >= (9, 0))
        self._launchers[kernel, device] = launcher
        return launcher
