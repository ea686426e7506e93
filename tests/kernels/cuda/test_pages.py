"""What the CUDA attention kernels would read or write past is refused before a launch; this needs no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from allspan.kernels.cuda.cache.pages import PageTable, check_rows, kv_of


def arguments() -> dict[str, Any]:
    q, pages = torch.zeros(1, 4, 128, dtype=torch.bfloat16), torch.zeros(3, 2, 16, 128, dtype=torch.bfloat16)
    table = PageTable(*(torch.zeros(count, dtype=torch.int32) for count in (2, 1, 1)))
    return {"q": q, "cache": (pages, pages.clone()), "table": table, "out": q.clone(), "lse": torch.zeros(1, 4)}


def check(q: torch.Tensor, cache: Any, table: PageTable, out: torch.Tensor, lse: torch.Tensor) -> None:
    check_rows(q, kv_of(cache, q.shape[2]).heads, table, out, lse)


def table_with(**tensors: torch.Tensor) -> Callable[[dict[str, Any]], PageTable]:
    def spoil(good: dict[str, Any]) -> PageTable:
        table = good["table"]
        return PageTable(**{name: tensors.get(name, getattr(table, name)) for name in PageTable.__slots__})

    return spoil


SPOILT: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "head_dim 100": ("q", lambda good: good["q"][..., :100].contiguous()),
    "need zeros and scales": ("cache", lambda good: tuple(pages.to(torch.int8) for pages in good["cache"])),
    "bfloat16 pages have no scales": ("cache", lambda good: (*good["cache"], torch.zeros(3), torch.zeros(3))),
    "float64 and torch.float64 are not one of": ("cache", lambda good: tuple(x.double() for x in good["cache"])),
    "scales torch.float32": (
        "cache",
        lambda good: (*(x.to(torch.int8) for x in good["cache"]), *(torch.zeros(3, 2, 2, 8) for _ in range(2))),
    ),
    "multiples of 16 bytes": (
        "cache",
        lambda good: tuple(
            torch.zeros(999999).bfloat16().as_strided(x.shape, (4100, 2050, 128, 1)) for x in good["cache"]
        ),
    ),
    "3 heads are no multiple": ("out", lambda good: good["out"][:, :3].contiguous()),
    "does not hold 4 heads": ("q", lambda good: good["q"][:, :3].contiguous()),
    "table.rows": ("table", table_with(rows=torch.zeros(2, dtype=torch.int32))),
    "first_heads": ("table", table_with(first_heads=torch.zeros(2, dtype=torch.int32))),
    "float32 is not": ("q", lambda good: good["q"].float()),
    "page size 12": ("cache", lambda good: tuple(pages[:, :, :12] for pages in good["cache"])),
    "cache: keys": ("cache", lambda good: (good["cache"][0], good["cache"][1].transpose(0, 1))),
    "out: torch.float32": ("out", lambda good: good["out"].float()),
    "lse: torch.float64": ("lse", lambda good: good["lse"].double()),
    "table.indptr: torch.int64": ("table", table_with(indptr=torch.zeros(2, dtype=torch.int64))),
    "table: indptr of 5": ("table", table_with(indptr=torch.zeros(5, dtype=torch.int32))),
}


def test_what_fits_is_taken() -> None:
    check(**arguments())


@pytest.mark.parametrize("message", SPOILT)
def test_what_does_not_fit_is_refused(message: str) -> None:
    good = arguments()
    name, spoil = SPOILT[message]
    with pytest.raises(ValueError, match=message):
        check(**(good | {name: spoil(good)}))
