"""Columns gathered: every one is where its number says, and nothing else is written."""

from __future__ import annotations

import pytest
import torch

from allspan.kernels.cuda.rows.gather_columns import gather_columns
from support.cuda_rows import is_kept, poisoned, rows


def check(n: int, from_width: int, width: int, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
    x = rows(n, from_width, dtype=dtype)
    columns = torch.randint(0, from_width, (width,), generator=torch.Generator().manual_seed(n), dtype=torch.int32)
    out = poisoned(n, width, dtype=dtype, device=device)
    gather_columns(x.to(device), columns.to(device), out)
    assert torch.equal(out.cpu(), x[:, columns])
    assert is_kept(out)


def test_columns_are_gathered(device: str) -> None:
    check(3, 300, 304, device)
    check(2, 70, 2051, device)
    check(1, 5, 3, device, torch.float16)
    check(0, 8, 8, device)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 7, 64, 512])
@pytest.mark.parametrize("width", [1, 8, 2048, 3584, 18944])
def test_columns_of_real_layers_are_gathered(n: int, width: int) -> None:
    check(n, width, width, "cuda")


def test_what_does_not_fit_is_refused(device: str) -> None:
    x, out, columns = rows(2, 16, device=device), poisoned(2, 8, device=device), torch.zeros(8, dtype=torch.int32)
    for wrong in ((x.float(), columns, out), (x, columns.long(), out), (x, columns[:7], out), (x[:1], columns, out)):
        with pytest.raises(ValueError, match="is not contiguous"):
            gather_columns(*wrong)
