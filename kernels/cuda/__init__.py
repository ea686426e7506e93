"""Kernels in CUDA C++, compiled at first use for the GPU at hand; a folder for each group of ops.

`allspan.kernels.library` offers them under FlashInfer's names. Those names can also be read from here, as they could
before that package existed.
"""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module("allspan.kernels.library"), name)


def __dir__() -> list[str]:
    return dir(importlib.import_module("allspan.kernels.library"))
