"""The sizes that a GPU's steps are padded to, and where each input of a step lies in the buffer that is copied over."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from allspan.worker.step.buffer_sizes import BatchSizes
from allspan.worker.step.inputs import axis_names, group_name

_ALIGNMENT = 4
"""int32s: kernels read 16 bytes at a time."""
SMALL_CHUNK, _LARGE_STEP, _MOST_CHUNK = 2048, 1024, 8192
"""Steps of more tokens than the first are captured at multiples of the second, up to the third: the GPU takes longer
for those than the host for launching them."""
_LEAST_FILLED = 15 / 16
"""The share of a large chunk that a step fills at least: with less the GPU takes as long for padding as it may save."""


def decode_buckets(max_rows: int) -> tuple[int, ...]:
    """Numbers of rows for which a decode step is captured; others are padded to the next. Few rows are worth a graph
    each, of many the padding costs little."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_rows + 1, 32)]
    return (*(rows for rows in steps if rows < max_rows), max_rows)


def chunk_buckets(max_tokens: int) -> tuple[int, ...]:
    """Numbers of tokens for which a step with prompts is captured: tiles of products are as high, so that rows which
    fill the last one up cost little."""
    steps = (16, 32, 64, *range(128, SMALL_CHUNK, 128), *range(SMALL_CHUNK, _MOST_CHUNK, _LARGE_STEP))
    most = min(max_tokens, _MOST_CHUNK)
    return (*(tokens for tokens in steps if tokens < most), most)


def chunk_of(tokens: int, chunks: Sequence[int]) -> int:
    """Returns the one of `chunks` that a step of so many tokens is padded to; 0: none."""
    at = bisect_left(chunks, tokens)
    chunk = chunks[at] if at < len(chunks) else 0
    return chunk if chunk <= SMALL_CHUNK or tokens >= _LEAST_FILLED * chunk else 0


def own_buckets(bucket: int, ranks: int) -> tuple[int, ...]:
    """Numbers of tokens that a rank attends for, for each of which a step of `bucket` tokens is captured: about its
    even share and twice as many again, up to all. Only the rank itself computes these rows, so that each takes the size
    that it needs; what all ranks sum up together has `bucket` rows."""
    sizes, size = [], -(-9 * bucket // (8 * ranks))  # the scheduler gives no rank exactly its share
    while size < bucket:
        sizes.append(size)
        size *= 2
    return (*sizes, bucket)


class InputNames:
    """The names of a step's inputs, by how many numbers they have; those of the cache groups behind the first have the
    group's index (see `group_name`)."""

    def __init__(self, sizes: BatchSizes) -> None:
        lifetimes, has_others = sizes.lifetimes, sizes.attention_ranks > 1
        groups, states = range(len(lifetimes)), [i for i, each in enumerate(lifetimes) if each.is_state]
        self.num_groups = len(groups)
        slots = tuple(group_name("slots", group) for group in groups)
        others, adapters = ("own_places",) if has_others else (), ("adapters",) if sizes.num_adapters else ()
        self.every = ("ids", *others, *adapters)
        """One number a token."""
        self.tokens = ("positions", *axis_names(sizes.num_positions), *slots, *(("own_rows",) if has_others else ()))
        """One number a token that the rank attends for."""
        self.paddings: Mapping[str, int] = dict.fromkeys(
            (*slots, *adapters, *(("own_rows", "ids", *others) if has_others else ())), -1
        )
        """What stands for tokens that there are not, where that is no 0."""
        self.page_indptrs = ("page_indptr", *(group_name("page_indptr", group) for group in states if group))
        self.page_tables = tuple(group_name("page_indices", group) for group in groups)

    def nothing(self, more: Sequence[str] = ()) -> dict[str, NDArray[Any]]:
        """The inputs of a step without tokens; `more` names further inputs of no numbers."""
        none = np.zeros(0, dtype=np.int32)
        values: dict[str, NDArray[Any]] = dict.fromkeys(
            (*self.every, *self.tokens, "kv_lens", "logits_rows", *self.page_tables, *more), none
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
