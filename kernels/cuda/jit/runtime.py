"""Whether the CUDA kernels run here."""

from __future__ import annotations

from typing import Any

import torch

from allspan.kernels.cuda.jit import modules
from allspan.kernels.errors import BackendUnavailable


def variants() -> tuple[str, ...]:
    """The architecture of the GPU that torch would use, as in "sm90"; empty where there is none."""
    if not torch.cuda.is_available():
        return ()
    try:
        modules.driver()
    except BackendUnavailable:
        return ()
    return (_architecture(),)


def open_runtime(variant: str | None, threads: int, cpus: tuple[int, ...]) -> tuple[str, Any]:
    """The kernels need no runtime: they take torch's stream. Raises BackendUnavailable without CuPy, ValueError for
    another GPU's variant. From then on, cuBLAS adds up halves in float32 alone, in all of this process."""
    modules.driver()
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    name = _architecture()
    if variant not in (None, name):
        raise ValueError(f"backend: cuda/{variant} is not the GPU here (cuda/{name})")
    return name, None


def _architecture() -> str:
    if not torch.cuda.is_available():
        return "emulated"  # whoever puts a driver in place of CuPy's brings no GPU
    major, minor = torch.cuda.get_device_capability()
    return f"sm{major}{minor}"
