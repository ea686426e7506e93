"""Which kernel runs a packed linear product: decisions as they were recorded, on GPUs that are not here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from allspan.kernels.cuda.jit import modules
from allspan.kernels.cuda.jit.modules import Gpu, shared_limit
from allspan.kernels.cuda.linear.call import ADD, GATED_SILU, STORE, LinearCall, Output
from allspan.kernels.cuda.linear.dispatch import KERNELS, choose
from allspan.kernels.cuda.linear.packed_linear import kernel_name, packed_linear
from allspan.kernels.packed_spec import PackedSpec
from allspan.kernels.table import BACKENDS, LoadedOps, _load

MULTIPROCESSORS = {(7, 5): 40, (8, 0): 108, (8, 9): 128, (9, 0): 132, (10, 0): 148}
O_PROJ, GATE_UP, HEAD = (3584, 3584), (37888, 3584), (152064, 8192)
"""Features and inputs."""
DECISIONS = {
    "gemv": [
        ("group4 a16", 1, O_PROJ, STORE, (9, 0)),
        ("channel8 a8", 1, GATE_UP, GATED_SILU, (8, 0)),
        ("fp8 e4m3", 1, O_PROJ, ADD, (8, 9)),
    ],
    "skinny": [
        ("bf16", 1, O_PROJ, STORE, (9, 0)),
        ("group8 a16", 1, HEAD, STORE, (9, 0)),  # larger than 256 MB
        ("group4 a16", 8, O_PROJ, STORE, (9, 0)),
        ("bf16", 8, GATE_UP, GATED_SILU, (8, 0)),
        ("bf16", 70, (40, 0), STORE, (9, 0)),
    ],
    "skinny_sm90": [("group4 a16", 33, O_PROJ, STORE, (9, 0)), ("channel4 a8", 64, GATE_UP, GATED_SILU, (9, 0))],
    "skinny_shared": [
        ("group4 a16", 9, O_PROJ, STORE, (9, 0)),
        ("group4 a16", 32, GATE_UP, GATED_SILU, (9, 0)),
        ("group4 a16", 64, O_PROJ, STORE, (8, 0)),
        ("group4 a16", 32, O_PROJ, STORE, (7, 5)),
        ("channel8 a8", 64, O_PROJ, STORE, (9, 0)),
        ("fp8 e4m3", 16, O_PROJ, STORE, (8, 9)),
        ("fp8 e4m3", 64, O_PROJ, STORE, (8, 0)),
        ("fp8_block e4m3", 64, O_PROJ, STORE, (10, 0)),
    ],
    "cublas_int8": [("channel8 a8", 65, O_PROJ, STORE, (9, 0)), ("channel8 a8", 4096, GATE_UP, GATED_SILU, (8, 0))],
    "gemm_sm90_e4m3": [("fp8 e4m3", 4096, GATE_UP, GATED_SILU, (9, 0)), ("fp8 e4m3", 4096, O_PROJ, ADD, (9, 0))],
    "cublas_e4m3": [("fp8 e4m3", 17, O_PROJ, STORE, (9, 0)), ("fp8 e4m3", 4096, GATE_UP, GATED_SILU, (8, 9))],
    "cublas_e4m3_blocks": [("fp8_block e4m3", 17, O_PROJ, STORE, (9, 0))],
    "gemm_sm90": [("bf16", 4096, GATE_UP, GATED_SILU, (9, 0)), ("group4 a16", 4096, GATE_UP, GATED_SILU, (9, 0))],
    "cublas": [
        ("bf16", 9, O_PROJ, STORE, (9, 0)),
        ("bf16", 4096, O_PROJ, ADD, (9, 0)),
        ("bf16", 4096, GATE_UP, GATED_SILU, (8, 0)),
        ("channel8 a16", 65, O_PROJ, STORE, (9, 0)),
        ("group4 a16", 33, O_PROJ, STORE, (7, 5)),
        ("fp8 e4m3", 65, O_PROJ, STORE, (8, 0)),
        ("fp8_block e4m3", 65, O_PROJ, STORE, (8, 9)),
    ],
}
"""(format and activation, rows, features and inputs, epilogue, compute capability), by the kernel that runs it."""


class AbsentGpu:
    """A driver of a GPU of which only the size is known."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._gpu = Gpu(MULTIPROCESSORS[capability], shared_limit(capability), capability)

    def gpu(self, device: torch.device) -> Gpu:
        return self._gpu


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LinearCall]:
    def make(
        kind: str, rows: int, sizes: tuple[int, int], epilogue: int, capability: tuple[int, int], column: int = 0
    ) -> LinearCall:
        monkeypatch.setattr(modules, "driver", lambda: AbsentGpu(capability))
        (name, _, activation), (features, inputs) = kind.partition(" "), sizes
        parts = (features // 2, features // 2) if epilogue == GATED_SILU else (features,)
        group = 128 if name.startswith("group") else 0
        spec = PackedSpec(name, activation or name, parts, inputs, group=group, memory="rows")
        x = torch.empty(rows, inputs, dtype=torch.bfloat16, device="meta")
        weight = torch.empty(spec.shape, dtype=torch.uint8, device="meta")
        dtype = torch.float32 if epilogue == ADD else torch.bfloat16
        output = Output(torch.empty(rows, features + 2 * column, dtype=dtype, device="meta"), column, epilogue)
        return LinearCall(x, weight, None, spec, output)

    return make


@pytest.mark.parametrize("name", DECISIONS)
def test_the_kernel_is_the_one_that_was_recorded(name: str, call: Callable[..., LinearCall]) -> None:
    assert {case: choose(call(*case)).name for case in DECISIONS[name]} == dict.fromkeys(DECISIONS[name], name)


def test_every_row_of_the_table_has_a_recorded_decision_and_a_reason() -> None:
    assert [kernel.name for kernel in KERNELS] == list(DECISIONS)
    assert all(kernel.reason for kernel in KERNELS)


def test_what_the_table_says_is_what_is_launched(call: Callable[..., LinearCall]) -> None:
    for name, launched in (("gemv", ["gemv"]), ("skinny", ["skinny"]), ("skinny_shared", ["skinny_shared"])):
        one = call(*DECISIONS[name][0])
        with modules.noting() as kernels:
            packed_linear(one.x, one.weight, None, one.spec, 0, one.output.out)
        assert [kernel.name for kernel in kernels][: len(launched)] == launched
        assert kernel_name("packed_linear", one.x, one.weight, None, one.spec, 0, one.output.out) == name


def test_the_op_table_names_the_kernels_of_ops_that_choose_one(call: Callable[..., LinearCall]) -> None:
    one = call(*DECISIONS["skinny"][0])
    ops = LoadedOps("cuda", {}, kernel_names={op: _load(name) for op, name in BACKENDS["cuda"].kernel_names.items()})
    arguments = (one.x, one.weight, None, one.spec, 0, one.output.out)
    assert [ops.kernel_name(op, arguments) for op in ("packed_linear", "attention")] == ["skinny", ""]
