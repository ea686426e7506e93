"""The sizes that a GPU's steps are padded to, and where each input of a step lies in the buffer that is copied over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from allspan.worker.cache.spec import PageLifetime
from allspan.worker.step.inputs import axis_names, group_name

_ALIGNMENT = 4
"""int32s: kernels read 16 bytes at a time."""
_MOST_CHUNK = 2048
"""From about here on the GPU is longer at a step's kernels than the host at launching them one by one."""


def decode_buckets(max_rows: int) -> tuple[int, ...]:
    """Numbers of rows for which a decode step is captured; others are padded to the next. Few rows are worth a graph
    each, of many the padding costs little."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_rows + 1, 32)]
    return (*(rows for rows in steps if rows < max_rows), max_rows)


def chunk_buckets(max_tokens: int) -> tuple[int, ...]:
    """Numbers of tokens for which a step with prompts is captured: tiles of products are as high, so that rows which
    fill the last one up cost little."""
    steps = (16, 32, 64, *range(128, _MOST_CHUNK, 128))
    most = min(max_tokens, _MOST_CHUNK)
    return (*(tokens for tokens in steps if tokens < most), most)


class InputNames:
    """The names of a step's inputs, by how many numbers they have; those of the cache groups behind the first have the
    group's index (see `group_name`)."""

    def __init__(self, lifetimes: Sequence[PageLifetime], num_positions: int = 1) -> None:
        groups, states = range(len(lifetimes)), [i for i, each in enumerate(lifetimes) if each.is_state]
        self.num_groups = len(groups)
        self.slots = tuple(group_name("slots", group) for group in groups)
        self.tokens = ("ids", "positions", *axis_names(num_positions), *self.slots)
        """One number a token."""
        self.page_indptrs = ("page_indptr", *(group_name("page_indptr", group) for group in states if group))
        self.page_tables = tuple(group_name("page_indices", group) for group in groups)

    def nothing(self, more: Sequence[str] = ()) -> dict[str, NDArray[Any]]:
        """The inputs of a step without tokens; `more` names further inputs of no numbers."""
        none = np.zeros(0, dtype=np.int32)
        values: dict[str, NDArray[Any]] = dict.fromkeys(
            (*self.tokens, "kv_lens", "logits_rows", *self.page_tables, *more), none
        )
        return values | dict.fromkeys(("qo_indptr", *self.page_indptrs), np.zeros(1, dtype=np.int32))


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Where each input lies in the buffer. Page tables lie behind all else: only the part in use is copied."""

    spans: Mapping[str, tuple[int, int]]
    """First and last + 1 number, by name."""
    tables: tuple[str, ...]
    """The page tables, in their order."""

    @classmethod
    def of(cls, lengths: Mapping[str, int], tables: tuple[str, ...]) -> StepLayout:
        """Inputs of so many numbers, one behind the other."""
        spans, at = {}, 0
        for name in (*(name for name in lengths if name not in tables), *tables):
            spans[name] = at, at + lengths[name]
            at += aligned(lengths[name])
        return cls(spans, tables)

    def used(self, values: Mapping[str, NDArray[Any]]) -> Iterator[tuple[int, int]]:
        """The spans that hold a step's values: everything up to the first page table's end, and the other tables."""
        for name in self.tables:
            first = self.spans[name][0]
            yield 0 if name == self.tables[0] else first, first + len(values[name])

    def views(self, buffer: Tensor) -> dict[str, Any]:
        """The inputs' tensors, by name."""
        return {name: buffer[first:last] for name, (first, last) in self.spans.items()}


def aligned(length: int) -> int:
    """The numbers from one input's beginning to the next one's."""
    return -(-length // _ALIGNMENT) * _ALIGNMENT
