"""A step's inputs for the CPU, and what every kind of them must have room for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from allspan.worker.cache.budget import pages_of
from allspan.worker.step.inputs import StepInputs

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """How much one step and one row may hold."""

    max_rows: int
    max_tokens: int
    """Of a step."""
    max_model_len: int
    page_size: int
    max_logits_rows: int
    """Of a step."""


class InputBuffers(Protocol):
    """int32 buffers of fixed capacity; `fill` gives out tensor views on the model's device."""

    is_shared: bool
    """What `fill` gives out are views of the buffers, not copies: then `advance` works."""
    wants_common: bool
    """`fill` makes something of what decodes have in common."""

    def fill(self, values: dict[str, NDArray[Any]], common: Ints | None = None) -> StepInputs:
        """All of `StepInputs`' tensors by name. `common`, in a step of decodes: see `SharedPages.of`."""

    def advance(self, tokens: Ints) -> None:
        """The same rows again, each with the next token, in the page that it is in; only where `is_shared`."""


_CHANGING = ("ids", "positions", "slots", "kv_lens")
"""Other numbers at every step, also where nothing else changes; token ids first."""


class StepBuffers:
    """int32 buffers of fixed capacity, filled through numpy and handed out as tensor views on the model's device."""

    wants_common = False

    def __init__(self, sizes: BatchSizes, device: torch.device) -> None:
        pages = sizes.max_rows * pages_of(sizes.max_model_len, sizes.page_size)  # rows may share pages
        lengths = {
            "qo_indptr": sizes.max_rows + 1,
            "page_indptr": sizes.max_rows + 1,
            "page_indices": pages,
            "logits_rows": sizes.max_logits_rows,
        }
        self._device = device
        self.is_shared = device.type == "cpu"
        """What `fill` gives out are views of the buffers, not copies."""
        self._tensors = {name: torch.zeros(length, dtype=torch.int32) for name, length in lengths.items()}
        changing = torch.zeros((len(_CHANGING), max(sizes.max_tokens, sizes.max_rows)), dtype=torch.int32)
        self._tensors |= zip(_CHANGING, changing, strict=True)
        self._changing: Ints = changing.numpy()
        self._arrays: dict[str, Ints] = {name: tensor.numpy() for name, tensor in self._tensors.items()}

    def fill(self, values: dict[str, NDArray[Any]], common: Ints | None = None) -> StepInputs:
        views: dict[str, Any] = {}
        for name, value in values.items():
            self._arrays[name][: len(value)] = value
            view = self._tensors[name][: len(value)]
            views[name] = view if self.is_shared else view.to(self._device)
        return StepInputs(**views)

    def advance(self, tokens: Ints) -> None:
        """The same rows again, each with the next token, in the page that it is in. In place, so that the views that
        `fill` gave out for a CPU show it."""
        changing = self._changing[:, : len(tokens)]
        changing += 1
        changing[0] = tokens
