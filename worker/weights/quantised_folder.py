"""Hugging Face folders whose matrices are quantised, seen as plain ones: `X.weight` for whatever X's tensors are.

Which tensors a matrix has says how it is quantised; the config adds what they do not say. Read are fp8 as by vLLM's
`fp8`, `fbgemm_fp8` and compressed-tensors' `float-quantized` (X.weight, and X.weight_scale or X.weight_scale_inv, which
is a scale as well).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allspan.protos.errors import CheckpointError
from allspan.worker.weights.quantised_matrix import QuantisedMatrix, ScaledMatrix
from allspan.worker.weights.safetensors_folder import SafetensorsFolder

METHODS = {"fp8": "fp8", "fbgemm_fp8": "fp8", "compressed-tensors": "compressed-tensors"}
"""quant_method of a config → how it is to be held: `allspan.worker.quant.table`."""

PLAIN = "plain"
"""The kind of a tensor that is not quantised."""

_FP8 = ("weight_scale", "weight_scale_inv")
_UNUSED = ("input_scale", "output_scale", "k_scale", "v_scale", "q_scale", "kv_scale", "input_scale_ub")
"""Scales for activations, which get their own as they come."""


class QuantisedFolder:
    """See `allspan.worker.weights.checkpoint.QuantisedCheckpoint`. Matrices are looked into before anything is read."""

    naming = "hugging_face"

    def __init__(self, folder: Path, config: Mapping[str, Any], source: str) -> None:
        """`config`: the quantization_config, found in the file `source`. Raises CheckpointError for what is not
        supported, and if nothing is quantised."""
        self._folder = SafetensorsFolder(folder)
        self._config, self._source = config, source
        names = set(self._folder.names())
        self._matrices: dict[str, QuantisedMatrix] = {}
        used: set[str] = set()
        for suffix, make in _FORMS.items():
            for name in sorted(names):
                stem, _, last = name.rpartition(".")
                if last == suffix:
                    tensors = {each: f"{stem}.{each}" for each in _ALL_SUFFIXES if f"{stem}.{each}" in names}
                    self._matrices[f"{stem}.weight"] = self._checked(stem, tensors, make)
                    used.update(tensors.values())
        self._plain = names - used - {name for name in names if name.rpartition(".")[2] in _UNUSED}
        if not self._matrices:
            raise CheckpointError(
                f"{source} names weights quantised by {config.get('quant_method')!r}, and {folder} has none "
                f"(looked for {', '.join(f'*.{suffix}' for suffix in _FORMS)})"
            )

    @property
    def method(self) -> str:
        """How it is to be held."""
        return METHODS[self._config["quant_method"]]

    def names(self) -> Collection[str]:
        return self._plain | self._matrices.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        matrix = self._matrices.get(name)
        return self._folder.shape(name) if matrix is None else matrix.shape

    def where(self, name: str) -> Path:
        return self._folder.where(name)

    def kinds(self) -> dict[str, str]:
        """How each tensor is stored: see `QuantisedMatrix.kind`."""
        return dict.fromkeys(self._plain, PLAIN) | {name: matrix.kind for name, matrix in self._matrices.items()}

    def read(self, name: str, ranges: Sequence[range], out: Tensor) -> None:
        matrix = self._matrices.get(name)
        if matrix is None:
            self._folder.read(name, ranges, out)
        elif out.numel():
            out.copy_(matrix.floats(ranges[0], ranges[1]))

    def fields(self, name: str, rows: range, inputs: range) -> dict[str, Tensor]:
        return self._matrices[name].fields(rows, inputs)

    def release(self) -> None:
        self._folder.release()

    def _checked(self, stem: str, tensors: Mapping[str, str], make: Make) -> QuantisedMatrix:
        views = {suffix: self._folder.view(name) for suffix, name in tensors.items()}
        try:
            return make(views, self._config)
        except (ValueError, KeyError) as error:
            shapes = ", ".join(f"{suffix} {list(view.shape)}" for suffix, view in views.items())
            where = self._folder.where(next(iter(tensors.values())))
            raise CheckpointError(f"{where}: {stem!r} ({shapes}): {error} ({self._source})") from error


Make = Callable[[Mapping[str, Tensor], Mapping[str, Any]], QuantisedMatrix]
"""From the tensors of a matrix by their suffixes, and the config. Raises ValueError or KeyError."""


def _scaled(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> QuantisedMatrix:
    weight = tensors["weight"]
    scale = next(tensors[suffix] for suffix in _FP8 if suffix in tensors)
    if weight.dtype is not torch.float8_e4m3fn:
        raise ValueError(f"weights are {weight.dtype}, which is not supported (torch.float8_e4m3fn)")
    outputs, inputs = weight.shape
    block = _block(config)
    if scale.numel() == 1:
        tall, group, scale = outputs, -1, scale.reshape(1, 1)
    elif scale.numel() == outputs and (block is None or scale.ndim == 1):
        tall, group, scale = 1, -1, scale.reshape(outputs, 1)
    elif block is not None and scale.shape == (-(-outputs // block[0]), -(-inputs // block[1])):
        tall, group = block
    else:
        raise ValueError(f"the scales are neither one for all, nor for each output, nor for blocks of {block}")
    return ScaledMatrix("fp8", (outputs, inputs), group, None, weight, scale, tall, None)


_FORMS: Mapping[str, Make] = {"weight_scale": _scaled, "weight_scale_inv": _scaled}
"""A suffix that only matrices of this form have → how they are made."""

_ALL_SUFFIXES = ("weight", *_FP8)


def _block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Outputs and inputs that share a scale."""
    found = config.get("weight_block_size")
    for group in (config.get("config_groups") or {}).values():
        found = found or (group.get("weights") or {}).get("block_structure")
    if not found:
        return None
    tall, wide = found
    return int(tall), int(wide)
