"""Products with codes: every format, activation and instruction set against one reference, and their bits."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from allspan.kernels.ops import ACTIVATIONS
from allspan.kernels.packed_spec import FEATURES, FORMATS, PackedSpec
from allspan.kernels.reference import packed_linear
from allspan.kernels.table import op_set
from support.packed_cases import QUANTISED, activations_of, random_weight
from support.variants import CPU, CPU_VARIANTS

NAN, INFINITE = float("nan"), float("inf")
KINDS = [(name, activation) for name in QUANTISED for activation in activations_of(name)]
ALIKE = ("iq4_xs", "iq3_s", "iq3_xxs", "iq2_xs", "iq2_s")
"""Formats that have other tables of values, or else other codes, than one that every run tries."""
SIZES = [(1, 1), (3, 17), (31, 16), (32, 64), (33, 70), (64, 48), (225, 33), (576, 40), (600, 65)]
"""Inputs and features."""

pytestmark = pytest.mark.skipif(not CPU, reason="no compiled kernels")


@pytest.fixture(params=CPU_VARIANTS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _kind(kind: tuple[str, str]) -> Any:
    return pytest.param(kind, id="-".join(kind), marks=[pytest.mark.nightly] if kind[0] in ALIKE else [])


@pytest.fixture(params=map(_kind, KINDS))
def kind(request: pytest.FixtureRequest) -> tuple[str, str]:
    format_and_activation: tuple[str, str] = request.param
    return format_and_activation


def spec_of(kind: tuple[str, str], inputs: int, *parts: int, k_offset: int = 0, group: int = 64) -> PackedSpec:
    spec = PackedSpec(*kind, parts, inputs, group=0 if FORMATS[kind[0]].block else group)
    return replace(spec, k_offset=min(k_offset, spec.block - 1))


def inputs_of(rows: int, spec: PackedSpec) -> Tensor:
    generator = torch.Generator().manual_seed(rows + spec.inputs)
    return torch.randn(rows, spec.inputs, generator=generator)


def product(backend: str, x: Tensor, weight: Tensor, spec: PackedSpec, threads: int = 1) -> Tensor:
    """Into a buffer full of NaN."""
    out = torch.full((len(x), spec.features), NAN)
    op_set(backend, threads=threads).packed_linear(x, weight, None, spec, 0, out)
    return out


@functools.cache
def expected_of(spec: PackedSpec) -> Tensor:
    """The reference's product of seven rows, for all instruction sets."""
    return product("reference", inputs_of(7, spec), random_weight(spec), spec)


def assert_same_bits(ours: Tensor, expected: Tensor) -> None:
    assert torch.equal(ours.view(torch.int32), expected.view(torch.int32))


def assert_close(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=2e-5, atol=2e-5, equal_nan=True)


def test_agrees_with_the_reference(backend: str, kind: tuple[str, str]) -> None:
    for inputs, features in SIZES:
        for k_offset in (0, 45):
            spec = spec_of(kind, inputs, features, k_offset=k_offset)
            weight, x = random_weight(spec), inputs_of(7, spec)
            assert_close(product(backend, x, weight, spec), expected_of(spec))


@pytest.mark.parametrize("group", [32, 64, 96, 256, 512])
@pytest.mark.parametrize("name", ["group8", "group4"])
def test_groups_of_every_size(backend: str, name: str, group: int) -> None:
    for activation in ("a8", "a16"):
        spec = spec_of((name, activation), 1100, 37, k_offset=group // 2, group=group)
        x, weight = inputs_of(30, spec), random_weight(spec)
        assert_close(product(backend, x, weight, spec), product("reference", x, weight, spec))


def test_same_bits_on_every_instruction_set(kind: tuple[str, str]) -> None:
    for inputs, features, k_offset in [(33, 17, 5), (600, 70, 0), (1500, 64, 31)]:
        spec = spec_of(kind, inputs, features, k_offset=k_offset)
        x, weight = inputs_of(41, spec), random_weight(spec)
        x[3] *= 1e4
        x[5] *= 1e-30
        plain = product("cpu/generic", x, weight, spec)
        for backend in CPU:
            assert_same_bits(product(backend, x, weight, spec), plain)


def test_a_rows_bits_do_not_depend_on_its_batch(backend: str, kind: tuple[str, str]) -> None:
    spec = spec_of(kind, 321, 150, k_offset=7)
    x, weight = inputs_of(257, spec), random_weight(spec)
    together = product(backend, x, weight, spec, threads=3)
    for rows in (1, 2, 3, 4, 5, 6, 7, 11, 13, 24, 31, 32, 64):
        for first in (0, 100, 257 - rows):
            part = product(backend, x[first : first + rows].clone(), weight, spec, threads=1 + rows % 2)
            assert_same_bits(part, together[first : first + rows])


def test_a_features_bits_do_not_depend_on_those_beside_it(backend: str, kind: tuple[str, str]) -> None:
    spec = spec_of(kind, 200, 7 * FEATURES)
    x, weight = inputs_of(9, spec), random_weight(spec)
    whole = product(backend, x, weight, spec)
    for panel in range(7):
        alone = product(backend, x, weight[panel : panel + 1].clone(), replace(spec, parts=(FEATURES,)))
        assert_same_bits(alone, whole[:, panel * FEATURES : panel * FEATURES + FEATURES].clone())


def test_odd_rows(backend: str, kind: tuple[str, str]) -> None:
    """A NaN or an infinity makes its own row NaN; zeros and the smallest numbers give 0."""
    spec = spec_of(kind, 100, 20, k_offset=3)
    weight, x = random_weight(spec), inputs_of(8, spec)
    plain = product(backend, x, weight, spec)
    x[1], x[2, 50], x[3, 99], x[4, 0] = 0.0, NAN, INFINITE, -INFINITE
    x[5], x[6, 0], x[6, 1:] = 1e-40, -0.0, 0.0
    out = product(backend, x, weight, spec)
    assert out[2:5].isnan().all()
    assert out[[1, 5, 6]].eq(0).all()
    assert_same_bits(out[[0, 7]], plain[[0, 7]])


def test_the_most_and_least_codes_do_not_overflow(backend: str, kind: tuple[str, str]) -> None:
    for inputs, magnitude in [(64, 1e30), (4096, 1.0)]:
        spec = spec_of(kind, inputs, 32)
        fields = dict(packed_linear.fields_of(random_weight(spec), spec))
        fields["codes"] = torch.full_like(fields["codes"], (1 << FORMATS[kind[0]].bits) - 1)
        fields["codes"][::2] = 0
        weight, x = packed_linear.pack(spec, fields), torch.full((3, inputs), magnitude)
        x[1], x[2, ::2] = -magnitude, -magnitude
        ours, expected = (product(name, x, weight, spec) for name in (backend, "reference"))
        torch.testing.assert_close(ours / magnitude, expected / magnitude, rtol=2e-5, atol=2e-5 * inputs)


def test_parts_biases_and_epilogues(backend: str, kind: tuple[str, str]) -> None:
    spec = spec_of(kind, 70, 5, 40, 17)
    gated = replace(spec, parts=(37, 37), interleaved=True)
    x, ours, theirs = inputs_of(6, spec), op_set(backend), op_set("reference")
    for op, of, width, *activation in [
        ("packed_linear", spec, 62),
        ("packed_linear_add", spec, 62),
        *(("packed_gated_linear", gated, 37, each) for each in ACTIVATIONS),
    ]:
        weight, bias = random_weight(of), torch.randn(of.features)
        outs = [torch.arange(6.0 * (width + 3)).reshape(6, width + 3) for _ in range(2)]
        for ops, out in zip((ours, theirs), outs, strict=True):
            getattr(ops, op)(x, weight, bias, of, 2, *activation, out)
        assert_close(*outs)


def test_embeddings(backend: str, kind: tuple[str, str]) -> None:
    for inputs, k_offset in [(300, 0), (77, 19)]:
        spec = spec_of(kind, inputs, 50, k_offset=k_offset)
        weight, ids = random_weight(spec), torch.tensor([10, 59, 9, 60, 33, 10], dtype=torch.int32)
        out = torch.full((6, inputs), NAN)
        op_set(backend, threads=2).packed_embedding(ids, weight, spec, 10, out)
        values = packed_linear.unpack(weight, spec)
        torch.testing.assert_close(out[[0, 1, 4, 5]], values[[0, 49, 23, 0]], rtol=1e-6, atol=1e-7)
        assert out[[2, 3]].eq(0).all()
