"""Punica's SGMV and BGMV against float64, on a GPU's kernels and on those of the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import allspan.kernels.library as flashinfer
from allspan.kernels.table import backends
from support.adapter_cases import of_rows
from support.kernel_library import close, randn

ADAPTERS, RANK, INPUTS, OUTPUTS = 3, 12, 72, 90
HOST = [backends()[0], "reference"]


def stacks(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Matrices of adapters, one of which has a lower rank, behind which there is what must not be read."""
    a, b = (
        randn(*shape, device=device, dtype=dtype) / 4 for shape in ((ADAPTERS, RANK, INPUTS), (ADAPTERS, OUTPUTS, RANK))
    )
    a[1, 5:], b[1, :, 5:] = torch.nan, torch.nan
    return a, b, torch.tensor([RANK, 5, RANK], dtype=torch.int32)


def expected(y: Tensor, x: Tensor, given: tuple[Tensor, Tensor, Tensor], indices: list[int]) -> Tensor:
    found, (a, b, ranks) = y.double(), given
    for row, adapter in enumerate(indices):
        if 0 <= adapter < ADAPTERS:
            rank = int(ranks[adapter])
            found[row] += b[adapter, :, :rank].double() @ (a[adapter, :rank].double() @ x[row].double())
    return found


def check(dtype: torch.dtype, device: str, backend: str) -> None:
    given = stacks(dtype, device)
    weights = flashinfer.LoRAWeights(*given, backend=backend)
    for rows in (1, 7, 40):
        indices = of_rows(rows, rows, ADAPTERS)
        x = randn(rows, INPUTS, device=device, dtype=dtype)
        for kind in (dtype, torch.float32):
            y = randn(rows, OUTPUTS, device=device, dtype=kind, seed=1)
            right, none = expected(y, x, given, indices.tolist()), y[indices < 0].clone()
            flashinfer.bgmv(y, x, weights, indices)
            assert torch.equal(y[indices < 0], none)
            close(y, right, 1e-3)
    y, x = (randn(9, width, device=device, dtype=dtype) for width in (OUTPUTS, INPUTS))
    right = expected(y, x, given, [2, 2, 2, -1, 0, 0, 1, 9, 9])
    flashinfer.sgmv(y, x, weights, torch.tensor([0, 3, 4, 4, 6, 7]), torch.tensor([2, -1, 1, 0, 1]))
    close(y, right, 1e-2 if dtype is torch.float16 else 1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_each_row_takes_its_adapter_on_a_gpu(dtype: torch.dtype, device: str) -> None:
    check(dtype, device, "cuda")


@pytest.mark.parametrize("backend", HOST)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_row_takes_its_adapter_on_a_cpu(dtype: torch.dtype, backend: str) -> None:
    check(dtype, "cpu", backend)


@pytest.mark.gpu
def test_a_captured_graph_goes_on_with_other_indices() -> None:
    given = stacks(torch.bfloat16, "cuda")
    weights = flashinfer.LoRAWeights(*given)
    x, y = (randn(40, width, device="cuda", dtype=torch.bfloat16) for width in (INPUTS, OUTPUTS))
    indices, before = of_rows(40, 1, ADAPTERS).cuda(), y.clone()
    flashinfer.bgmv(y, x, weights, indices)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flashinfer.bgmv(y, x, weights, indices)
    for seed in range(2, 12):
        other = of_rows(40, seed, ADAPTERS) if seed % 3 else torch.full((40,), seed % 2)
        indices.copy_(other)
        y.copy_(before)
        graph.replay()
        close(y, expected(before, x, given, other.tolist()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"a": torch.zeros(2, 8, 16)}, "a: .* are not"),
        ({"b": torch.zeros(3, 8, 4)}, "a: .* are not"),
        ({"ranks": torch.tensor([0, 13, 1])}, "ranks: "),
        ({"backend": "metal"}, "backend: 'metal'"),
        ({"x": torch.zeros(2, 71)}, "x: "),
        ({"y": torch.zeros(2, 89)}, "y: "),
        ({"indices": torch.zeros(3, dtype=torch.int32)}, "indices: "),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"a": torch.zeros(3, 12, 72), "b": torch.zeros(3, 90, 12), "ranks": None, "backend": "auto"}
    call: dict[str, Any] = {
        "y": torch.zeros(2, 90),
        "x": torch.zeros(2, 72),
        "indices": torch.zeros(2, dtype=torch.int32),
    }
    given |= {name: value for name, value in change.items() if name in given}
    call |= {name: value for name, value in change.items() if name in call}
    with pytest.raises(ValueError, match=words):
        flashinfer.bgmv(weights=flashinfer.LoRAWeights(**given), **call)
