"""Products of one row with codes against float64."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from allspan.kernels.cuda.jit.modules import Gpu, shared_limit
from allspan.kernels.cuda.linear import packed_linear as linear
from allspan.kernels.cuda.linear.call import GATED_SILU, STORE, Output
from allspan.kernels.cuda.linear.gemm import gemv
from allspan.kernels.cuda.linear.gemm.gemv import Form
from allspan.kernels.packed_spec import ROW_FORMATS
from support.linear_cases import Case, check_add, check_gated, check_store, spec_of

ALL = [
    ("fp8", 0),
    ("fp8_block", 0),
    ("channel8", 0),
    ("channel4", 0),
    ("group8", 32),
    ("group8", 256),
    ("group4", 32),
    ("group4", 64),
    ("group4", 128),
    ("group4", 512),
    ("q8_0", 0),
    ("q4_0", 0),
]
SMALL = Form(4, 3, 1)


@pytest.fixture
def small_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemv, "form_of", lambda *_: SMALL)


@pytest.mark.usefixtures("small_form")
@pytest.mark.parametrize(
    ("name", "group"), [("fp8", 0), ("fp8_block", 0), ("channel8", 0), ("group8", 32), ("group4", 32), ("group4", 128)]
)
def test_a_row_agrees_with_float64(name: str, group: int, device: str) -> None:
    """Tiles end within a turn of the warps, k tiles are odd, features are no multiple of a tile, some warps idle."""
    check_gated(Case(spec_of(name, group, (71, 71), 712), 1, device))
    check_add(Case(spec_of(name, group, (7,), 104), 1, device))


@pytest.mark.usefixtures("small_form")
def test_a_rank_s_inputs_may_begin_within_a_group(device: str) -> None:
    for name, group in ("group4", 128), ("group8", 32):
        check_store(Case(spec_of(name, group, (38,), 301, k_offset=29), 1, device))


@pytest.mark.usefixtures("small_form")
def test_a_row_of_halves_agrees_with_float64(device: str) -> None:
    check_store(Case(spec_of("group4", 32, (38,), 301), 1, device, is_half=True))


@pytest.mark.usefixtures("small_form")
@pytest.mark.parametrize("name", ["fp8", "channel8", "q4_0"])
def test_a_row_that_is_not_finite_gives_nothing_finite(name: str, device: str) -> None:
    for value in (math.inf, math.nan):
        case = Case(spec_of(name, 0, (38,), 712), 1, device)
        case.arguments[0][0, 700] = value
        out = torch.zeros(1, 40, device=device)
        linear.packed_linear(*case.arguments, out)
        assert not out[:, 1:-1].isfinite().any()


def test_weights_of_codes_that_fit_are_taken() -> None:
    """For what one of Qwen2.5-7B's layers has on an H200, blocks fit; its head is large."""
    hopper = Gpu(132, shared_limit((9, 0)), (9, 0))
    output, gated = (Output(torch.empty(0), 0, epilogue) for epilogue in (STORE, GATED_SILU))
    spec = spec_of("group4", 32, (18944, 18944), 3584)
    assert gemv.takes(spec, gated, hopper)
    assert gemv.takes(replace(spec, parts=(3584,), inputs=18944), output, hopper)
    assert not gemv.takes(replace(spec, parts=(152064,)), output, hopper)
    assert not gemv.takes(replace(spec, group=96), output, hopper)
    assert not gemv.takes(replace(spec, parts=(64,), inputs=1 << 20), output, hopper)
    assert not gemv.takes(spec_of("bf16", 0, (64,), 64), output, hopper)


@pytest.mark.parametrize(
    ("capability", "multiprocessors"), [((7, 5), 40), ((8, 0), 108), ((8, 6), 82), ((8, 9), 128), ((12, 0), 170)]
)
def test_no_gpu_is_asked_for_more_shared_memory_than_it_has(capability: tuple[int, int], multiprocessors: int) -> None:
    device = Gpu(multiprocessors, shared_limit(capability), capability)
    output = Output(torch.empty(0), 0, STORE)
    for (name, group), outputs, inputs in itertools.product(ALL, (2048, 3584, 4608, 6144), (1536, 2048, 3584, 18944)):
        spec = spec_of(name, group, (outputs,), inputs)
        form = gemv.form_of(spec, output, device)
        if form is not None:
            assert form.shared_bytes(spec, gemv._tiles(spec, output, device)[1]) <= device.shared_bytes


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "group"), ALL)
@pytest.mark.parametrize("inputs", [128, 3584, 18944])
def test_rows_of_every_size_agree_with_float64(name: str, group: int, inputs: int) -> None:
    check_store(Case(spec_of(name, group, (640,), inputs), 1, "cuda"))
    check_add(Case(spec_of(name, group, (640,), inputs), 1, "cuda"))
    check_gated(Case(spec_of(name, group, (528, 528), inputs), 1, "cuda"))


def test_sizes_of_formats_are_known() -> None:
    assert {name for name, _ in ALL} == {name for name, kind in ROW_FORMATS.items() if kind.is_quantised} - {"mxfp4"}
