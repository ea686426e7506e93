"""A step's inputs for a GPU: one copy to the device a step, at addresses that captured graphs can count on."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from allspan.kernels.cuda.attention.cascade_rule import CascadeRule, Sharing
from allspan.kernels.cuda.latent.expand_rule import ExpandRule
from allspan.protos.api.errors import InternalError
from allspan.worker.backend.cuda.event_wait import DEFAULT_WAITER, EventWaiter
from allspan.worker.backend.cuda.pinned_buffer import PinnedBuffer
from allspan.worker.backend.cuda.shared_rows import SharedRows
from allspan.worker.backend.cuda.step_layout import (
    InputNames,
    PromptForm,
    PromptForms,
    StepLayout,
    aligned,
    chunk_of,
    decode_buckets,
    own_buckets,
)
from allspan.worker.backend.cuda.streams import Stream
from allspan.worker.cache.budget import pages_of
from allspan.worker.step.buffer_sizes import BatchSizes
from allspan.worker.step.inputs import PlanTiles, StepInputs, with_groups

Ints = NDArray[np.int32]


class DeviceBuffers:
    """Fills step inputs on the host and copies them over at once.

    Rows that decode must come first. Steps of nothing else are padded to a bucket, and lie where every step of that
    bucket lies: `paddings` gives the same inputs without any request, to capture a graph with. Padding rows have no
    tokens in the cache and the slot -1. Steps with prompts are padded likewise, if they are no larger than the largest
    of `chunks` and leave little of a large one empty.

    A draft is a row of its own, behind the row of its request's last token and with that one's pages: decode attention
    takes one query a row, and a step with drafts is padded as any step of decodes.

    Where ranks attend for requests of their own, a step has the same bucket on all of them, and the tokens of own
    requests are padded to one of the bucket's `owns`.
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
        stream: Stream | None = None,
        waiter: EventWaiter = DEFAULT_WAITER,
        expand_rule: ExpandRule | None = None,
    ) -> None:
        """`rule` None: what decodes share is not looked at. `stream`: where copies to the device are queued; None: they
        are done at once. `expand_rule` None: no keys and values are made of latents."""
        self._sizes = sizes
        self._names = InputNames(sizes)
        self.splits_drafts = sizes.has_drafts
        self._most_requests = sizes.max_rows + (sizes.most_decodes if sizes.has_drafts else 0)
        """The most requests of a step, the drafts among them."""
        self.buckets = decode_buckets(sizes.most_decodes)
        self.shared_rows = SharedRows(rule, self.buckets, sizes.page_size)
        self.wants_common = rule is not None
        self.chunks: tuple[int, ...] = ()
        """Tokens that steps with prompts are padded to. None at first: without a graph padding is a loss."""
        self._prompts = PromptForms(plan_tiles, expand_rule, sizes.attention_ranks)
        self._buffer = PinnedBuffer(self._capacity(), device, stream, waiter)
        self._padded: dict[tuple[int, int, bool], tuple[StepLayout, StepInputs]] = {}
        self._chunked: dict[tuple[int, int, PromptForm], tuple[StepLayout, StepInputs]] = {}

    @property
    def max_tokens(self) -> int:
        """Most tokens of a step."""
        return self._sizes.max_tokens

    @property
    def has_adapters(self) -> bool:
        """Whether steps may have tokens with adapters."""
        return self._sizes.num_adapters > 0

    def owns(self, bucket: int) -> tuple[int, ...]:
        """Numbers of tokens of own requests that a step of `bucket` tokens may be padded to."""
        return own_buckets(bucket, self._sizes.attention_ranks)

    def fill(
        self, values: dict[str, NDArray[Any]], common: Ints | None = None, num_requests: int | None = None
    ) -> StepInputs:
        """See `allspan.worker.step.inputs.InputBuffers`."""
        if not self.has_adapters or "adapters" in values:
            return self._fill(values, common, num_requests)
        nobody = np.full(len(values["ids"]), -1, dtype=np.int32)
        return replace(self._fill(values | {"adapters": nobody}, common, num_requests), adapters=None)

    def _fill(self, values: dict[str, NDArray[Any]], common: Ints | None, num_requests: int | None) -> StepInputs:
        counts, tokens = np.diff(values["qo_indptr"]), len(values["ids"])
        decodes = int((counts == 1).sum())
        requests = len(counts) if num_requests is None else num_requests
        if tokens == requests and np.array_equal(values["logits_rows"], np.arange(tokens)):
            bucket = self.buckets[bisect_left(self.buckets, tokens)]
            return self._fill_padded(values, bucket, self.shared_rows.choose(common, bucket))
        if (counts[:decodes] != 1).any():
            raise InternalError("rows with one new token must come first")
        new, lens = counts[decodes:], values["kv_lens"][decodes:]
        if chunk := self._chunk(tokens, max(requests, len(values["logits_rows"]))):
            own = self._own(values, chunk)
            if (form := self._prompts.choose(chunk, own, new, lens)) is not None:
                return self._fill_chunk(values, decodes, chunk, own, form)
        cut, form = self._prompts.cut(decodes, new, lens, None)
        values = values | cut
        layout = StepLayout.of({name: len(value) for name, value in values.items()}, self._names.page_tables)
        array = self._buffer.next()
        for name, (first, last) in layout.spans.items():
            array[first:last] = values[name]
        self._buffer.send([(0, max(last for _, last in layout.spans.values()))])
        views = self._prompts.take(layout.views(self._buffer.device), form)
        return with_groups(views | {"num_decodes": decodes}, self._names.num_groups)

    def advance(self, tokens: Ints) -> None:
        raise InternalError("copies on a device do not show what the host's buffers hold")

    def paddings(self) -> Iterator[StepInputs]:
        """Yields the steps to which others are padded, of nothing but padding, on the device: what needs most memory
        first, and each when the one before is done with; where there are adapters, once for the pass with them and
        once without. Every rank gets steps of the same buckets in the same order.
        """
        for inputs in self._paddings():
            yield inputs
            if inputs.adapters is not None:
                yield replace(inputs, adapters=None)

    def _paddings(self) -> Iterator[StepInputs]:
        for bucket in reversed(self.chunks):
            for own in reversed(self.owns(bucket)):
                for form in reversed(self._prompts.captured(bucket, own)):
                    yield self._fill_chunk(self._names.nothing(), 0, bucket, own, form)
        for bucket in reversed(self.buckets):
            for own in reversed(self.owns(bucket)):
                yield self._fill_padded(self._names.nothing(), bucket, None, own)
            if bucket in self.shared_rows.buckets:
                yield self._fill_padded(self._names.nothing(), bucket, self.shared_rows.padding(bucket))

    def _chunk(self, tokens: int, rows: int) -> int:
        """The bucket for a step with prompts, of so many requests and rows of logits at most; 0: there is none."""
        chunk = chunk_of(tokens, self.chunks)
        return chunk if rows <= self._chunk_rows(chunk) else 0

    def _chunk_rows(self, tokens: int) -> int:
        """Requests of so many tokens of a chunk, and rows of logits, one each."""
        return min(tokens, self._sizes.most_decodes)

    def _own(self, values: dict[str, NDArray[Any]], bucket: int) -> int:
        """The number that the tokens of own requests are padded to."""
        sizes = self.owns(bucket)
        return sizes[bisect_left(sizes, len(values["positions"]))]

    def _fill_chunk(
        self, values: dict[str, NDArray[Any]], decodes: int, bucket: int, own: int, form: PromptForm
    ) -> StepInputs:
        layout, inputs = self._of_chunk(bucket, own, form)
        array, new = self._buffer.next(), np.diff(values["qo_indptr"])[decodes:]
        cut, _ = self._prompts.cut(decodes, new, values["kv_lens"][decodes:], form)
        values = values | cut | {"decode_rows": np.arange(decodes, dtype=np.int32)}
        paddings = dict.fromkeys(("logits_rows", "decode_rows"), -1) | self._prompts.paddings(values)
        self._write(array, layout, values, paddings)
        self._buffer.send(layout.used(values))
        return replace(inputs, num_rows=len(values["logits_rows"]))

    def _of_chunk(self, bucket: int, own: int, form: PromptForm) -> tuple[StepLayout, StepInputs]:
        key = bucket, own, form
        if key not in self._chunked:
            rows = self._chunk_rows(own)
            lengths = dict.fromkeys(self._names.every, bucket) | dict.fromkeys(self._names.tokens, own)
            lengths |= dict.fromkeys(("kv_lens", "decode_rows"), rows)
            lengths |= dict.fromkeys(("qo_indptr", *self._names.page_indptrs), rows + 1)
            lengths |= {"logits_rows": self._chunk_rows(bucket)} | self._prompts.lengths(own, rows, form)
            layout = StepLayout.of(lengths | self._tables(), self._names.page_tables)
            views = self._prompts.take(layout.views(self._buffer.device), form)
            self._chunked[key] = layout, with_groups(views | {"bucket": bucket}, self._names.num_groups)
        return self._chunked[key]

    def _write(
        self, array: Ints, layout: StepLayout, values: Mapping[str, NDArray[Any]], paddings: Mapping[str, int]
    ) -> None:
        """Writes a step's inputs, and what pads them: 0, but for indptrs, `paddings` and those of tokens."""
        ends = {name: values[name][-1] for name in ("qo_indptr", *self._names.page_indptrs)}
        paddings = {**self._names.paddings, **ends, **paddings}
        for name, value in values.items():
            first, last = layout.spans[name]
            until = first + len(value)
            array[first:until] = value
            if name not in layout.tables:
                array[until:last] = paddings.get(name, 0)

    def _fill_padded(
        self, values: dict[str, NDArray[Any]], bucket: int, sharing: Sharing | None, own: int = 0
    ) -> StepInputs:
        """`own` 0: as many as it takes."""
        layout, inputs = self._of_bucket(bucket, own or self._own(values, bucket), sharing is not None)
        array, spans = self._buffer.next(), layout.spans
        self._write(array, layout, values, {"logits_rows": -1})
        first, last = spans["qo_indptr"]
        array[first:last] = np.arange(last - first)  # padding is requests of one token, too
        if sharing is not None:
            indptr, kv_lens = (array[slice(*spans[name])] for name in ("page_indptr", "kv_lens"))
            for name, value in self.shared_rows.values(sharing, indptr, kv_lens).items():
                array[slice(*spans[name])] = value
        self._buffer.send(layout.used(values))
        return replace(inputs, num_rows=len(values["logits_rows"]))

    def _of_bucket(self, bucket: int, own: int, is_shared: bool) -> tuple[StepLayout, StepInputs]:
        if (bucket, own, is_shared) not in self._padded:
            lengths = dict.fromkeys((*self._names.every, "logits_rows"), bucket)
            lengths |= dict.fromkeys((*self._names.tokens, "kv_lens"), own)
            lengths |= dict.fromkeys(("qo_indptr", *self._names.page_indptrs), own + 1)
            if is_shared:
                lengths |= self.shared_rows.lengths(bucket)
            layout = StepLayout.of(lengths | self._tables(), self._names.page_tables)
            views = layout.views(self._buffer.device)
            if is_shared:
                views["shared"] = self.shared_rows.take(views)
            inputs = with_groups(views | {"num_decodes": own, "bucket": bucket}, self._names.num_groups)
            self._padded[bucket, own, is_shared] = layout, inputs
        return self._padded[bucket, own, is_shared]

    def _tables(self) -> dict[str, int]:
        """The most pages of each cache group's table; rows may share pages."""
        sizes, rows = self._sizes, self._most_requests
        whole = rows * pages_of(sizes.max_model_len, sizes.page_size)
        return {
            name: rows if lifetime.is_state else whole
            for name, lifetime in zip(self._names.page_tables, sizes.lifetimes, strict=True)
        }

    def _capacity(self) -> int:
        """Numbers that hold every step; tiles hold at least one query each, of one KV head or all."""
        sizes, names, rows = self._sizes, self._names, self._most_requests
        lengths = dict.fromkeys((*names.every, *names.tokens, "kv_lens"), sizes.max_tokens + sizes.max_rows)
        lengths |= dict.fromkeys(("qo_indptr", *names.page_indptrs, "decode_rows"), rows + 1)
        lengths |= {"logits_rows": max(sizes.max_logits_rows, sizes.max_rows)}
        lengths |= self._prompts.lengths(sizes.max_tokens, rows, PromptForm(sizes.max_tokens))
        lengths |= self.shared_rows.lengths(sizes.most_decodes) | self._tables()
        return sum(map(aligned, lengths.values()))
