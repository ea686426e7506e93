"""Cases of the ops of low-rank adapters, for every backend, and what is right in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from allspan.kernels.adapter_layout import COLUMNS, panels_of, put_rows, rows_of
from allspan.kernels.adapter_ops import AdapterWeights
from allspan.kernels.ops import Routing

PLACES = 4
PARTS = [((40,), 8), ((70, 16, 129), 16), ((33, 33), 17), ((0, 48), 1)]
"""The columns of each part, and the rank that there is room for."""
ROWS = [1, 2, 33, 300]
ROUTED = [
    ([2, -1, 0, 7, 2, -5, 0], None, [2, -1, 0, -1, 2, -1, 0], [0, 2, 2, 4, 4], [2, 6, 0, 4]),
    ([3, -1, 1, 1], [3, 0, 1], [1, 3, -1], [0, 0, 1, 1, 2], [0, 1]),
]
"""Adapters of tokens, rows, and the places, starts and first slots of their routing."""


def empty_routing(rows: int, device: str = "cpu", places: int = PLACES) -> Routing[Tensor]:
    """Filled with what no op may leave there."""
    integers = [torch.full((rows, 1), -9, dtype=torch.int32, device=device) for _ in range(2)]
    starts = torch.full((1, places + 1), -9, dtype=torch.int32, device=device)
    return Routing(integers[0], torch.full((rows, 1), -9.0, device=device), integers[1], starts)


def of_rows(count: int, seed: int = 0, places: int = PLACES) -> Tensor:
    """A slot for each row, or none."""
    return torch.randint(-1, places, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def weights_of(parts: tuple[int, ...], rank: int, dtype: torch.dtype) -> AdapterWeights[Tensor]:
    """Adapters of lower ranks, too, behind which there is what must not be read."""
    generator = torch.Generator().manual_seed(rank)
    panels = torch.zeros(PLACES, panels_of(parts), rank, COLUMNS, dtype=dtype)
    ranks = torch.randint(0, rank + 1, (PLACES, len(parts)), generator=generator, dtype=torch.int32)
    for place in range(PLACES):
        for part, outputs in enumerate(parts):
            own = int(ranks[place, part])
            put_rows(torch.randn(outputs, own, generator=generator).to(dtype), parts, part, panels[place])
            first = panels_of(parts[:part])
            panels[place, first : first + panels_of([outputs]), own:] = torch.nan
    return AdapterWeights(panels, ranks, torch.tensor(parts, dtype=torch.int32).cumsum(0).int())


EMBEDDED = [([3, 9, 12, 4, 8, 3, 9], [0, 1, 2, -1, 3, 9, 1], 4), ([0], [1], 0), ([5], [-1], 0)]
"""Ids of tokens, their adapters, and the first of this rank's ids."""


def embedded(ids: list[int], adapters: list[int], weight: Tensor, first: int) -> Tensor:
    """What is right of `embed_adapters`."""
    rows = torch.zeros(len(ids), weight.shape[2])
    for row, (token, place) in enumerate(zip(ids, adapters, strict=True)):
        if 0 <= place < len(weight) and 0 <= token - first < weight.shape[1]:
            rows[row] = weight[place, token - first].float()
    return rows


def low_of(rows: int, weights: AdapterWeights[Tensor], adapters: Tensor) -> Tensor:
    """The x of `add_adapters`; behind an adapter's rank there is what must not be read."""
    parts, rank = weights.ranks.shape[1], weights.panels.shape[2]
    x = torch.randn(rows, parts, rank, generator=torch.Generator().manual_seed(rows))
    ranks = weights.ranks[adapters.clamp(min=0).long()]
    x[torch.arange(rank) >= ranks[:, :, None]] = torch.nan
    return x.view(rows, -1)


def added(x: Tensor, weights: AdapterWeights[Tensor], adapters: Tensor, before: Tensor) -> Tensor:
    """What `add_adapters` makes of `before`, in float64."""
    ends, rank = weights.ends.tolist(), weights.panels.shape[2]
    parts = [end - begin for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    found = before.double()
    for row, place in enumerate(adapters.tolist()):
        if not 0 <= place < PLACES:
            continue
        for part, end in enumerate(ends):
            own = int(weights.ranks[place, part])
            matrix = rows_of(weights.panels[place], parts, part)[:, :own].double()
            found[row, end - parts[part] : end] += matrix @ x[row, part * rank : part * rank + own].double()
    return found
