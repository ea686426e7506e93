"""The table of linear methods. A new scheme is one file beside this one and a row here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from allspan.protos.errors import ConfigError
from allspan.worker.quant.base import LinearMethod
from allspan.worker.quant.fp8 import Fp8
from allspan.worker.quant.gguf import Gguf
from allspan.worker.quant.instant import SCHEMES, InstantQuant
from allspan.worker.quant.plain import Plain

MakeMethod = Callable[[torch.dtype, int], LinearMethod]
"""From the dtype that weights are otherwise held in, and the inputs that share a scale (0: the method's own)."""


def group_of(name: str, group: int) -> int:
    """The inputs that share a scale, 0 made definite (it stays 0 for methods without a choice)."""
    return group or (SCHEMES[name].groups[0] if name in SCHEMES else 0)


def _without_group(name: str, make: Callable[[torch.dtype], LinearMethod]) -> MakeMethod:
    def method(dtype: torch.dtype, group: int) -> LinearMethod:
        if group:
            raise ConfigError(
                f"quantization_group {group} does not go with quantization {name!r}: leave it out, or use "
                f"{', '.join(scheme for scheme, what in SCHEMES.items() if len(what.groups) > 1)}"
            )
        return make(dtype)

    return method


def _instant(name: str, dtype: torch.dtype, group: int) -> LinearMethod:
    scheme = SCHEMES[name]
    if group and group not in scheme.groups:
        allowed = ", ".join(f"{each}" for each in sorted(scheme.groups))
        raise ConfigError(
            f"quantization_group {group} does not go with quantization {name!r}, which takes {allowed} (-1: all inputs)"
        )
    return InstantQuant(scheme, group_of(name, group), dtype)


METHODS: dict[str, MakeMethod] = {
    "none": _without_group("none", Plain),
    **{name: partial(_instant, name) for name in SCHEMES},
    "fp8": _without_group("fp8", Fp8),
    "gguf": _without_group("gguf", Gguf),
}
"""`quantization` → its method."""

ROWS_ONLY = frozenset({"fp8"})
"""Methods for GPUs alone."""

COMPACT = frozenset({*SCHEMES, *ROWS_ONLY, "gguf"})
"""Methods with which dtype "auto" is bfloat16, whatever the checkpoint's: the rest should not outweigh them."""
