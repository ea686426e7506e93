"""The sizes that a GPU's steps are padded to, and where each input of a step lies in the buffer that is copied over."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from allspan.kernels.cuda.latent.expand_rule import LEAST_ROWS, ExpandRule
from allspan.worker.step.buffer_sizes import BatchSizes
from allspan.worker.step.inputs import ExpandedInputs, PlanTiles, axis_names, group_name

Ints = NDArray[Any]

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


class PromptForm(NamedTuple):
    """How the prompts of a step are attended to."""

    made: int = 0
    """Keys and values are made of latents of so many tokens, at most."""
    keeps: bool = True
    """Whether there may be prompts that are attended to as pages hold them."""


class PromptForms:
    """The forms that steps with prompts are captured in, and what attention takes of a step's prompts."""

    _TILES, _EXPANDED_TILES, _INDPTR = "tiles", "expanded tiles", "expanded indptr"

    def __init__(self, plan_tiles: PlanTiles, rule: ExpandRule | None, attention_ranks: int) -> None:
        """`rule` None: no keys and values are made."""
        self._plan_tiles, self._rule, self._is_alone = plan_tiles, rule, attention_ranks == 1

    def captured(self, bucket: int, own: int) -> tuple[PromptForm, ...]:
        """Forms of a step of `bucket` tokens, of which the rank attends for `own`, those that compute least first."""
        if self._rule is None or own < LEAST_ROWS:
            return (PromptForm(),)
        most = PromptForm(self._rule.captured(own))
        return PromptForm(own, False), *([most._replace(keeps=False)] if bucket > SMALL_CHUNK else ()), most

    def choose(self, bucket: int, own: int, new: Ints, lens: Ints) -> PromptForm | None:
        """The form of a captured step whose prompts have so many new tokens, and tokens; None: launching it op by op is
        faster. Ranks that attend for requests of their own do not know of each other's, and launch what is captured."""
        forms = self.captured(bucket, own)
        form = next((form for form in forms if form.keeps or lens.sum() <= form.made), forms[-1])
        if self._rule and form.made and form.keeps and self._is_alone:
            return None if self._rule.launches(new, lens - new, form.made) else form
        return form

    def cut(self, decodes: int, new: Ints, lens: Ints, form: PromptForm | None) -> tuple[dict[str, Ints], PromptForm]:
        """The inputs of prompts that come behind so many decodes, and their form; `form` None: what computes least."""
        made = np.zeros(len(new), dtype=np.bool_)
        if form is not None and not form.keeps:
            made[:] = True
        elif self._rule and (new.sum() + decodes >= LEAST_ROWS if form is None else form.made):
            made = self._rule.choose(new, lens - new, self._rule.most if form is None else form.made)
        each = np.where(made, lens, 0)
        form = form or PromptForm(int(each.sum()))
        values = {self._TILES: self._tiles(decodes, np.where(made, 0, new), lens)} if form.keeps else {}
        if form.made:
            values[self._EXPANDED_TILES] = self._tiles(decodes, np.where(made, new, 0), lens)
            values[self._INDPTR] = np.concatenate((np.zeros(decodes + 1, np.int32), np.cumsum(each, dtype=np.int32)))
        return values, form

    def lengths(self, own: int, requests: int, form: PromptForm) -> dict[str, int]:
        """How many numbers `cut` gives of up to so many tokens and requests, by name."""
        tiles = 2 * self._plan_tiles.most(own, requests)
        made = {self._EXPANDED_TILES: tiles, self._INDPTR: requests + 1} if form.made else {}
        return made | ({self._TILES: tiles} if form.keeps else {})

    def paddings(self, values: Mapping[str, Ints]) -> dict[str, int]:
        """What stands for numbers of `cut` that there are not."""
        ends = {self._INDPTR: int(values[self._INDPTR][-1])} if self._INDPTR in values else {}
        return {self._TILES: -1, self._EXPANDED_TILES: -1} | ends

    def take(self, views: dict[str, Any], form: PromptForm) -> dict[str, Any]:
        """The step's tensors, among them those of `cut` by their fields."""
        if self._TILES in views:
            views[self._TILES] = views[self._TILES].view(-1, 2)
        if form.made:
            tiles, indptr = views.pop(self._EXPANDED_TILES).view(-1, 2), views.pop(self._INDPTR)
            views["expanded"] = ExpandedInputs(tiles, indptr, form.made)
        return views

    def _tiles(self, decodes: int, new: Ints, lens: Ints) -> Ints:
        tiles = self._plan_tiles(new, lens)
        tiles[:, 0] += decodes
        return tiles.reshape(-1)


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

    def nothing(self) -> dict[str, NDArray[Any]]:
        """The inputs of a step without tokens."""
        none = np.zeros(0, dtype=np.int32)
        values: dict[str, NDArray[Any]] = dict.fromkeys(
            (*self.every, *self.tokens, "kv_lens", "logits_rows", *self.page_tables), none
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
