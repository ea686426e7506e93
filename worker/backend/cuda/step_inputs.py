"""A step's inputs for a GPU: one copy to the device a step, at addresses that captured graphs can count on."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from allspan.kernels.cuda.attention.cascade_rule import CascadeRule, Sharing
from allspan.protos.api.errors import InternalError
from allspan.worker.backend.cuda.event_wait import PATIENCE, Event, Patience
from allspan.worker.backend.cuda.streams import Lane
from allspan.worker.cache.budget import pages_of
from allspan.worker.step.buffer_sizes import BatchSizes
from allspan.worker.step.inputs import PlanTiles, SharedInputs, StepInputs

Ints = NDArray[np.int32]

_ALIGNMENT = 4
"""int32s: kernels read 16 bytes at a time."""


def decode_buckets(max_rows: int) -> tuple[int, ...]:
    """Numbers of rows for which a decode step is captured; others are padded to the next. Few rows are worth a graph
    each, of many the padding costs little."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_rows + 1, 32)]
    return (*(rows for rows in steps if rows < max_rows), max_rows)


_MOST_CHUNK = 2048
"""From about here on the GPU is longer at a step's kernels than the host at launching them one by one."""


def chunk_buckets(max_tokens: int) -> tuple[int, ...]:
    """Numbers of tokens for which a step with prompts is captured: tiles of products are as high, so that rows which
    fill the last one up cost little."""
    steps = (16, 32, 64, *range(128, _MOST_CHUNK, 128))
    most = min(max_tokens, _MOST_CHUNK)
    return (*(tokens for tokens in steps if tokens < most), most)


_SHARED = "shared "
_SHARED_NAMES = tuple(field.name for field in fields(SharedInputs))


def _shared_lengths(rule: CascadeRule, bucket: int) -> dict[str, int]:
    """Of what `SharedInputs` holds."""
    groups, tiles = rule.sizes(bucket)
    lengths = (2 * tiles, groups + 1, groups + 1, groups, bucket + 1, bucket)
    return {_SHARED + name: length for name, length in zip(_SHARED_NAMES, lengths, strict=True)}


def _shared_values(sharing: Sharing, indptr: Ints, kv_lens: Ints, page_size: int) -> dict[str, Ints]:
    level, own = sharing.tables(indptr, kv_lens, page_size)
    values = (sharing.tiles.reshape(-1), sharing.qo_indptr, *level, *own)
    return {_SHARED + name: value for name, value in zip(_SHARED_NAMES, values, strict=True)}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where each input lies in the buffer: first and last + 1, by name."""

    spans: dict[str, tuple[int, int]]


class DeviceBuffers:
    """Fills step inputs on the host, in pinned memory where there is a GPU, and copies them over at once.

    Rows that decode must come first. Steps of nothing else are padded to a bucket, and lie where every step of that
    bucket lies: `padding` gives the same inputs without any request, to capture a graph with. Padding rows have no
    tokens in the cache and the slot -1. Steps with prompts are padded likewise (`chunk_padding`), if they are no larger
    than the largest of `chunks`.
    """

    runs_ahead = True
    is_shared = False
    """What `fill` gives out are copies."""

    def __init__(
        self,
        sizes: BatchSizes,
        device: torch.device,
        plan_tiles: PlanTiles,
        rule: CascadeRule | None = None,
        lane: Lane | None = None,
        patience: Patience = PATIENCE,
    ) -> None:
        """`rule` None: what decodes share is not looked at. `lane`: where copies to the device are queued; None: they
        are done at once."""
        self._sizes = sizes
        self.max_tokens = sizes.max_tokens
        self._plan_tiles = plan_tiles
        self._rule = rule
        self._is_gpu = device.type == "cuda"
        self.buckets = decode_buckets(sizes.max_rows)
        self.shared_buckets = frozenset(rows for rows in self.buckets if rule and rule.may_pay(rows))
        """For these there are inputs whose rows share tokens as well."""
        self.chunks: tuple[int, ...] = ()
        """Tokens that steps with prompts are padded to. None at first: without a graph padding is a loss."""
        self.wants_common = rule is not None
        self._common: Ints | None = None
        self._sharing: Sharing | None = None
        """What is made of `_common`."""
        pages = sizes.max_rows * pages_of(sizes.max_model_len, sizes.page_size)
        self._most_pages = pages
        capacity = 3 * sizes.max_tokens + 3 * (sizes.max_rows + 1) + sizes.max_logits_rows + pages
        capacity += 2 * (sizes.max_tokens + sizes.max_rows)  # tiles hold at least one query each, of one KV head or all
        capacity += sizes.max_rows  # those of requests that decode, in a chunk
        if rule is not None:
            capacity += sum(_shared_lengths(rule, sizes.max_rows).values())
        capacity += 32 * _ALIGNMENT
        # Two, so that one can be filled while the copy of the other is still to come. Only then: steps that nobody
        # takes tokens of are waited for by nobody else.
        self._hosts = [torch.zeros(capacity, dtype=torch.int32, pin_memory=self._is_gpu) for _ in range(2)]
        self._arrays: list[Ints] = [host.numpy() for host in self._hosts]
        self._turn = 0
        self._lane, self._patience = lane, patience
        self._copied: list[Event | None] = [None, None]
        self._device = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._padded: dict[tuple[int, bool], tuple[_Place, StepInputs]] = {}
        self._chunked: dict[int, tuple[_Place, StepInputs]] = {}

    def fill(self, values: dict[str, NDArray[Any]], common: Ints | None = None) -> StepInputs:
        counts = np.diff(values["qo_indptr"])
        decodes = int((counts == 1).sum())
        if decodes == len(counts) == len(values["logits_rows"]):
            bucket = self.buckets[bisect_left(self.buckets, decodes)]
            return self._fill_padded(values, decodes, bucket, self._choose(common, bucket))
        if (counts[:decodes] != 1).any():
            raise InternalError("rows with one new token must come first")
        tiles = self._plan_tiles(counts[decodes:], values["kv_lens"][decodes:])
        tiles[:, 0] += decodes
        values = values | {"tiles": tiles.reshape(-1)}
        if chunk := self._chunk(len(values["ids"]), len(values["logits_rows"])):
            return self._fill_chunk(values, decodes, chunk)
        place = self._place({name: len(value) for name, value in values.items()})
        array = self._next()
        for name, (first, last) in place.spans.items():
            array[first:last] = values[name]
        self._send(max(last for _, last in place.spans.values()))
        views: dict[str, Any] = self._views(place)
        views["tiles"] = views["tiles"].view(-1, tiles.shape[1])
        return StepInputs(**views, num_decodes=decodes)

    def advance(self, tokens: Ints) -> None:
        raise InternalError("copies on a device do not show what the host's buffers hold")

    def padding(self, bucket: int, is_shared: bool = False) -> StepInputs:
        """A step of `bucket` rows that are all padding, on the device."""
        none = np.zeros(0, dtype=np.int32)
        names = ("ids", "positions", "slots", "kv_lens", "logits_rows", "page_indices")
        values: dict[str, NDArray[Any]] = dict.fromkeys(names, none)
        values |= dict.fromkeys(("qo_indptr", "page_indptr"), np.zeros(1, dtype=np.int32))
        sharing = self._rule.cut([(bucket, 0)], bucket) if self._rule and is_shared else None
        return self._fill_padded(values, 0, bucket, sharing)

    def chunk_padding(self, bucket: int) -> StepInputs:
        """A step with prompts, of `bucket` tokens that are all padding, on the device."""
        none = np.zeros(0, dtype=np.int32)
        names = ("ids", "positions", "slots", "kv_lens", "logits_rows", "page_indices", "tiles")
        values: dict[str, NDArray[Any]] = dict.fromkeys(names, none)
        values |= dict.fromkeys(("qo_indptr", "page_indptr"), np.zeros(1, dtype=np.int32))
        return self._fill_chunk(values, 0, bucket)

    def _chunk(self, tokens: int, logits: int) -> int:
        """The bucket for a step with prompts; 0: there is none."""
        at = bisect_left(self.chunks, tokens)
        return self.chunks[at] if at < len(self.chunks) and logits <= self._chunk_rows(self.chunks[at]) else 0

    def _chunk_rows(self, bucket: int) -> int:
        """Requests of a chunk, and rows of logits, one each."""
        return min(bucket, self._sizes.max_rows)

    def _fill_chunk(self, values: dict[str, NDArray[Any]], decodes: int, bucket: int) -> StepInputs:
        place, inputs = self._of_chunk(bucket)
        array = self._next()
        values = values | {"decode_rows": np.arange(decodes, dtype=np.int32)}
        ends = {name: values[name][-1] for name in ("qo_indptr", "page_indptr")}
        paddings = ends | dict.fromkeys(("slots", "logits_rows", "decode_rows", "tiles"), -1)
        for name, (first, last) in place.spans.items():
            until = first + len(values[name])
            array[first:until] = values[name]
            if name != "page_indices":
                array[until:last] = paddings.get(name, 0)
        self._send(place.spans["page_indices"][0] + len(values["page_indices"]))
        return replace(inputs, num_rows=len(values["logits_rows"]))

    def _of_chunk(self, bucket: int) -> tuple[_Place, StepInputs]:
        if bucket not in self._chunked:
            rows = self._chunk_rows(bucket)
            lengths = dict.fromkeys(("ids", "positions", "slots"), bucket)
            lengths |= dict.fromkeys(("kv_lens", "logits_rows", "decode_rows"), rows)
            lengths |= dict.fromkeys(("qo_indptr", "page_indptr"), rows + 1)
            lengths |= {"tiles": 2 * self._plan_tiles.most(bucket, rows), "page_indices": self._most_pages}
            place = self._place(lengths)
            views = self._views(place)
            views["tiles"] = views["tiles"].view(-1, 2)
            self._chunked[bucket] = place, StepInputs(**views, bucket=bucket)
        return self._chunked[bucket]

    def _choose(self, common: Ints | None, bucket: int) -> Sharing | None:
        if self._rule is None or common is None or bucket not in self.shared_buckets:
            return None
        if common is not self._common:
            self._common, self._sharing = common, self._rule.choose(common, bucket)
        return self._sharing

    def _fill_padded(
        self, values: dict[str, NDArray[Any]], rows: int, bucket: int, sharing: Sharing | None
    ) -> StepInputs:
        place, inputs = self._of_bucket(bucket, sharing is not None)
        array, spans = self._next(), place.spans
        for name, padding in (("ids", 0), ("positions", 0), ("slots", -1), ("kv_lens", 0)):
            first, last = spans[name]
            if name in values:
                array[first : first + rows] = values[name]
            array[first + rows : last] = padding
        first, last = spans["page_indptr"]
        array[first : first + rows + 1] = values["page_indptr"]
        array[first + rows + 1 : last] = values["page_indptr"][-1]
        for name in ("qo_indptr", "logits_rows"):
            first, last = spans[name]
            array[first:last] = np.arange(last - first)
        if sharing is not None:
            indptr, kv_lens = (array[slice(*spans[name])] for name in ("page_indptr", "kv_lens"))
            for name, value in _shared_values(sharing, indptr, kv_lens, self._sizes.page_size).items():
                array[slice(*spans[name])] = value
        first = spans["page_indices"][0]
        last = first + len(values["page_indices"])
        array[first:last] = values["page_indices"]
        self._send(last)
        return replace(inputs, num_rows=rows)

    def _of_bucket(self, bucket: int, is_shared: bool) -> tuple[_Place, StepInputs]:
        if (bucket, is_shared) not in self._padded:
            names = ("ids", "positions", "slots", "kv_lens", "logits_rows")
            lengths = dict.fromkeys(names, bucket)
            lengths |= {"qo_indptr": bucket + 1, "page_indptr": bucket + 1, "page_indices": self._most_pages}
            if is_shared and self._rule:
                lengths |= _shared_lengths(self._rule, bucket)
            place = self._place(lengths)
            views = self._views(place)
            shared = {name: views.pop(_SHARED + name) for name in _SHARED_NAMES} if is_shared else None
            if shared is not None:
                shared["tiles"] = shared["tiles"].view(-1, 2)
                views["shared"] = SharedInputs(**shared)
            self._padded[bucket, is_shared] = place, StepInputs(**views, num_decodes=bucket, bucket=bucket)
        return self._padded[bucket, is_shared]

    def _place(self, lengths: dict[str, int]) -> _Place:
        """The page indices last: so much of them as is used is copied."""
        spans, at = {}, 0
        for name in sorted(lengths, key=lambda name: name == "page_indices"):
            spans[name] = at, at + lengths[name]
            at += -(-lengths[name] // _ALIGNMENT) * _ALIGNMENT
        return _Place(spans)

    def _views(self, place: _Place) -> dict[str, Any]:
        return {name: self._device[first:last] for name, (first, last) in place.spans.items()}

    def _next(self) -> Ints:
        """To be written. Raises DeadlineExceeded if what is there does not leave for the device in time."""
        self._turn ^= 1
        if (copied := self._copied[self._turn]) is not None:
            self._patience.wait(copied)
        return self._arrays[self._turn]

    def _send(self, length: int) -> None:
        self._device[:length].copy_(self._hosts[self._turn][:length], non_blocking=True)
        if self._lane is not None:
            self._copied[self._turn] = self._lane.record()
