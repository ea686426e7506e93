"""A checkpoint: named tensors on disk, of which a rank reads only its slices."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from allspan.protos.api.errors import CheckpointError

_IN_LAYER = re.compile(r"(?:model\.layers|blk)\.(\d{1,9})\.")


class Checkpoint(Protocol):
    """Tensors under the names of their format; files are memory-mapped, so opening one reads headers only."""

    naming: str
    """The column of a WeightMap that holds this format's names."""

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of the whole tensor, [out, in] for a matrix."""

    def where(self, name: str) -> Path:
        """The file that holds the tensor, or (for a missing one) the checkpoint itself."""

    def read(self, name: str, ranges: Sequence[range], out: Tensor) -> None:
        """Copies the slice `ranges` (one range a dimension, perhaps with a step) into `out`, converting to its dtype;
        reads no more."""

    def release(self) -> None:
        """Gives back what reading has left in this process's memory; the checkpoint stays usable."""


@runtime_checkable
class BlockCheckpoint(Checkpoint, Protocol):
    """A checkpoint of quantised types, whose blocks can be had as they are."""

    def blocks(self, name: str, rows: range, inputs: range) -> Tensor:
        """uint8 [rows, bytes]: the whole blocks of the matrix's type that hold `inputs`. Where a tensor has a matrix
        for each expert, rows are counted through all of them."""


@runtime_checkable
class QuantisedCheckpoint(Checkpoint, Protocol):
    """A checkpoint whose matrices have codes and scales of their own."""

    def fields(self, name: str, rows: range, inputs: range, device: torch.device) -> dict[str, Tensor]:
        """Codes, scales and offsets, on `device`, which unpacks them: see
        `allspan.worker.weights.quantised_matrix.QuantisedMatrix.fields`. Rows as in `BlockCheckpoint.blocks`."""

    def order(self, name: str, expert: int) -> Tensor:
        """int32 [in]: the inputs in the order in which `fields` has them; where a tensor has a matrix for each expert,
        this one's."""


def draft_layers(names: Collection[str], count: int) -> tuple[str, ...]:
    """Returns the beginnings of the names of layers from number `count` on, which draft tokens."""
    found = {match[0] for name in names if (match := _IN_LAYER.match(name)) and int(match[1]) >= count}
    return tuple(sorted(found))


def check_tensors(
    checkpoint: Checkpoint,
    expected: dict[str, tuple[int, ...]],
    ignored: Collection[str],
    skipped: Collection[str] = (),
) -> None:
    """Before anything is read: every expected tensor is there with its shape, and none is left over.

    A left-over tensor (a bias that the config does not speak of, say) would mean another model than the one computed.
    Names that end in one of `ignored` or begin with one of `skipped` may be left over.
    """
    names = checkpoint.names()
    for name, shape in expected.items():
        if name not in names:
            where = checkpoint.where(name)
            raise CheckpointError(f"{where}: tensor {name!r} is missing (expected with shape {list(shape)})")
        actual = checkpoint.shape(name)
        if actual != shape:
            raise CheckpointError(
                f"{checkpoint.where(name)}: tensor {name!r} has shape {list(actual)}, expected {list(shape)}"
            )
    for name in names:
        if name not in expected and not name.endswith(tuple(ignored)) and not name.startswith(tuple(skipped)):
            raise CheckpointError(
                f"{checkpoint.where(name)}: tensor {name!r} is not part of the model that the config describes"
            )
