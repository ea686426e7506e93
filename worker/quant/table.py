"""The table of linear methods. A new scheme is one file beside this one and a row here."""

from __future__ import annotations

from collections.abc import Callable

import torch

from allspan.worker.quant.base import LinearMethod
from allspan.worker.quant.plain import Plain

METHODS: dict[str, Callable[[torch.dtype], LinearMethod]] = {"none": Plain}
"""`quantization` → its method, made for the dtype that weights are otherwise held in."""
