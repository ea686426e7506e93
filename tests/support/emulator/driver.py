"""Runs the CUDA kernels on a processor: emulator.h says what that shows and what not."""

from __future__ import annotations

import ctypes
import functools
import os
import random
import re
import struct
import subprocess
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from allspan.kernels.cuda.jit.modules import FOLDER, Gpu, Kernel, Matrix, shared_limit
from allspan.kernels.cuda.jit.variants import all_variants
from support import artefacts

HERE = Path(__file__).parent

_GXX = [os.environ.get("CXX", "g++"), "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-ffp-contract=off"]

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)

_STUB = """{first}
#include "emulator.h"
{macros}
#include "{file}"
#ifndef CLUSTER
#define CLUSTER 1
#endif
#pragma GCC visibility push(hidden)
extern "C" void emulated_kernel(void** arguments) {{ emulator::call(&{name}, arguments); }}
extern "C" const unsigned emulated_cluster = CLUSTER;
"""


class EmulatedFault(AssertionError):
    """A kernel did what no GPU would put up with."""


class Streams:
    """Launches of several GPUs that run beside each other: in the order of their stream, in turns that chance gives."""

    def __init__(self, count: int) -> None:
        self.current = 0
        """Where the next launches go."""
        self._queues: list[list[tuple[Kernel, Any, tuple[Any, ...]]]] = [[] for _ in range(count)]

    def add(self, kernel: Kernel, library: Any, call: tuple[Any, ...]) -> None:
        self._queues[self.current].append((kernel, library, call))

    def run(self, seed: int) -> None:
        """All of them to their end."""
        chance = random.Random(seed)
        running: dict[int, Any] = {}
        done = ctypes.c_int()
        while open_queues := [index for index, queue in enumerate(self._queues) if queue]:
            late = chance.choice(open_queues)  # one of them stands still for a while
            for _ in range(chance.choice((1, 10, 100))):
                index = chance.choice(open_queues)
                if (index == late and len(open_queues) > 1) or not self._queues[index]:
                    continue
                kernel, library, call = self._queues[index][0]
                if index not in running:
                    running[index] = ctypes.c_void_p(library.emulated_begin(*call))
                error = library.emulated_turn(running[index], chance.getrandbits(32), ctypes.byref(done))
                if error:
                    raise EmulatedFault(f"stream {index}, {kernel}: {error.decode()}")
                if done.value:
                    del running[index]
                    self._queues[index].pop(0)


class EmulatorDriver:
    """Takes the place of `allspan.kernels.cuda.jit.modules.driver()`; tensors are the CPU's. Compiled kernels are
    kept by `support.artefacts`. The GPU has few multiprocessors, so that small cases, too, are split over blocks."""

    def __init__(self, multiprocessors: int = 5, capability: tuple[int, int] = (8, 0)) -> None:
        self._gpu = Gpu(multiprocessors, shared_limit((9, 0)), capability)
        self._libraries: dict[Kernel, Any] = {}
        self._streams: Streams | None = None
        self.launched: list[Kernel] = []
        self.prepared: list[Kernel] = []
        self._turn = threading.Lock()
        """One kernel at a time: the emulator's state is that of a GPU."""

    def gpu(self, device: torch.device) -> Gpu:
        return self._gpu

    def prepare(self, kernels: Iterable[Kernel]) -> None:
        """Most of what an engine might launch is never launched in a test."""
        self.prepared += kernels

    def tensor_map(self, matrix: Matrix) -> bytes:
        sizes = (matrix.row_bytes, matrix.elements, matrix.rows, matrix.tile_elements, matrix.tile_rows)
        of_places = (matrix.place_bytes, max(1, matrix.places))
        return struct.pack("=QQ6IQI76x", matrix.address, *sizes, matrix.element_bytes, 0x5A5A, *of_places)

    def launch(
        self,
        kernel: Kernel,
        blocks: tuple[int, ...],
        threads: int,
        arguments: Sequence[Any],
        shared_bytes: int,
        is_early: bool = False,
    ) -> None:
        """A launch ends before the next begins, early or not."""
        if shared_bytes > self._gpu.shared_bytes or not 0 < threads <= 1024 or min(blocks) < 1:
            raise EmulatedFault(f"{kernel}: {blocks} blocks of {threads} threads, {shared_bytes} bytes each")
        if not Path(kernel.file).is_absolute() and _shape(kernel) not in _shapes(self._gpu.capability):
            raise EmulatedFault(f"{kernel} is not among the `kernel_variants` of its module in kernels/cuda: list it")
        self.launched.append(kernel)
        library = self._libraries.get(kernel) or self._compile(kernel)
        cells = [_cell(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(cells))(*(ctypes.addressof(cell) for cell in cells))
        pointers.cells = cells  # type: ignore[attr-defined]  # which live as long
        grid = (ctypes.c_uint * 3)(*blocks, *[1] * (3 - len(blocks)))
        call = (grid, threads, shared_bytes, pointers)
        if self._streams is not None:
            self._streams.add(kernel, library, call)
        else:
            with self._turn:
                error = library.emulated_launch(*call)
            if error:
                raise EmulatedFault(f"{kernel}: {error.decode()}")

    @contextmanager
    def streams(self, count: int, seed: int) -> Iterator[Streams]:
        """What is launched inside runs at the end of it, on as many GPUs. Tensors must live until then."""
        self._streams = streams = Streams(count)
        try:
            yield streams
        finally:
            self._streams = None
        streams.run(seed)

    def _compile(self, kernel: Kernel) -> Any:
        macros = "\n".join(f"#define {macro} {value}" for macro, value in kernel.defines)
        first = "#define FP16 1" if ("FP16", 1) in kernel.defines else ""  # the one that headers depend on
        # The path below FOLDER: the same in every checkout, so that one finds what another has compiled.
        text = _STUB.format(file=kernel.file, name=kernel.name, macros=macros, first=first)
        source = FOLDER / kernel.file

        def build(target: Path) -> None:
            parts = _prepared()
            folders = [f"-I{parts}", f"-I{HERE}", f"-I{FOLDER}"]
            words = [*_GXX, *folders, "-x", "c++", "-", "-x", "none", str(parts / "emulator.o"), "-o", str(target)]
            done = subprocess.run(words, input=text, capture_output=True, text=True)
            if done.returncode:
                raise EmulatedFault(f"{kernel} does not compile:\n{done.stderr[:4000]}")

        library = artefacts.entry("emulated", f"{kernel.name}-{_key(text, *_included(source))}.so", build)
        opened = ctypes.CDLL(str(library))
        call = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_ulong, ctypes.c_void_p]
        opened.emulated_launch.restype, opened.emulated_launch.argtypes = ctypes.c_char_p, call
        opened.emulated_begin.restype, opened.emulated_begin.argtypes = ctypes.c_void_p, call
        turn = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p]
        opened.emulated_turn.restype, opened.emulated_turn.argtypes = ctypes.c_char_p, turn
        self._libraries[kernel] = opened
        return opened


@functools.cache
def _prepared() -> Path:
    """A folder with what is the same for all kernels: emulator.o, and emulator.h as GCC has read it once."""

    def build(target: Path) -> None:
        headers = target / "emulator.h.gch"  # GCC takes the one whose macros fit
        headers.mkdir(parents=True)
        header, runtime = str(HERE / "emulator.h"), str(HERE / "emulator.cpp")
        _gxx("-x", "c++-header", header, "-o", str(headers / "bfloat16"))
        _gxx("-DFP16=1", "-x", "c++-header", header, "-o", str(headers / "half"))
        _gxx("-c", runtime, "-o", str(target / "emulator.o"))

    return artefacts.entry("emulator", _key(), build)


def _gxx(*words: str) -> None:
    options = [word for word in _GXX if word != "-shared"]
    subprocess.run([*options, f"-I{FOLDER}", *words], capture_output=True, check=True)


def _key(text: str = "", *sources: Path) -> str:
    """Changes with the compiler, the text that it is given, these sources and the emulator."""
    return artefacts.key(
        _GXX, _compiler_version(), text, *sources, *_included(HERE / "emulator.h"), HERE / "emulator.cpp"
    )


@functools.cache
def _compiler_version() -> str:
    return subprocess.run([_GXX[0], "--version"], capture_output=True, text=True, check=True).stdout


@functools.cache
def _included(source: Path) -> tuple[Path, ...]:
    """The source and the headers in kernels/cuda that it includes, directly or not."""
    found = [source]
    for path in found:  # grows meanwhile
        names = _INCLUDE.findall(path.read_text())
        named = [folder / name for name in names for folder in (FOLDER, path.parent)]
        found += [header for header in dict.fromkeys(named) if header.is_file() and header not in found]
    return tuple(found)


@functools.cache
def _shapes(capability: tuple[int, int]) -> frozenset[tuple[str, str, tuple[str, ...]]]:
    return frozenset(map(_shape, all_variants(capability)))


def _shape(kernel: Kernel) -> tuple[str, str, tuple[str, ...]]:
    """Tests may have other values of a macro, to make a case small."""
    return kernel.file, kernel.name, tuple(macro for macro, _ in kernel.defines)


def _cell(argument: Any) -> Any:
    """Memory that begins with the argument's bytes."""
    if argument is None:
        return ctypes.c_uint64(0)
    if isinstance(argument, torch.Tensor):
        return ctypes.c_uint64(argument.data_ptr())
    if isinstance(argument, bytes):
        return ctypes.create_string_buffer(argument, len(argument) + 8)
    return ctypes.c_uint64.from_buffer_copy(argument.tobytes().ljust(8, b"\0"))
