"""Norms, sums, SwiGLU and gathered rows against float64, over widths, dtypes and numbers of rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from allspan.kernels.cuda.rows.elementwise import add, embedding, gated_mul, gather_rows, soft_cap
from allspan.kernels.cuda.rows.rms_norm import add_rms_norm, layer_norm, rms_norm
from allspan.kernels.ops import ACTIVATIONS
from support import kernel_oracle
from support.cuda_rows import BF16, F16, F32, is_kept, poisoned, rows

EPS = 1e-5
LARGE = [(1, 896), (1, 4096), (7, 3584), (64, 8192), (513, 5120), (5, 18432), (3, 1), (4, 65), (0, 64), (2, 40000)]


def agrees(out: Tensor, right: Tensor) -> None:
    """With a float64 outcome that was not rounded."""
    close = {BF16: (2.0**-8, 1e-6), F16: (2.0**-11, 1e-6), F32: (2e-5, 1e-6)}[out.dtype]
    torch.testing.assert_close(out.double(), right, rtol=close[0], atol=close[1])
    assert is_kept(out)


Types = tuple[torch.dtype, torch.dtype, torch.dtype]
"""Of the residual, of what is added and written, and of the weight."""


def check_norm(size: tuple[int, int], dtypes: Types, device: str) -> None:
    stream, other, of_weight = dtypes
    x, weight = rows(*size, dtype=stream, device=device), rows(size[1], dtype=of_weight, device=device, seed=1)
    right = torch.empty(size, dtype=torch.float64, device=device)
    kernel_oracle.rms_norm(x.double(), weight.double(), EPS, right)
    out = poisoned(*size, dtype=other, device=device)
    rms_norm(x, weight, EPS, out)
    agrees(out, right)


def check_add_norm(size: tuple[int, int], dtypes: Types, device: str) -> None:
    """In place on x and on the residual."""
    stream, other, of_weight = dtypes
    residual, weight = rows(*size, dtype=stream, device=device), rows(size[1], dtype=of_weight, device=device, seed=1)
    x = poisoned(*size, dtype=other, device=device)
    x.copy_(rows(*size, dtype=other, device=device, seed=2))
    total = (residual.float() + x.float()).to(stream)
    right = torch.empty(size, dtype=torch.float64, device=device)
    kernel_oracle.rms_norm(total.double(), weight.double(), EPS, right)
    add_rms_norm(x, residual, weight, EPS, x)
    assert torch.equal(residual, total)
    agrees(x, right)


def test_norms_agree_with_float64(device: str) -> None:
    """One unit a thread and two, rows that end anywhere, and FlashInfer's bfloat16 stream."""
    check_norm((3, 576), (F32, BF16, F32), device)
    check_add_norm((2, 2056), (F32, BF16, F32), device)
    check_add_norm((3, 33), (F32, BF16, F32), device)
    check_add_norm((3, 576), (BF16, BF16, BF16), device)
    check_add_norm((3, 576), (F32, F16, F32), device)


@pytest.mark.parametrize("first", [8, 3])
def test_rows_that_are_columns_of_a_wider_tensor_are_normed(first: int, device: str) -> None:
    """Where they lie at multiples of 16 bytes, and where they do not."""
    wide, weight = rows(3, 608, dtype=BF16, device=device), rows(576, dtype=F32, device=device, seed=1)
    x, out = wide[:, first : first + 576], torch.empty(3, 576, dtype=BF16, device=device)
    expected = torch.empty_like(out)
    rms_norm(x, weight, EPS, out)
    rms_norm(x.contiguous(), weight, EPS, expected)
    torch.testing.assert_close(out, expected, rtol=2.0**-7, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("weight", [F32, BF16])
@pytest.mark.parametrize("other", [F32, BF16])
@pytest.mark.parametrize("stream", [F32, BF16])
@pytest.mark.parametrize("size", LARGE)
def test_norms_of_every_width_agree_with_float64(
    size: tuple[int, int], stream: torch.dtype, other: torch.dtype, weight: torch.dtype
) -> None:
    for half in (BF16, F16):
        types = [half if dtype is BF16 else dtype for dtype in (stream, other, weight)]
        check_norm(size, (types[0], types[1], types[2]), "cuda")
        check_add_norm(size, (types[0], types[1], types[2]), "cuda")


def check_add(size: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype], device: str) -> None:
    n, width = size
    residual = poisoned(n, width, dtype=dtypes[0], device=device)
    residual.copy_(rows(n, width, dtype=dtypes[0], device=device))
    x = rows(n, width, dtype=dtypes[1], device=device, seed=1)
    total = (residual.float() + x.float()).to(dtypes[0])
    add(x, residual)
    assert torch.equal(residual, total)
    assert is_kept(residual)


def check_gated_mul(size: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype], device: str) -> None:
    n, width = size
    gate_up = rows(n, 2 * width, dtype=dtypes[0], device=device) * 8
    out = poisoned(n, width, dtype=dtypes[1], device=device)
    right = torch.empty(n, width, dtype=torch.float64, device=device)
    for activation in ACTIVATIONS:
        gated_mul(gate_up, activation, out)
        kernel_oracle.gated_mul(gate_up.double(), activation, right)
        agrees(out, right)


def test_sums_and_gated_products_agree_with_float64(device: str) -> None:
    check_add((3, 2056), (F32, BF16), device)
    check_gated_mul((3, 2056), (BF16, BF16), device)
    check_gated_mul((3, 33), (BF16, BF16), device)
    check_gated_mul((3, 264), (F16, F16), device)


def test_activations_far_out_is_finite(device: str) -> None:
    gate = [-3e38, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, 3e38]
    out = poisoned(1, 8, device=device)
    expected = torch.tensor([[max(x, 0.0) for x in gate]], device=device).bfloat16()
    for activation in ACTIVATIONS:
        up = 0.0 if activation == "clamped_swiglu" else 1.0
        gated_mul(torch.tensor([gate + [up] * 8], device=device).bfloat16(), activation, out)
        limit = 7.0 if activation == "clamped_swiglu" else torch.inf
        torch.testing.assert_close(out, expected.clamp(max=limit), rtol=2**-7, atol=1e-30)


def test_a_clamped_nan_stays_one(device: str) -> None:
    gate_up = torch.tensor([[torch.nan, 1.0, 9.0, 9.0, torch.nan, 9.0]], device=device).bfloat16()
    out = poisoned(1, 3, device=device)
    gated_mul(gate_up, "clamped_swiglu", out)
    assert out.isnan().tolist() == [[True, True, False]]
    assert out[0, 2] == 56.0


def test_soft_caps_agree_with_float64(device: str) -> None:
    for n, width in ((3, 2056), (3, 33)):
        x = poisoned(n, width, dtype=F32, device=device)
        x.copy_(rows(n, width, dtype=F32, device=device) * 40)
        right = x.double()
        kernel_oracle.soft_cap(right, 30.0)
        soft_cap(x, 30.0)
        torch.testing.assert_close(x.double(), right, rtol=2e-6, atol=2e-6)
        assert is_kept(x)


def test_layer_norm_agrees_with_float64(device: str) -> None:
    for n, width in ((3, 2056), (2, 4104), (3, 33)):
        x, weight = rows(n, width, dtype=F32, device=device) + 3, rows(width, dtype=F32, device=device)
        out, right = poisoned(n, width, device=device), torch.empty(n, width, dtype=torch.float64, device=device)
        kernel_oracle.layer_norm(x.double(), weight.double(), EPS, right)
        layer_norm(x, weight, EPS, out)
        agrees(out, right)


@pytest.mark.gpu
@pytest.mark.parametrize("second", [F32, BF16])
@pytest.mark.parametrize("first", [F32, BF16])
@pytest.mark.parametrize("size", [*LARGE, (2, 18944), (70000, 8)])
def test_sums_and_gated_products_of_every_width_agree_with_float64(
    size: tuple[int, int], first: torch.dtype, second: torch.dtype
) -> None:
    for half in (BF16, F16):
        types = half if first is BF16 else first, half if second is BF16 else second
        check_add(size, types, "cuda")
        check_gated_mul(size, types, "cuda")


def check_embedding(width: int, dtypes: tuple[torch.dtype, torch.dtype], device: str) -> None:
    weight = rows(59, width, dtype=dtypes[0], device=device)
    ids = torch.tensor([0, 40, 41, 99, 100, 7, 57, 41], dtype=torch.int32, device=device)
    out, right = (poisoned(8, width, dtype=dtypes[1], device=device) for _ in range(2))
    embedding(ids, weight, 41, out)
    kernel_oracle.embedding(ids, weight, 41, right)
    assert torch.equal(out, right)
    assert is_kept(out)
    embedding(ids, weight[:0], 41, out)
    assert not out.any()


def check_gather(width: int, dtype: torch.dtype, device: str) -> None:
    x, out = rows(70, width, dtype=dtype, device=device), poisoned(4, width, dtype=dtype, device=device)
    gather_rows(x, torch.tensor([69, 0, 0, 31], dtype=torch.int32, device=device), out)
    assert torch.equal(out, x[[69, 0, 0, 31]])
    assert is_kept(out)


def test_rows_are_gathered(device: str) -> None:
    check_embedding(33, (BF16, F32), device)
    check_gather(2056, F32, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("width", [1, 64, 576, 1001, 5120, 16384])
def test_rows_of_every_width_are_gathered(width: int, dtype: torch.dtype) -> None:
    check_gather(width, dtype, "cuda")
    for out in (F32, BF16):
        check_embedding(width, (dtype, out), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 64, 4096])
def test_a_chain_in_a_graph_has_the_bits_of_one_that_is_awaited_at_every_step(n: int) -> None:
    """In the graph, blocks begin before the kernel ahead has ended."""
    weight, begin = rows(4096, dtype=F32, device="cuda"), rows(n, 4096, dtype=F32, device="cuda")
    residual, x, other = begin.clone(), *(torch.zeros(n, 4096, dtype=BF16, device="cuda") for _ in range(2))
    back = torch.arange(n, dtype=torch.int32, device="cuda").flip(0)

    def run(awaited: Callable[[], None]) -> None:
        for _ in range(30):
            rms_norm(residual, weight, EPS, x)
            awaited()
            gather_rows(x, back, other)
            awaited()
            add_rms_norm(other, residual, weight, EPS, other)
            awaited()
            add(other, residual)
            awaited()

    run(torch.cuda.synchronize)
    right = residual.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(lambda: None)
    for _ in range(5):
        residual.copy_(begin)
        graph.replay()
        assert torch.equal(residual, right)


def test_a_row_does_not_depend_on_the_others(device: str) -> None:
    x, weight = rows(5, 576, dtype=F32, device=device), rows(576, dtype=F32, device=device)
    together, alone = poisoned(5, 576, device=device), poisoned(1, 576, device=device)
    rms_norm(x, weight, EPS, together)
    rms_norm(x[3:4], weight, EPS, alone)
    assert torch.equal(together[3:4], alone)


def test_what_does_not_fit_is_refused(device: str) -> None:
    x, weight = rows(2, 64, device=device), rows(64, dtype=F32, device=device)
    with pytest.raises(ValueError, match=r"out: .* is not contiguous float32 or bfloat16"):
        rms_norm(x, weight, EPS, x.double())
    with pytest.raises(ValueError, match="weight: "):
        rms_norm(x, weight[:63], EPS, x)
    with pytest.raises(ValueError, match="residual: "):
        add_rms_norm(x, x[:1], weight, EPS, x)
    with pytest.raises(ValueError, match="residual: "):
        add(x, rows(64, 2, device=device).t())
    with pytest.raises(ValueError, match="gate_up: "):
        gated_mul(x, "silu", x)
    with pytest.raises(ValueError, match="ids: "):
        embedding(torch.zeros(2, dtype=torch.int64, device=device), x, 0, x)
