"""Opens the CPU backend: finds the compiled module, chooses the instruction set, starts the threads."""

from __future__ import annotations

import hashlib
import importlib
import os
from pathlib import Path
from typing import Any

from allspan.kernels.errors import BackendUnavailable, StaleModule

_MODULE = "allspan.kernels.cpu._native"


def variants() -> tuple[str, ...]:
    """Instruction sets that this CPU and its operating system can run, best first; empty if not compiled."""
    try:
        native = _native()
    except BackendUnavailable:
        return ()
    return tuple(native.variants())


def open_runtime(variant: str | None, threads: int, cpus: tuple[int, ...]) -> tuple[str, Any]:
    """(variant, runtime that the ops take first). `ALLSPAN_ISA` forces a variant where the caller names none.

    Raises BackendUnavailable for a variant that cannot run here, and ValueError for one that is forced: nothing else
    may stand in for it. Raises StaleModule for a module that was compiled from other bindings than those here.
    """
    native = _native()
    _check_interface(native, Path(__file__).parent)
    runnable = tuple(native.variants())
    forced = None if variant else os.environ.get("ALLSPAN_ISA")
    if forced and forced not in runnable:
        raise ValueError(f"ALLSPAN_ISA: {forced!r} cannot run here (this CPU runs {', '.join(runnable)}); or unset it")
    chosen = variant or forced or runnable[0]
    if chosen not in runnable:
        raise BackendUnavailable(f"backend: {chosen!r} cannot run here (this CPU runs {', '.join(runnable)})")
    if cpus and len(cpus) != threads:
        raise ValueError(f"cpus: {len(cpus)} given for {threads} threads (one each, or none)")
    return chosen, native.Runtime(chosen, threads, list(cpus))


def _native() -> Any:
    try:
        return importlib.import_module(_MODULE)
    except ImportError as error:
        raise BackendUnavailable(
            f"the compiled kernels are not installed: {error}; install a C++ compiler and install allspan again"
        ) from error


def _check_interface(native: Any, folder: Path) -> None:
    """Raises StaleModule when the bindings' sources lie in `folder`, as in a checkout, and the module is not theirs: an
    argument that it does not know would be passed over. A wheel has no sources; nothing is compared there."""
    if not (folder / "bindings").is_dir():
        return
    files = sorted(file for file in (folder / "bindings").iterdir() if file.suffix in (".cpp", ".h"))
    hashes = [hashlib.sha256(file.read_bytes()).hexdigest() for file in (folder / "kernels.h", *files)]
    expected = hashlib.sha256("".join(hashes).encode()).hexdigest()
    compiled = getattr(native, "interface", "none")
    if compiled != expected:
        raise StaleModule(
            f"{native.__file__} was compiled from other bindings (interface {compiled[:12]}) than those in {folder} "
            f"({expected[:12]}): compile it again with `pip install .` in the checkout, or with the cmake lines of "
            "CONTRIBUTING.md"
        )
