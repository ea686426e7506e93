"""Every op of every backend and instruction set that this machine can run, against float64."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from allspan.kernels.table import ADAPTER_OPS, EXPERT_OPS, LATENT_OPS, REFERENCE, backends, op_set
from support import kernel_oracle
from support.kernel_cases import CASES, Case, on_device, to_float64
from support.variants import VARIANTS


@functools.cache
def made(name: str) -> tuple[list[Any], list[Any]]:
    """The arguments of a case before and after the op: both take long to make, and every backend wants them."""
    case = next(case for case in CASES if str(case) == name)
    arguments = case.build()
    expected = [to_float64(argument) for argument in arguments]
    getattr(kernel_oracle, case.op)(*expected)
    return arguments, expected


def assert_agrees(case: Case, backend: str, threads: int, device: str = "cpu") -> None:
    given, expected = made(str(case))
    arguments = [
        on_device(argument.clone() if isinstance(argument, Tensor) else argument, device) for argument in given
    ]
    ops = op_set(backend, threads)
    getattr(ops, case.op)(*arguments)
    # Every argument is compared: inputs must be as they were, outputs right and whole.
    limit = case.tolerance_on(ops.name)
    for ours, right in zip(arguments, expected, strict=True):
        if isinstance(ours, Tensor):
            torch.testing.assert_close(ours.cpu().double(), right.double(), rtol=limit, atol=limit, equal_nan=True)


ELSEWHERE = {
    *("rotary_append", "packed_linear", "packed_linear_add", "packed_gated_linear", "packed_embedding"),
    *EXPERT_OPS,
    *LATENT_OPS,
    *ADAPTER_OPS,
    *("norm_route", "append_and_attend", "adapted_linear"),
}
"""Ops with tables of cases of their own: test_rotary_append.py, test_packed_*.py, test_experts.py, test_adapters.py,
test_latent_attention.py, cuda/test_norm_route.py, cuda/test_latent.py, cuda/test_adapters.py."""


def test_the_table_of_cases_covers_every_op() -> None:
    assert len({str(case) for case in CASES}) == len(CASES)
    assert {case.op for case in CASES} == set(REFERENCE) - ELSEWHERE


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", VARIANTS)
def test_op_agrees_with_float64(backend: str, case: Case) -> None:
    assert_agrees(case, backend, threads=1)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_op_agrees_with_float64_on_three_threads(case: Case) -> None:
    assert_agrees(case, backends()[0], threads=3)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference_agrees_with_float64_on_cuda(case: Case) -> None:
    assert_agrees(case, "reference", threads=1, device="cuda")
