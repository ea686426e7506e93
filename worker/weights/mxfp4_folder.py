"""Hugging Face folders whose experts are MXFP4: the blocks of a GGUF file for what `X_blocks` and `X_scales` hold."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from torch import Tensor

from allspan.protos.api.errors import CheckpointError
from allspan.worker.weights.quantised_folder import PLAIN
from allspan.worker.weights.tensor_folder import TensorFolder

MXFP4 = "MXFP4"
"""The kind of the tensors that have blocks, as GGUF files name it."""
_INPUTS, _BYTES = 32, 16
"""The inputs that share a scale, and the bytes of their codes."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_CODES, _SCALES = "_blocks", "_scales"
_NAN = 255


class Mxfp4Folder:
    """See `allspan.worker.weights.checkpoint.BlockCheckpoint`. A tensor `X_blocks` stands for the matrices of all
    experts, [experts, out, in].

    There it is uint8 [experts, out, in / 32, 16], where byte i of a block has inputs 2 · i (the lower half) and
    2 · i + 1, and `X_scales` uint8 [experts, out, in / 32] has exponents of 2, less 127. In GGUF's block the exponent
    comes first, and byte i has inputs i and i + 16.
    """

    naming, method = "hugging_face", "mxfp4"

    def __init__(self, folder: Path, source: str) -> None:
        """Raises CheckpointError if nothing is MXFP4, though the config in the file `source` says so."""
        self._folder = TensorFolder(folder)
        names = set(self._folder.names())
        self._packed = {name for name in names if name.endswith(_CODES)}
        self._names = names - {_scales_of(name) for name in self._packed}
        if not self._packed:
            raise CheckpointError(
                f"{source} names weights quantised by 'mxfp4', and {folder} has none (looked for *{_CODES})"
            )
        for name in sorted(self._packed):
            self._check(name, names)

    def names(self) -> Collection[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self._folder.shape(name)
        return (*shape[:2], shape[2] * _INPUTS) if name in self._packed else shape

    def where(self, name: str) -> Path:
        return self._folder.where(name)

    def kinds(self) -> dict[str, str]:
        """How each tensor is stored."""
        return {name: MXFP4 if name in self._packed else PLAIN for name in self._names}

    def idle_biases(self, expected: Collection[str]) -> tuple[str, ...]:
        """See `allspan.worker.weights.quantised_folder.QuantisedFolder`."""
        return ()

    def read(self, name: str, ranges: Sequence[range], out: Tensor) -> None:
        if name not in self._packed:
            self._folder.read(name, ranges, out)
            return
        (expert,), rows, inputs = ranges
        first = expert * self._folder.shape(name)[1]
        codes, scales = self._blocks(name, range(first + rows.start, first + rows.stop, rows.step), inputs)
        halves = torch.stack((codes & 15, codes >> 4), -1).flatten(2).int()
        table = torch.tensor(_MAGNITUDES + tuple(-each for each in _MAGNITUDES))
        values = torch.ldexp(table[halves], scales.int().unsqueeze(2) - 127).flatten(1)
        start = inputs.start % _INPUTS
        out.view(len(rows), len(inputs)).copy_(values[:, start : start + len(inputs)])

    def blocks(self, name: str, rows: range, inputs: range) -> Tensor:
        codes, scales = self._blocks(name, rows, inputs)
        low, high = codes[..., : _BYTES // 2], codes[..., _BYTES // 2 :]
        even, odd = low & 15 | high << 4, low >> 4 | high & 0xF0
        made = torch.stack((even, odd), -1).flatten(2)
        return torch.cat((scales.unsqueeze(2), made), 2).flatten(1)

    def release(self) -> None:
        self._folder.release()

    def _blocks(self, name: str, rows: range, inputs: range) -> tuple[Tensor, Tensor]:
        """uint8 [rows, blocks, 16] and [rows, blocks]: those that hold these inputs; rows of all experts are
        counted."""
        taken = slice(rows.start, rows.stop, rows.step), slice(inputs.start // _INPUTS, -(-inputs.stop // _INPUTS))
        codes, scales = self._folder.view(name), self._folder.view(_scales_of(name))
        found = scales.flatten(0, 1)[taken]
        refuse_nan_scales(found, f"{self.where(name)}: tensor {_scales_of(name)!r}", rows, taken[1].start)
        return codes.flatten(0, 1)[taken], found

    def _check(self, name: str, names: Collection[str]) -> None:
        shape, scales = self._folder.shape(name), _scales_of(name)
        if scales not in names:
            raise CheckpointError(f"{self.where(name)}: tensor {scales!r} is missing (expected beside {name!r})")
        if len(shape) != 4 or shape[3] != _BYTES or self._folder.shape(scales) != shape[:3]:
            raise CheckpointError(
                f"{self.where(name)}: {name!r} {list(shape)} and {scales!r} {list(self._folder.shape(scales))} must be "
                f"[experts, out, in / {_INPUTS}, {_BYTES}] and [experts, out, in / {_INPUTS}]"
            )
        if {self._folder.dtype(each) for each in (name, scales)} != {"U8"}:
            raise CheckpointError(f"{self.where(name)}: {name!r} and {scales!r} must have dtype U8")


def refuse_nan_scales(scales: Tensor, what: str, rows: range, first: int) -> None:
    """Raises CheckpointError if one of uint8 [rows, blocks], from block `first` of each row on, is no power of two."""
    if (bad := torch.nonzero(scales == _NAN)).numel():
        row, block = bad[0].tolist()
        raise CheckpointError(
            f"{what} has NaN (byte {_NAN}) for a scale in row {rows[row]}, block {first + block}, and "
            f"{len(bad) - 1} more in what was read; every scale must be 0 to 254: get or convert the checkpoint again"
        )


def _scales_of(name: str) -> str:
    return name.removesuffix(_CODES) + _SCALES
