"""What one forward pass reads: the step's tokens and where their KV lies. Filled by the runner, read by every op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

PlanTiles = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.int32]]
"""From the new tokens and all tokens of some requests to what `StepInputs.tiles` holds of them."""


@dataclass(frozen=True, slots=True)
class SharedInputs:
    """Of decodes that begin with the same pages, read once for all who share them; int32 tensors, on the GPU.

    Made of an `allspan.kernels.cuda.sharing.Sharing`: the level's tiles, rows and pages, and each row's own pages, in
    the indices of the whole page table.
    """

    tiles: Tensor
    """[tiles, 2]."""
    qo_indptr: Tensor
    """[groups + 1]."""
    page_indptr: Tensor
    """[groups + 1]."""
    kv_lens: Tensor
    """[groups]."""
    own_page_indptr: Tensor
    """[R + 1]."""
    own_kv_lens: Tensor
    """[R]."""


@dataclass(slots=True)
class StepInputs:
    """Views into buffers of fixed capacity, cut to this step's sizes. Tensors are int32, on the model's device.

    n new tokens, R requests with new tokens, m rows whose logits are wanted. Given to a model again, it has the same
    tensors as before, though there may be other numbers in them.
    """

    ids: Tensor
    """[n] token ids."""
    positions: Tensor
    """[n]."""
    slots: Tensor
    """[n]: page · page_size + offset."""
    qo_indptr: Tensor
    """[R + 1]."""
    page_indptr: Tensor
    """[R + 1]."""
    page_indices: Tensor
    """[page_indptr[R]]."""
    kv_lens: Tensor
    """[R], the new tokens included."""
    logits_rows: Tensor
    """[m]: which of the n tokens."""
    num_decodes: int = 0
    """On a GPU the requests with one new token come first: so many."""
    tiles: Tensor | None = None
    """On a GPU [tiles, ...]: how the new tokens of the others are cut; see `allspan.kernels.cuda.prefill`."""
    bucket: int = 0
    """On a GPU: the step is one of decodes alone, padded to so many rows; 0: it is not."""
    num_rows: int = 0
    """With a bucket: so many of its rows are real."""
    shared: SharedInputs | None = None
    """With a bucket: what its rows share, where that pays."""
