"""What int8 and 4-bit pages keep of a token: how far off it may be, and what becomes of rows that no scale fits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from allspan.kernels.table import backends, op_set
from support.kernel_cases import I8, U4, Meta, ints, pages, poison, randn
from support.kernel_oracle import LOWEST_AND_HIGHEST, elements

pytestmark = [
    pytest.mark.parametrize("backend", backends()),
    pytest.mark.parametrize("dtype", [I8, U4], ids=["int8", "uint4"]),
]

DRIFT = {I8: 2 / 128, U4: 2 / 16}
"""Of the row's range, the most that an element may be off."""
STEPS = {dtype: high - low for dtype, (low, high) in LOWEST_AND_HIGHEST.items()}
NAN, INF = float("nan"), float("inf")


def kept(backend: str, dtype: torch.dtype, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of rows [n, d]: what they read as, float64 [n, d], the raw pages of one head, and [zero, scale] of each row."""
    n, dim = rows.shape
    cache = pages(1, 1, n, dim, dtype)
    op_set(backend).append_kv(rows[:, None].contiguous(), rows[:, None].contiguous(), *cache, ints(list(range(n))))
    k_cache, v_cache, k_scales, v_scales = cache
    assert torch.equal(k_cache, v_cache)
    torch.testing.assert_close(k_scales, v_scales, rtol=0, atol=0, equal_nan=True)
    return elements(k_cache, k_scales, dim)[0, 0], k_cache[0, 0], k_scales[0, 0].T


@pytest.mark.parametrize("dim", [1, 33, 64, 80, 256])
def test_no_element_drifts_beyond_the_bound(backend: str, dtype: torch.dtype, dim: int) -> None:
    rows = torch.cat([randn(40, dim, seed=1), randn(20, dim, seed=2) * 1e4, randn(20, dim, seed=3) * 0.02])
    rows[40:50, 0] = 3e5  # one element stands out
    read, _, scales = kept(backend, dtype, rows)
    spread = (rows.amax(1) - rows.amin(1)).double()
    off = (read - rows.double()).abs().amax(1)
    least = 0.51e-5  # half the least scale: a row of one element has no range
    assert (off <= DRIFT[dtype] * spread + least + 1e-6 * rows.abs().amax(1)).all()
    assert (off <= scales[:, 1].double() / 2 + 1e-6 * rows.abs().amax(1)).all()


def test_rows_far_from_zero_keep_their_range(backend: str, dtype: torch.dtype) -> None:
    """The zero lies where the row needs it, also outside the integers that an element can have."""
    rows = torch.stack([5 + randn(64) / 10, -700 + randn(64), 3 * torch.rand(64) + 1])
    read, _, _ = kept(backend, dtype, rows)
    spread = (rows.amax(1) - rows.amin(1)).double()
    assert ((read - rows.double()).abs().amax(1) <= 0.51 * spread / STEPS[dtype] + 1e-4).all()


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.5, 1e-3, 1e5, -1e20])
def test_a_row_of_one_value_reads_as_that_value(backend: str, dtype: torch.dtype, value: float) -> None:
    read, _, _ = kept(backend, dtype, torch.full((2, 33), value))
    torch.testing.assert_close(read, torch.full((2, 33), value, dtype=torch.float64), rtol=1e-6, atol=0)


def test_a_zero_is_read_as_zero_where_the_range_holds_it(backend: str, dtype: torch.dtype) -> None:
    rows = randn(20, 64)
    rows[:, 7] = 0
    read, _, scales = kept(backend, dtype, rows)
    assert (read[:, 7] == 0).all()
    assert (scales[:, 0] == scales[:, 0].round()).all()


def test_what_is_smaller_than_the_least_scale_is_off_by_half_of_it(backend: str, dtype: torch.dtype) -> None:
    rows = randn(4, 64) * 1e-7
    read, _, scales = kept(backend, dtype, rows)
    assert (scales[:, 1] == torch.tensor(1e-5)).all()
    assert ((read - rows.double()).abs() <= 0.5e-5).all()


def test_huge_elements_stay_finite(backend: str, dtype: torch.dtype) -> None:
    rows = randn(4, 64) * 1e37
    read, _, _ = kept(backend, dtype, rows)
    spread = (rows.amax(1) - rows.amin(1)).double()
    assert ((read - rows.double()).abs().amax(1) <= DRIFT[dtype] * spread).all()


@pytest.mark.parametrize("at", [0, 15, 32])
@pytest.mark.parametrize("odd", [NAN, INF, -INF])
def test_a_row_with_no_number_reads_as_nan_and_its_neighbours_as_they_are(
    backend: str, dtype: torch.dtype, odd: float, at: int
) -> None:
    rows = randn(3, 33)
    rows[1, at] = odd
    read, raw, scales = kept(backend, dtype, rows)
    assert read[1].isnan().all()
    assert (raw[1] == 0).all()
    assert scales[1, 0] == 0
    assert not read[::2].isnan().any()


def test_a_range_that_no_float_holds_reads_as_nan(backend: str, dtype: torch.dtype) -> None:
    rows = torch.full((2, 33), 3e38)
    rows[0, 4] = -3e38
    read, _, _ = kept(backend, dtype, rows)
    assert read.isnan().all()


def test_the_last_half_byte_of_an_odd_head_is_zero(backend: str, dtype: torch.dtype) -> None:
    _, raw, _ = kept(backend, dtype, randn(20, 33))
    if dtype is U4:
        assert raw.shape == (20, 17)
        assert (raw[:, -1] < 16).all()
        assert (raw >= 16).any()
    else:
        assert raw.shape == (20, 33)


def test_who_sees_a_row_of_nan_says_so_and_nobody_else(backend: str, dtype: torch.dtype) -> None:
    cache = pages(1, 1, 16, 8, dtype)
    k, v = randn(3, 1, 8), randn(3, 1, 8, seed=1)
    k[1, 0, 2] = NAN
    ops = op_set(backend)
    ops.append_kv(k, v, *cache, ints([0, 1, 2]))
    meta = Meta(ints([0, 3]), ints([0, 1]), ints([0]), ints([3]), ints([0]), 8**-0.5)
    out = poison(3, 1, 8)
    ops.attention(randn(3, 1, 8), *cache, None, meta, out)
    assert [bool(row.isnan().any()) for row in out] == [False, True, True]
