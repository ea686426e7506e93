"""Packer fills packed weights (`allspan.kernels.packed_spec`), by compiled code on an op set's threads or by torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from allspan.kernels.packed_spec import FEATURES, PackedSpec
from allspan.kernels.reference import packer as reference
from allspan.kernels.reference.gguf_blocks import GGUF_BLOCK_BYTES, grid


@dataclass(frozen=True, slots=True)
class Target:
    """Where rows go: feature `first` of a part, and on. `first` is a multiple of 16, and so is the number of rows but
    for a part's last ones."""

    spec: PackedSpec
    part: int
    first: int
    weight: Tensor
    """uint8 spec.shape."""


class Packer:
    """Each call packs some rows: into panels on the CPU, into rows where the weight lies. Everything that is not given
    is filled with zeros."""

    def __init__(self, runtime: Any = None) -> None:
        """`runtime`: of an op set with compiled kernels; None: plain torch."""
        native = None if runtime is None else importlib.import_module("allspan.kernels.cpu._native")
        self._runtime = runtime
        self._native: Any = native if hasattr(native, "pack_floats") else None

    def floats(self, values: Tensor, target: Target) -> None:
        """values [rows, inputs], float32 for f32, bfloat16 for bf16 and float16 for f16."""
        self._check(values, target, target.spec.inputs)
        values = _beside(values, target)
        if self._is_native(target):
            self._native.pack_floats(self._runtime, values, *_arguments(target))
        else:
            reference.pack_floats(values, *_arguments(target))

    def quantise(self, values: Tensor, before: int, target: Target) -> None:
        """InstantQuant, to channel8, channel4, group8 or group4. values float32 [rows, inputs of this rank and others].

        For each feature and group (all of `values`, per channel) with codes up to most: scale = (max - min) / most, and
        1 for 0; offset = -min; code = round((w + offset) / scale) within 0 … most, halves to even. Scales and offsets
        of groups are rounded to float16 first; the offset of channel8 is rounded to a whole number of scales, so that
        0 is exact. Of fp8, scale = max |w| / 448 and code = w / scale, the nearest e4m3 number. A NaN or an infinity
        makes scale and offset NaN. `values` begins `before` inputs before this rank's; with groups, that is the spec's
        k_offset.
        """
        spec, inputs = target.spec, values.shape[1]
        if before < 0 or before + spec.inputs > inputs or (spec.group and before != spec.k_offset):
            raise ValueError(f"before: {before} does not fit {inputs} inputs and {spec}")
        self._check(values, target, values.shape[1])
        values = _beside(values, target)
        if self._is_native(target):
            self._native.pack_quantised(self._runtime, values, before, *_arguments(target))
        else:
            reference.pack_quantised(values, before, *_arguments(target))

    def blocks(self, blocks: Tensor, target: Target) -> None:
        """GGUF's own blocks, uint8 [rows, bytes], of the type that the format is named after (Q4_1 for group4): those
        that hold this rank's inputs, whole."""
        self._check(blocks, target, target.spec.blocks * GGUF_BLOCK_BYTES[target.spec.format])
        if self._is_native(target):
            self._native.pack_blocks(self._runtime, blocks, grid(target.spec.format), *_arguments(target))
        else:
            reference.pack_blocks(blocks, *_arguments(target))

    def fields(self, fields: Mapping[str, Tensor], target: Target) -> None:
        """What a packed weight is made of, as `allspan.kernels.reference.packed_linear` has it; codes may end before
        the last block does."""
        spec, codes = target.spec, fields["codes"]
        self._check(codes, target, codes.shape[1])
        whole = {name: _beside(values, target) for name, values in fields.items()}
        if codes.shape[1] > spec.blocks * spec.block:
            raise ValueError(f"codes: {list(codes.shape)} are more than {spec} has")
        whole["codes"] = functional.pad(whole["codes"], (0, spec.blocks * spec.block - codes.shape[1]))
        reference.pack_fields(whole, *_arguments(target))

    def _is_native(self, target: Target) -> bool:
        return self._native is not None and target.spec.memory == "panels"

    def _check(self, rows: Tensor, target: Target, columns: int) -> None:
        spec = target.spec
        last = target.first + len(rows)
        if tuple(target.weight.shape) != spec.shape or target.weight.dtype is not torch.uint8:
            raise ValueError(f"weight: {target.weight.dtype} {list(target.weight.shape)} is not what {spec} says")
        if rows.shape[1:] != (columns,) or target.first % FEATURES or last > spec.parts[target.part]:
            raise ValueError(f"rows: {list(rows.shape)} from {target.first} on do not fit part {target.part} of {spec}")
        if last % FEATURES and last != spec.parts[target.part]:
            raise ValueError(f"rows: {last} ends within a panel")


def _beside(values: Tensor, target: Target) -> Tensor:
    """On the GPU, if the weight lies there."""
    return values.to(target.weight.device)


def _arguments(target: Target) -> tuple[Tensor, PackedSpec, int, int]:
    return target.weight, target.spec, target.part, target.first // FEATURES
