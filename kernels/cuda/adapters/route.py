"""The sort of a step's rows by their adapters, on a GPU: route.cu."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from allspan.kernels.cuda.jit.modules import Kernel, gpu, kernel, launch
from allspan.kernels.cuda.rows.arguments import check
from allspan.kernels.ops import Routing

LEAST_CAPABILITY = (7, 5)
"""See variants.py."""

_MOST_WARPS = 32


def route_adapters(adapters: Tensor, rows: Tensor | None, routing: Routing[Tensor]) -> None:
    """See `AdapterOps.route_adapters`. Behind the rows of the last place, slots has those that have none. Raises
    ValueError for what the kernel would read or write past, and for more places than its shared memory counts."""
    count, places = len(routing.places), routing.starts.shape[1] - 1
    check("adapters", adapters, [torch.int32], (len(adapters) if rows is not None else count,))
    if rows is not None:
        check("rows", rows, [torch.int32], (count,))
    check_routing(routing, count, places)
    if count == 0:
        routing.starts.zero_()
        return
    most = gpu(adapters.device).shared_bytes // (4 * (places + 1)) - 1
    if most < 1:
        raise ValueError(f"routing.starts: {places} adapter slots are more than a thread block of this GPU counts")
    warps = min(_MOST_WARPS, most, -(-count // 32))
    sizes = [np.int32(size) for size in (count, places)]
    written = routing.places, routing.weights, routing.slots, routing.starts
    arguments = (adapters, np.int32(len(adapters)), rows, *sizes, *written)
    launch(_kernel(), (1,), 32 * warps, arguments, 4 * (warps + 1) * (places + 1), is_early=True)


def check_routing(routing: Routing[Tensor], count: int, places: int) -> None:
    """Raises ValueError unless it has one choice for each of `count` rows among `places`."""
    for name, dtype in (("places", torch.int32), ("weights", torch.float32), ("slots", torch.int32)):
        check(f"routing.{name}", getattr(routing, name), [dtype], (count, 1))
    check("routing.starts", routing.starts, [torch.int32], (1, places + 1))


def kernel_variants(capability: tuple[int, int]) -> Iterator[Kernel]:
    yield _kernel()


def _kernel() -> Kernel:
    return kernel("adapters/route.cu", "route_adapters")
