"""Hugging Face folders whose matrices are quantised, seen as plain ones: `X.weight` for whatever X's tensors are."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allspan.protos.api.errors import CheckpointError
from allspan.worker.weights.quantised_config import check_config
from allspan.worker.weights.quantised_forms import MARKS, STACKED_MARKS, SUFFIXES, quantised_matrix
from allspan.worker.weights.quantised_matrix import QuantisedMatrix
from allspan.worker.weights.tensor_folder import TensorFolder

METHODS = {
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "gptq": "gptq",
    "awq": "awq",
    "compressed-tensors": "compressed-tensors",
}
"""quant_method of a config → how it is to be held: `allspan.worker.quant.table`."""

PLAIN = "plain"
"""The kind of a tensor that is not quantised."""

_UNUSED = (
    *(f".{each}" for each in ("input_scale", "output_scale", "k_scale", "v_scale", "q_scale", "kv_scale")),
    ".input_scale_ub",
    "activation_scale",
)
"""Endings of scales for activations, which get their own as they come."""

_CODES = ("F8_E4M3", "I8")
"""Dtypes of matrices that are nothing without scales."""


class QuantisedFolder:
    """See `allspan.worker.weights.checkpoint.QuantisedCheckpoint`. Matrices are looked into before anything is read."""

    naming = "hugging_face"

    def __init__(self, folder: Path, config: Mapping[str, Any], source: str) -> None:
        """`config`: the quantization_config, found in the file `source`. Raises CheckpointError for what is not
        supported, and if nothing is quantised."""
        check_config(config, source)
        self._folder = TensorFolder(folder)
        self._config, self._source = config, source
        names = set(self._folder.names())
        self._matrices: dict[str, QuantisedMatrix] = {}
        self._first: dict[str, str] = {}
        """Matrix → the name of one of its tensors, which is in the file."""
        used = {name for name in names if name.endswith(_UNUSED)}
        for name in sorted(names - used):
            stem, _, suffix = name.rpartition(".")
            whole = next((name.removesuffix(mark) for mark in STACKED_MARKS if name.endswith(mark)), "")
            tensors: dict[str, str] = {}
            if suffix in MARKS:
                whole = f"{stem}.weight"
                tensors = {each: f"{stem}.{each}" for each in SUFFIXES if f"{stem}.{each}" in names}
            elif whole in names:  # the matrices of all experts
                marks = {f"weight{mark}": whole + mark for mark in STACKED_MARKS if whole + mark in names}
                tensors = {"weight": whole} | marks
            if tensors and whole not in self._matrices:
                self._matrices[whole] = self._matrix(whole.removesuffix(".weight"), tensors)
                self._first[whole] = name
                used.update(tensors.values())
        self._plain = names - used
        for name in sorted(self._plain):
            if self._folder.dtype(name) in _CODES:
                raise CheckpointError(
                    f"{self._folder.where(name)}: tensor {name!r} has dtype {self._folder.dtype(name)}, and there are "
                    f"no scales for it ({', '.join(mark for mark in MARKS if 'scale' in mark)})"
                )
        self._near: tuple[str, torch.device, QuantisedMatrix] | None = None
        if not self._matrices:
            raise CheckpointError(
                f"{source} names weights quantised by {config.get('quant_method')!r}, and {folder} has none "
                f"(looked for {', '.join(f'*.{suffix}' for suffix in MARKS)})"
            )

    @property
    def method(self) -> str:
        """How it is to be held."""
        return METHODS[self._config.get("quant_method") or self._config["quant_type"]]

    def names(self) -> Collection[str]:
        return self._plain | self._matrices.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        matrix = self._matrices.get(name)
        return self._folder.shape(name) if matrix is None else matrix.dimensions

    def where(self, name: str) -> Path:
        return self._folder.where(self._first.get(name, name))

    def kinds(self) -> dict[str, str]:
        """How each tensor is stored: see `QuantisedMatrix.kind`."""
        return dict.fromkeys(self._plain, PLAIN) | {name: matrix.kind for name, matrix in self._matrices.items()}

    def idle_biases(self, expected: Collection[str]) -> tuple[str, ...]:
        """Biases of quantised matrices that a model does not expect and that are all 0: some tools write them for every
        layer."""
        biases = (name.removesuffix("weight") + "bias" for name in self._matrices)
        unexpected = (name for name in biases if name in self._plain and name not in expected)
        return tuple(name for name in unexpected if not self._folder.view(name).any())

    def read(self, name: str, ranges: Sequence[range], out: Tensor) -> None:
        matrix = self._matrices.get(name)
        if matrix is None:
            self._folder.read(name, ranges, out)
        elif out.numel():
            *expert, rows, inputs = ranges
            first = expert[0].start * matrix.dimensions[1] if expert else 0
            out.copy_(matrix.floats(range(first + rows.start, first + rows.stop), inputs)[:: rows.step])

    def fields(self, name: str, rows: range, inputs: range, device: torch.device) -> dict[str, Tensor]:
        if self._near is None or self._near[:2] != (name, device):  # rows come in pieces, matrix after matrix
            self._near = name, device, self._matrices[name].to(device)
        fields = self._near[2].fields(range(rows.start, rows.stop), inputs)
        return {field: values[:: rows.step] for field, values in fields.items()}

    def order(self, name: str, expert: int) -> Tensor:
        return self._matrices[name].order(expert)

    def release(self) -> None:
        self._near = None
        self._folder.release()

    def _matrix(self, stem: str, tensors: Mapping[str, str]) -> QuantisedMatrix:
        views = {suffix: self._folder.view(name) for suffix, name in tensors.items()}
        try:
            return quantised_matrix(views, self._config)
        except (ValueError, KeyError, IndexError, ZeroDivisionError, RuntimeError) as error:
            said = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            shapes = ", ".join(f"{suffix} {list(view.shape)}" for suffix, view in views.items())
            where = self._folder.where(next(iter(tensors.values())))
            raise CheckpointError(f"{where}: {stem!r} ({shapes}): {said} ({self._source})") from error
