"""Every kernel with every set of macros: what `allspan warm` compiles, and the tests.

A module of this folder that launches kernels has `kernel_variants(capability) -> Iterable[Kernel]`: those that it may
launch on a GPU of this compute capability, but for rare values of the same macros (an uncommon head size), which are
compiled when they come. It may have LEAST_CAPABILITY, below which it launches none.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from functools import cache

from allspan.kernels.cuda.jit.modules import FOLDER, Kernel

LEAST_CAPABILITY = (8, 0)
"""The least compute capability of modules that name no other: mma.sync with bfloat16, cp.async. Below it there are only
kernels of half precision and of no 16-bit elements."""


@cache
def all_variants(capability: tuple[int, int]) -> tuple[Kernel, ...]:
    """In order of the modules' names, each kernel once."""
    here = "allspan.kernels.cuda."
    modules = [info.name.removeprefix(here) for info in pkgutil.walk_packages([str(FOLDER)], here) if not info.ispkg]
    return variants_of(modules, capability)


def variants_of(modules: Iterable[str], capability: tuple[int, int]) -> tuple[Kernel, ...]:
    """Returns the kernels of some modules ("cache.move_pages"), each once."""
    found: dict[Kernel, None] = {}
    for name in modules:
        module = importlib.import_module(f"allspan.kernels.cuda.{name}")
        if capability >= getattr(module, "LEAST_CAPABILITY", LEAST_CAPABILITY) and hasattr(module, "kernel_variants"):
            kernels = tuple(module.kernel_variants(capability))
            halves = tuple(kernel for kernel in kernels if ("FP16", 1) in kernel.defines)
            found |= dict.fromkeys(halves or kernels if capability < LEAST_CAPABILITY else kernels)
    return tuple(found)
