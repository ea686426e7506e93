"""Every kernel with every set of macros: what `allspan warm` compiles, and the tests.

A module of this folder that launches kernels has `kernel_variants(capability) -> Iterable[Kernel]`: those that it may
launch on a GPU of this compute capability, but for rare values of the same macros (an uncommon head size), which are
compiled when they come. It may have LEAST_CAPABILITY, below which it launches none.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from functools import cache
from types import ModuleType

from allspan.kernels.cuda.jit.modules import Kernel

LEAST_CAPABILITY = (8, 0)
"""The least compute capability of modules that name no other: mma.sync with bfloat16, cp.async. Below it there are only
kernels of half precision and of no 16-bit elements."""


@cache
def all_variants(capability: tuple[int, int]) -> tuple[Kernel, ...]:
    """Returns every kernel, in order of the modules' names, each once."""
    return variants_of(importlib.import_module("allspan.kernels.cuda"), capability=capability)


def variants_of(*parts: ModuleType, capability: tuple[int, int]) -> tuple[Kernel, ...]:
    """Returns the kernels of some modules, and of all modules in some packages, each once."""
    found: dict[Kernel, None] = {}
    for module in (module for part in parts for module in _modules(part)):
        if capability >= getattr(module, "LEAST_CAPABILITY", LEAST_CAPABILITY) and hasattr(module, "kernel_variants"):
            kernels = tuple(module.kernel_variants(capability))
            halves = tuple(kernel for kernel in kernels if ("FP16", 1) in kernel.defines)
            found |= dict.fromkeys(halves or kernels if capability < LEAST_CAPABILITY else kernels)
    return tuple(found)


def _modules(part: ModuleType) -> Iterator[ModuleType]:
    """Yields a module, or the modules of a package and of the packages within it."""
    if not hasattr(part, "__path__"):
        yield part
        return
    for info in pkgutil.walk_packages(part.__path__, f"{part.__name__}."):
        if not info.ispkg:
            yield importlib.import_module(info.name)
