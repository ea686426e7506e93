"""Every family in every format on every device: the table in docs/models.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from allspan.kernels.ops import OpSet
from allspan.kernels.table import op_set
from allspan.worker.backend.cuda.backend import kernels_for
from allspan.worker.step.backend import KernelNeeds
from support.emulator.backend import EmulatedBackend, add_device
from support.family_formats import DEVICES, MODEL_TYPES, cell, written


class ChosenKernels(EmulatedBackend):
    """The ops that a GPU would run: those of torch where there are no kernels for them."""

    def open_ops(self, kernels: str, threads: int, cpus: tuple[int, ...], needs: Callable[[], KernelNeeds]) -> OpSet:
        return op_set(kernels_for(needs()), threads, cpus)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_table_says_what_runs_on_cpus(model_type: str, tmp_path: Path) -> None:
    found = cell(tmp_path, model_type, {"threads": 1})
    assert written(model_type, DEVICES[0]) == found, f"write this into {model_type}'s row"


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_table_says_what_runs_on_the_cuda_kernels(
    model_type: str, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_gpu = device == "cuda"
    found = cell(tmp_path, model_type, {"device": "cuda"} if is_gpu else add_device(monkeypatch, backend=ChosenKernels))
    column = DEVICES[2 if is_gpu else 1]
    assert written(model_type, column) == found, f"write this into {model_type}'s row, column {column}"
