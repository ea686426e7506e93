"""NVIDIA's run-time compiler, called as a library: it needs no GPU, no driver and no CUDA headers.

CuPy has it too, but adds an architecture flag of its own: kernels for sm_90a (wgmma) cannot be built through it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from allspan.kernels.errors import BackendUnavailable

MAJORS = (13, 12)
"""CUDA versions whose compiler will do, best first."""
VERBOSE = "--ptxas-options=-v"
MOST_LOG_LINES = 20


class CompilationError(RuntimeError):
    """A source that the compiler does not take; the message begins with its log."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """What one architecture runs, and what the compiler said: warnings, registers and spills of each kernel."""

    cubin: bytes
    log: str


class Nvrtc:
    """A loaded library. Threads may compile beside each other."""

    def __init__(self, path: Path | str) -> None:
        """Raises OSError for what cannot be loaded."""
        for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so*")):
            ctypes.CDLL(str(builtins))  # it looks for them by name, and wheels lie outside of the linker's folders
        self._library = ctypes.CDLL(str(path))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        self.path = str(path)
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)

    def architectures(self) -> tuple[str, ...]:
        """("sm_75", "sm_80", …); of those from sm_90 on there is one more, with an "a" behind."""
        count = ctypes.c_int()
        self._check("count architectures", self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        found = (ctypes.c_int * count.value)()
        self._check("list architectures", self._library.nvrtcGetSupportedArchs(found))
        return tuple(f"sm_{number}" for number in found)

    def compile(self, source: str, name: str, options: Sequence[str]) -> Compiled:
        """`name` is what messages call the source. Raises CompilationError."""
        program = ctypes.c_void_p()
        made = self._library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
        self._check(f"begin {name}", made)
        try:
            words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            result = self._library.nvrtcCompileProgram(program, len(options), words)
            log = self._read(program, "ProgramLog").rstrip(b"\0\n").decode(errors="replace")
            if result:
                lines = [line for line in log.splitlines() if line.strip()][:MOST_LOG_LINES]
                raise CompilationError("\n".join([self._why(f"compile {name} {' '.join(options)}", result), *lines]))
            return Compiled(self._read(program, "CUBIN"), log)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(f"read {what}", getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(f"read {what}", getattr(self._library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def _check(self, what: str, result: int) -> None:
        if result:
            raise CompilationError(self._why(what, result))

    def _why(self, what: str, result: int) -> str:
        error: bytes = self._library.nvrtcGetErrorString(result)
        return f"NVRTC {self.version[0]}.{self.version[1]} cannot {what}: {error.decode()}"


@cache
def nvrtc(major: int | None = None) -> Nvrtc:
    """Opens the compiler of this CUDA version, else of another: of NVIDIA's packages, of the linker's folders, or of
    $CUDA_PATH (/usr/local/cuda). A driver takes what compilers of its own version and older ones make.

    Raises BackendUnavailable where there is none.
    """
    wanted = sorted(MAJORS, key=lambda known: known != major)
    for path in (path for known in wanted for path in _candidates(known)):
        try:
            return Nvrtc(path)
        except OSError:
            continue
    raise BackendUnavailable("there is no NVRTC, CUDA's compiler; pip install '.[cuda13]' in the checkout (or cuda12)")


def _candidates(major: int) -> Iterator[Path | str]:
    name = f"libnvrtc.so.{major}"
    packages = importlib.util.find_spec("nvidia")
    for folder in (packages.submodule_search_locations or ()) if packages else ():
        yield from sorted(Path(folder).glob(f"*/lib/{name}"))
    yield name
    yield Path(os.environ.get("CUDA_PATH", "/usr/local/cuda"), "lib64", name)


_ENTRY = re.compile(r"Compiling entry function '(?P<name>\w+)'")
_SPILLS = re.compile(r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads")
_USED = re.compile(r"Used (?P<registers>\d+) registers")


@dataclass(frozen=True, slots=True)
class Usage:
    """What a thread of a kernel uses."""

    registers: int
    spilled_bytes: int


def usage(log: str) -> dict[str, Usage]:
    """Returns the usage of each kernel, with what it calls, from a log that was made with VERBOSE."""
    found: dict[str, Usage] = {}
    name, spilled = "", 0
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            name, spilled = entry["name"], 0
        elif spills := _SPILLS.search(line):
            spilled += int(spills["stores"])
        elif (used := _USED.search(line)) and name:
            found[name] = Usage(int(used["registers"]), spilled)
    return found


def architecture(capability: tuple[int, int]) -> str:
    """What kernels are compiled for on such a GPU: with its own instructions (wgmma, tcgen05) where it has some."""
    major, minor = capability
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def loaded_major() -> int | None:
    """The CUDA version that torch was built for, which the driver is known to take."""
    version: Any = torch.version.cuda
    return int(version.split(".")[0]) if version else None
