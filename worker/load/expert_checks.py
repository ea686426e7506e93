"""What the kernels of a device ask of experts, said before weights are read."""

from __future__ import annotations

import torch

from allspan.protos.api.errors import ConfigError
from allspan.worker.models.blocks.moe import Moe
from allspan.worker.models.holding import Holding
from allspan.worker.models.pieces import Linear

_BYTES = 16
"""What the kernels of a GPU load at once: every expert's weight begins at a multiple of it."""


_ROUTERS = {"experts": 512, "choices of a token": 64, "groups of experts": 32}
"""The most that the router's kernel of a GPU takes."""


def check_router(holding: Holding) -> None:
    """Raises ConfigError for routers that the kernel of a GPU does not take."""
    for number, layer in enumerate(holding.spec.layers if holding.memory == "rows" else ()):
        if not isinstance(layer.mlp, Moe):
            continue
        router = layer.mlp.router
        counts = (layer.mlp.num_experts, router.top_k, router.groups)
        for (name, most), count in zip(_ROUTERS.items(), counts, strict=True):
            if count > most:
                raise ConfigError(
                    f"layer {number} has {count} {name}, must be at most {most} on GPUs: use --device cpu, or --dtype "
                    "float32"
                )


def check_expert_bytes(holding: Holding) -> None:
    """Raises ConfigError for experts whose weights in rows the kernels of a GPU cannot load."""
    if holding.memory != "rows":
        return
    for piece in holding.pieces:
        if not isinstance(piece, Linear) or piece.experts is None:
            continue
        for name, tensor in holding.tensors(piece).items():
            places, rows, row_bytes = tensor.shape if tensor.dtype is torch.uint8 else (0, 0, 0)
            if places > 1 and rows * row_bytes % _BYTES:
                raise ConfigError(
                    f"{name}: on rank {holding.shard.rank} of {holding.shard.size} an expert has {rows} rows of "
                    f"{row_bytes} bytes, which together must be a multiple of {_BYTES} on GPUs: use another number of "
                    "--ranks, --enable-expert-parallel, or --quantization none"
                )
