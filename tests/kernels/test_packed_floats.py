"""Products with packed float32 and bfloat16 weights, of every variant that runs here: right, and a row's bits the same
whatever rows are with it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from allspan.kernels.packed_spec import PackedSpec
from allspan.kernels.reference import packed_linear
from allspan.kernels.table import op_set
from support.kernel_cases import poison, randn
from support.packed_cases import random_weight
from support.variants import CPU_VARIANTS

ROWS = (1, 2, 3, 6, 7, 16, 33, 48, 129, 257)
SPECS = [
    ((1,), 1, 0),
    ((16,), 31, 0),
    ((17, 3), 33, 5),
    ((130,), 257, 0),
    ((64, 48, 48), 127, 31),
    ((5, 33, 16), 96, 0),
    ((70,), 2049, 2),
]

pytestmark = [pytest.mark.parametrize("backend", CPU_VARIANTS), pytest.mark.parametrize("name", ["f32", "bf16"])]


def rounded(x: Tensor, spec: PackedSpec) -> Tensor:
    """What a product takes of x, in float64."""
    return (x.bfloat16() if spec.format == "bf16" else x).double()


def assert_close(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, spec: PackedSpec) -> None:
    plain, taken = packed_linear.unpack(weight, spec).double(), rounded(x, spec)
    exact, size = taken @ plain.T, taken.abs() @ plain.abs().T
    if bias is not None:
        exact, size = exact + bias, size + bias.abs()
    assert ((out.double() - exact).abs() <= 4e-6 * size).all()


@pytest.mark.parametrize(("parts", "inputs", "k_offset"), SPECS)
def test_products(backend: str, name: str, parts: tuple[int, ...], inputs: int, k_offset: int) -> None:
    spec = PackedSpec(name, name, parts, inputs, k_offset)
    weight, bias, ops = random_weight(spec), randn(spec.features), op_set(backend, threads=2)
    for rows in ROWS:
        x, out = randn(rows, inputs, seed=rows), poison(rows, spec.features)
        ops.packed_linear(x, weight, bias if rows % 2 else None, spec, 0, out)
        assert_close(out, x, weight, bias if rows % 2 else None, spec)


@pytest.mark.parametrize(("parts", "inputs", "k_offset"), SPECS)
def test_a_row_has_the_same_bits_among_any_others(
    backend: str, name: str, parts: tuple[int, ...], inputs: int, k_offset: int
) -> None:
    spec = PackedSpec(name, name, parts, inputs, k_offset)
    weight, bias = random_weight(spec), randn(spec.features)
    x, whole = randn(257, inputs), poison(257, spec.features)
    alone, threaded = op_set(backend), op_set(backend, threads=3)
    threaded.packed_linear(x, weight, bias, spec, 0, whole)
    for size in ROWS:
        first = 257 - size if size % 2 else 64
        last = min(257, first + size)
        part = poison(last - first, spec.features)
        (threaded if size > 5 else alone).packed_linear(x[first:last], weight, bias, spec, 0, part)
        assert torch.equal(part.view(torch.int32), whole[first:last].view(torch.int32))


@pytest.mark.parametrize("features", [1, 16, 40, 96])
def test_gated_products(backend: str, name: str, features: int) -> None:
    spec = PackedSpec(name, name, (features, features), 100, interleaved=True)
    weight, ops = random_weight(spec), op_set(backend, threads=2)
    for rows in (1, 4, 37, 130):
        x, out = randn(rows, 100), poison(rows, features)
        ops.packed_gated_linear(x, weight, None, spec, 0, "gelu_tanh", out)
        both = rounded(x, spec) @ packed_linear.unpack(weight, spec).double().T
        exact = torch.nn.functional.gelu(both[:, :features], approximate="tanh") * both[:, features:]
        torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-5)


def test_added_products_and_columns(backend: str, name: str) -> None:
    spec = PackedSpec(name, name, (37,), 65)
    weight, ops = random_weight(spec), op_set(backend)
    for rows in (1, 7, 64):
        x, out = randn(rows, 65), randn(rows, 50, seed=1)
        before = out.clone()
        ops.packed_linear_add(x, weight, None, spec, 9, out)
        assert_close(out[:, 9:46], x, weight, before[:, 9:46], spec)
        out[:, 9:46] = before[:, 9:46]
        assert torch.equal(out, before)


def test_what_is_no_number_stays_in_its_row_and_feature(backend: str, name: str) -> None:
    spec = PackedSpec(name, name, (40,), 300, k_offset=3)
    ops = op_set(backend)
    plain = randn(40, 300)
    plain[17, 299] = float("nan")
    weight = packed_linear.pack(spec, {"weight": plain})
    x = randn(20, 300)
    x[4, 0], x[9, 123], x[15, 7] = float("nan"), float("inf"), float("-inf")
    out = poison(20, 40).fill_(0)
    ops.packed_linear(x, weight, None, spec, 0, out)
    odd = torch.zeros(20, 40, dtype=torch.bool)
    odd[[4, 9, 15]], odd[:, 17] = True, True
    assert torch.equal(~out.isfinite(), odd)
    assert out[4].isnan().all()
    assert out[:, 17].isnan().all()


def test_embeddings(backend: str, name: str) -> None:
    spec = PackedSpec(name, name, (100,), 77, k_offset=1)
    weight = random_weight(spec)
    ids = torch.tensor([0, 5, 99, 100, 106, 50], dtype=torch.int32)
    out = poison(6, 77)
    op_set(backend, threads=2).packed_embedding(ids, weight, spec, 7, out)
    rows = packed_linear.unpack(weight, spec).float()
    wanted = torch.stack([rows[i - 7] if 0 <= i - 7 < 100 else torch.zeros(77) for i in ids.tolist()])
    assert torch.equal(out, wanted)
