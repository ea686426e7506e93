"""Activations in 8 bits: what they read as is as near to float64 as their type allows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from allspan.kernels.library.quantised_rows import (
    add_rms_norm_quantised,
    quantise_rows,
    rms_norm_quantised,
    silu_mul_quantised,
)
from support import kernel_oracle
from support.cuda_rows import BF16, F16, F32, is_kept, poisoned, rows

I8, E4M3 = torch.int8, torch.float8_e4m3fn
MOST = {I8: 127.0, E4M3: 448.0}
EPS = 1e-6
LARGE = [(1, 896), (1, 4096), (7, 3584), (64, 8192), (513, 5120), (2, 18944), (3, 1), (4, 65), (0, 64), (2, 40000)]


def buffers(size: tuple[int, int], dtype: torch.dtype, is_grouped: bool, device: str) -> tuple[Tensor, Tensor]:
    n, width = size
    groups = -(-width // 128)
    out = poisoned(n, width, dtype=dtype, device=device)
    scales = torch.full((groups, n), math.nan, device=device).t() if is_grouped else torch.full((n,), math.nan)
    return out, scales.to(device)


def by_group(x: Tensor, is_grouped: bool) -> Tensor:
    """[n, groups, elements], filled up with zeros."""
    if not is_grouped:
        return x[:, None]
    return torch.nn.functional.pad(x, (0, -x.shape[1] % 128)).unflatten(1, (-1, 128))


def reads_as(out: Tensor, scales: Tensor, right: Tensor) -> None:
    """Every element is within half a step; the largest is the type's largest."""
    if out.numel() == 0:
        return
    is_grouped = scales.ndim == 2
    codes, right = by_group(out.double(), is_grouped), by_group(right, is_grouped)
    scale = scales.double().reshape(len(out), -1, 1)
    top = right.abs().amax(-1, keepdim=True)
    torch.testing.assert_close(scale, top / MOST[out.dtype], rtol=1e-4, atol=1e-30)
    step = scale if out.dtype is I8 else torch.maximum(right.abs() / 8, scale * 2.0**-9)
    assert ((codes * scale - right).abs() <= step * 0.501 + right.abs() * 1e-4).all()
    assert (codes.abs().amax(-1) == MOST[out.dtype]).all()
    assert is_kept(out)


To = tuple[torch.dtype, bool]
"""The type, and whether scales are for groups."""


def check_norm(size: tuple[int, int], stream: torch.dtype, to: To, device: str) -> None:
    x, weight = rows(*size, dtype=stream, device=device), rows(size[1], dtype=F32, device=device, seed=1)
    right = torch.empty(size, dtype=torch.float64, device=device)
    kernel_oracle.rms_norm(x.double(), weight.double(), EPS, right)
    out, scales = buffers(size, *to, device)
    rms_norm_quantised(x, weight, EPS, out, scales)
    reads_as(out, scales, right)


def check_add_norm(size: tuple[int, int], stream: torch.dtype, to: To, device: str, of: torch.dtype = BF16) -> None:
    residual, weight = rows(*size, dtype=stream, device=device), rows(size[1], dtype=F32, device=device, seed=1)
    x = rows(*size, dtype=of, device=device, seed=2)
    total = (residual.float() + x.float()).to(stream)
    right = torch.empty(size, dtype=torch.float64, device=device)
    kernel_oracle.rms_norm(total.double(), weight.double(), EPS, right)
    out, scales = buffers(size, *to, device)
    add_rms_norm_quantised(x, residual, weight, EPS, out, scales)
    assert torch.equal(residual, total)
    reads_as(out, scales, right)


def check_silu_mul(size: tuple[int, int], to: To, device: str, of: torch.dtype = BF16) -> None:
    n, width = size
    gate_up = rows(n, 2 * width, dtype=of, device=device) * 4
    right = torch.empty(n, width, dtype=torch.float64, device=device)
    kernel_oracle.gated_mul(gate_up.double(), "silu", right)
    out, scales = buffers(size, *to, device)
    silu_mul_quantised(gate_up, out, scales)
    reads_as(out, scales, right)


def check_exact(size: tuple[int, int], dtype: torch.dtype, to: To, device: str) -> None:
    """A plain row has the very bits of the rule."""
    x = rows(*size, dtype=dtype, device=device)
    out, scales = buffers(size, *to, device)
    quantise_rows(x, out, scales)
    cut = by_group(x.cpu().float(), to[1])  # on a GPU, torch multiplies with the inverse of a number
    scale = cut.abs().amax(-1, keepdim=True) / MOST[to[0]]
    right = (cut / scale.clamp(min=1e-30)).flatten(1)[:, : size[1]]
    assert torch.equal(scales.cpu().reshape(size[0], -1, 1), scale)
    assert torch.equal(out.cpu().float(), (right.round() if to[0] is I8 else right).to(to[0]).float())
    assert is_kept(out)


def test_small_rows_read_as_in_float64(device: str) -> None:
    check_add_norm((3, 576), F32, (I8, False), device)
    check_norm((3, 576), F32, (E4M3, True), device)
    check_silu_mul((3, 576), (I8, False), device)
    check_silu_mul((3, 576), (E4M3, True), device)


def test_plain_rows_have_the_bits_of_the_rule(device: str) -> None:
    check_exact((3, 576), BF16, (I8, False), device)
    check_exact((3, 133), BF16, (E4M3, False), device)


@pytest.mark.gpu
@pytest.mark.parametrize("to", [(I8, False), (I8, True), (E4M3, False), (E4M3, True)], ids=str)
@pytest.mark.parametrize("size", LARGE)
def test_rows_of_every_width_read_as_in_float64(size: tuple[int, int], to: To) -> None:
    check_silu_mul(size, to, "cuda")
    check_silu_mul(size, to, "cuda", F16)
    check_add_norm(size, F32, to, "cuda", F16)
    for dtype in (F32, BF16):
        check_norm(size, dtype, to, "cuda")
        check_add_norm(size, dtype, to, "cuda")
        if size[0]:
            check_exact(size, dtype, to, "cuda")


def test_zeros_stay_zeros_and_what_is_not_finite_reads_as_nan(device: str) -> None:
    x = rows(4, 576, device=device)
    x[0], x[1, 5], x[2, 500] = 0, math.inf, math.nan
    tos: list[To] = [(I8, False), (E4M3, True)]
    for to in tos:
        out, scales = buffers((4, 576), *to, device)
        quantise_rows(x, out, scales)
        read = by_group(out.float(), to[1]) * scales.reshape(4, -1, 1)
        assert not read[0].any()
        for row, group in ((1, 0), (2, 500 // 128 * to[1])):
            assert read[row, group].isnan().all()
        assert read[3].isfinite().all()


def check_many(size: tuple[int, int], dtype: torch.dtype, device: str, of: torch.dtype = BF16) -> None:
    """What follows in the same buffers has the bits of what comes alone."""
    n, width = size
    gate_up = rows(n, 2 * width, dtype=of, device=device) * 4
    gate_up[-2, 3], gate_up[0, width], gate_up[1] = math.nan, math.inf, 0
    out, scales = buffers(size, dtype, False, device)
    silu_mul_quantised(gate_up, out, scales)
    assert is_kept(out)
    for i in {0, 1, 2, n // 2, n - 2, n - 1}:
        alone, scale = buffers((1, width), dtype, False, device)
        silu_mul_quantised(gate_up[i : i + 1], alone, scale)
        assert torch.equal(alone.view(torch.uint8), out[i : i + 1].view(torch.uint8))
        torch.testing.assert_close(scale, scales[i : i + 1], rtol=0, atol=0, equal_nan=True)


def test_each_of_many_rows_has_the_bits_that_it_has_alone(device: str) -> None:
    check_many((23, 4104), E4M3, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [I8, E4M3], ids=str)
@pytest.mark.parametrize("width", [576, 4864, 8192, 12288, 14336, 18944, 20480])
def test_each_of_many_rows_of_every_width_has_the_bits_that_it_has_alone(width: int, dtype: torch.dtype) -> None:
    check_many((1000, width), dtype, "cuda")
    check_many((1000, width), dtype, "cuda", F16)


def test_what_does_not_fit_is_refused(device: str) -> None:
    x = rows(2, 576, device=device)
    out, scales = buffers((2, 576), I8, False, device)
    for wrong in (scales[:1], scales.double(), torch.zeros(2, 4, device=device)):
        with pytest.raises(ValueError, match=r"scales: .* is not float32 \(2,\) or \(2, 5\)"):
            quantise_rows(x, out, wrong)
    with pytest.raises(ValueError, match=r"out: .* is not contiguous int8 or float8_e4m3fn"):
        quantise_rows(x, x, scales)
    with pytest.raises(ValueError, match="gate_up: "):
        silu_mul_quantised(x, out, scales)
