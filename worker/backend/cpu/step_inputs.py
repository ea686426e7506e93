"""Step inputs for a device that reads host memory, or that takes a copy of every tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from allspan.worker.cache.budget import pages_of
from allspan.worker.step.buffer_sizes import BatchSizes
from allspan.worker.step.inputs import StepInputs, axis_names, group_name, with_groups

Ints = NDArray[np.int32]


_HOST = torch.device("cpu")
_CHANGING = ("ids", "positions", "slots", "kv_lens")
"""Other numbers at every step, also where nothing else changes; token ids first."""
_MOST_KEPT = 32
"""The step inputs that are kept to be given out again."""


class StepBuffers:
    """int32 buffers of fixed capacity, filled through numpy and handed out as tensor views on the model's device."""

    wants_common = False
    runs_ahead = False
    splits_drafts = False

    def __init__(self, sizes: BatchSizes, device: torch.device = _HOST) -> None:
        pages = sizes.max_rows * pages_of(sizes.max_model_len, sizes.page_size)  # rows may share pages
        lengths = {
            "qo_indptr": sizes.max_rows + 1,
            "page_indptr": sizes.max_rows + 1,
            "page_indices": pages,
            "logits_rows": sizes.max_logits_rows,
        }
        tokens = max(sizes.max_tokens, sizes.max_rows)
        lengths["adapters"] = tokens
        if sizes.attention_ranks > 1:
            lengths |= {"own_rows": tokens, "own_places": tokens}
        changing = [*_CHANGING, *axis_names(sizes.num_positions)]
        for group, lifetime in enumerate(sizes.lifetimes[1:], start=1):
            slots, indptr, indices = (group_name(name, group) for name in ("slots", "page_indptr", "page_indices"))
            if lifetime.is_state:  # a token's slot is its request's page at every step
                lengths |= {slots: tokens, indptr: sizes.max_rows + 1, indices: sizes.max_rows}
            else:
                lengths[indices] = pages
                changing.append(slots)
        self._device = device
        self._num_groups = len(sizes.lifetimes)
        self.is_shared = device == _HOST
        self._tensors = {name: torch.zeros(length, dtype=torch.int32) for name, length in lengths.items()}
        rows = torch.zeros((len(changing), tokens), dtype=torch.int32)
        self._tensors |= zip(changing, rows, strict=True)
        self._changing: Ints = rows.numpy()
        self._arrays: dict[str, Ints] = {name: tensor.numpy() for name, tensor in self._tensors.items()}
        self._kept: dict[tuple[object, ...], StepInputs] = {}
        """What was given out, by the names and lengths of its tensors: a request alternates between few."""

    def fill(
        self, values: dict[str, NDArray[Any]], common: Ints | None = None, num_requests: int | None = None
    ) -> StepInputs:
        """See `allspan.worker.step.inputs.InputBuffers`."""
        for name, value in values.items():
            self._arrays[name][: len(value)] = value
        if not self.is_shared:
            return self._views(values)
        shape = (*values, *map(len, values.values()))
        if (kept := self._kept.get(shape)) is None:
            if len(self._kept) == _MOST_KEPT:
                del self._kept[next(iter(self._kept))]
            kept = self._kept[shape] = self._views(values)
        return kept

    def _views(self, values: dict[str, NDArray[Any]]) -> StepInputs:
        views: dict[str, Any] = {}
        for name, value in values.items():
            view = self._tensors[name][: len(value)]
            views[name] = view if self.is_shared else view.to(self._device)
        return with_groups(views, self._num_groups)

    def advance(self, tokens: Ints) -> None:
        """The same rows again, each with the next token, in the page that it is in. In place, so that the views that
        `fill` gave out for a CPU show it."""
        changing = self._changing[:, : len(tokens)]
        changing += 1
        changing[0] = tokens
