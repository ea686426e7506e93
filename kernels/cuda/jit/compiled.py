"""Compiled kernels, kept for later processes: a file for each (source with what it includes, macros, compiler,
architecture) in $ALLSPAN_HOME/kernels, by default ~/.cache/allspan/kernels."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from allspan.kernels.cuda.jit.modules import FOLDER, Kernel
from allspan.kernels.cuda.jit.nvrtc import VERBOSE, Nvrtc, Usage, usage

logger = logging.getLogger(__name__)

OPTIONS = ("-std=c++17", VERBOSE)
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Cubin:
    """A compiled source."""

    path: Path
    seconds: float = 0.0
    """0 for one that was there."""
    usage: Mapping[str, Usage] = field(default_factory=dict)
    """Registers and spills of each kernel, by name; empty for a file that was there."""


def kernels_dir() -> Path:
    """Where compiled kernels lie; of a user without a home, the folder of temporary files."""
    try:
        home = Path(os.environ.get("ALLSPAN_HOME") or "~/.cache/allspan").expanduser()
    except RuntimeError:
        home = Path(tempfile.gettempdir(), f"allspan-{os.getuid()}")
    return home / "kernels"


def options(kernel: Kernel, architecture: str) -> tuple[str, ...]:
    """What the compiler is told."""
    return (
        *OPTIONS,
        f"--gpu-architecture={architecture}",
        f"-I{FOLDER}",
        *(f"-D{macro}={value}" for macro, value in kernel.defines),
    )


def compiled(kernel: Kernel, architecture: str, compiler: Nvrtc, folder: Path | None = None) -> Cubin:
    """The kernel's source for one architecture, compiled when it is not in `folder` (`kernels_dir()`) yet.

    All kernels of a source with the same macros share a file. Whole or not there: processes may compile the same at the
    same time. Where the folder cannot be written to, the file lies among temporary ones. Raises CompilationError.
    """
    cubin = _compiled(kernel, architecture, compiler, folder)
    if cubin.seconds:
        what, kept = label(kernel), cubin.path.parent
        logger.info("kernels: compiled %s for %s in %.1f s, kept in %s", what, architecture, cubin.seconds, kept)
    return cubin


def _compiled(kernel: Kernel, architecture: str, compiler: Nvrtc, folder: Path | None) -> Cubin:
    path = _path(kernel, architecture, compiler, folder)
    if path.is_file():
        return Cubin(path)
    begun = time.perf_counter()
    made = compiler.compile(_text(FOLDER / kernel.file), kernel.file, options(kernel, architecture))
    seconds = time.perf_counter() - begun
    try:
        _write(path, made.cubin)
    except OSError as error:
        path = Path(tempfile.mkdtemp(prefix="allspan-kernels-"), path.name)
        logger.warning("kernels: %s is not kept for later (%s); set ALLSPAN_HOME to a folder", path.name, error)
        _write(path, made.cubin)
    return Cubin(path, seconds, usage(made.log))


def compile_all(
    kernels: Iterable[Kernel], architecture: str, compiler: Nvrtc, folder: Path | None = None
) -> Iterator[tuple[Kernel, Cubin]]:
    """Compiles each kernel as `compiled` does, one at a time on each processor, and yields them as they are done.
    Raises CompilationError."""
    sources = _sources_of(kernels)
    with ThreadPoolExecutor(_processors()) as pool:
        try:
            cubins = pool.map(lambda kernel: _compiled(kernel, architecture, compiler, folder), sources)
            yield from zip(sources, cubins, strict=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def compile_missing(
    kernels: Iterable[Kernel], architecture: str, compiler: Nvrtc, folder: Path | None = None
) -> list[Cubin]:
    """`compile_all` of those that are not in `folder` yet; a line says so first. Raises CompilationError."""
    missing = [kernel for kernel in _sources_of(kernels) if not _path(kernel, architecture, compiler, folder).is_file()]
    if missing:
        logger.info(
            "kernels: compiling %d for %s, %d at a time; they are kept in %s",
            len(missing),
            architecture,
            _processors(),
            folder or kernels_dir(),
        )
    return [cubin for _, cubin in compile_all(missing, architecture, compiler, folder)]


def label(kernel: Kernel) -> str:
    """`decode.cu (HEAD_DIM=128 …)`."""
    macros = " ".join(f"{macro}={value}" for macro, value in kernel.defines)
    return f"{kernel.file} ({macros})" if macros else kernel.file


def _sources_of(kernels: Iterable[Kernel]) -> list[Kernel]:
    """One kernel of each source with its macros."""
    return list({(kernel.file, kernel.defines): kernel for kernel in kernels}.values())


def _processors() -> int:
    return len(os.sched_getaffinity(0))


def _path(kernel: Kernel, architecture: str, compiler: Nvrtc, folder: Path | None) -> Path:
    stem = f"{Path(kernel.file).stem}-{architecture}-{_key(kernel, architecture, compiler)}"
    return (folder or kernels_dir()) / f"{stem}.cubin"


def _key(kernel: Kernel, architecture: str, compiler: Nvrtc) -> str:
    parts = (OPTIONS, kernel.defines, architecture, compiler.version, _sources(FOLDER / kernel.file))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _sources(path: Path) -> tuple[str, ...]:
    """The text of a file and of what it includes, each once."""
    seen: dict[Path, str] = {}
    waiting = [path]
    while waiting:
        if (path := waiting.pop()) not in seen:
            seen[path] = _text(path)
            waiting += (FOLDER / name for name in _INCLUDE.findall(seen[path]))
    return tuple(seen.values())


@cache
def _text(path: Path) -> str:
    """Returns a file as it was first read: a kernel is what its hash says although the file is edited meanwhile."""
    return path.read_text(encoding="utf-8")


def _write(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all; its content is on the disk before it has its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise
