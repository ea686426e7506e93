"""The table of linear methods. A new scheme is one file beside this one and a row here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from allspan.protos.api.errors import ConfigError
from allspan.worker.quant.fp8 import GROUPS, Fp8
from allspan.worker.quant.gguf import Gguf
from allspan.worker.quant.instant import SCHEMES, InstantQuant
from allspan.worker.quant.packed import PackedMethod
from allspan.worker.quant.plain import Plain
from allspan.worker.quant.stored import Stored

STORED = ("gptq", "awq", "compressed-tensors", "mxfp4")
"""Methods for checkpoints that are quantised so, and no others."""

MakeMethod = Callable[[torch.dtype, int], PackedMethod]
"""From the dtype that weights are otherwise held in, and the inputs that share a scale (0: the method's own)."""


def group_of(name: str, group: int) -> int:
    """The inputs that share a scale, 0 made definite (it stays 0 for methods without a choice)."""
    return group or (_GROUPS[name][0] if name in _GROUPS else 0)


_GROUPS = {name: scheme.groups for name, scheme in SCHEMES.items()} | {"fp8": GROUPS}


def _without_group(name: str, make: Callable[[torch.dtype], PackedMethod]) -> MakeMethod:
    def method(dtype: torch.dtype, group: int) -> PackedMethod:
        if group:
            raise ConfigError(
                f"quantization_group {group} does not go with quantization {name!r}: leave it out, or use "
                f"{', '.join(_GROUPS)}"
            )
        return make(dtype)

    return method


def _grouped(
    name: str, make: Callable[[int, torch.dtype], PackedMethod], dtype: torch.dtype, group: int
) -> PackedMethod:
    if group and group not in _GROUPS[name]:
        allowed = ", ".join(f"{each}" for each in sorted(_GROUPS[name]))
        raise ConfigError(
            f"quantization_group {group} does not go with quantization {name!r}, which takes {allowed} (-1: all inputs)"
        )
    return make(group_of(name, group), dtype)


METHODS: dict[str, MakeMethod] = {
    "none": _without_group("none", Plain),
    **{name: partial(_grouped, name, partial(InstantQuant, scheme)) for name, scheme in SCHEMES.items()},
    "fp8": partial(_grouped, "fp8", Fp8),
    "gguf": _without_group("gguf", Gguf),
    **{name: _without_group(name, Stored) for name in STORED},
    "mxfp4": _without_group("mxfp4", Gguf),
}
"""`quantization` → its method."""

ROWS_ONLY = frozenset({"fp8"})
"""Methods for GPUs alone."""

OWN = frozenset({*STORED, "fp8", "gguf"})
"""Methods that hold what a checkpoint has in its own types."""

COMPACT = frozenset(METHODS) - {"none"}
"""Methods with which dtype "auto" is bfloat16, whatever the checkpoint's: the rest should not outweigh them."""
