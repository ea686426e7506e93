"""The table of linear methods. A new scheme is one file beside this one and a row here."""

from __future__ import annotations

from collections.abc import Callable

import torch

from allspan.worker.quant.base import LinearMethod
from allspan.worker.quant.plain import Plain

METHODS: dict[str, Callable[[], LinearMethod]] = {
    "float32": lambda: Plain(torch.float32),
    "bfloat16": lambda: Plain(torch.bfloat16),
}
"""By the `dtype` that weights are held in."""
