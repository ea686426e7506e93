"""What one forward pass reads: the step's tokens and where their KV lies. Filled by the runner, read by every op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from allspan.worker.step.row_inputs import POSITION_AXES

Ints = NDArray[np.int32]


class PlanTiles(Protocol):
    """Cuts the new tokens of requests for attention on a GPU."""

    def __call__(self, counts: NDArray[np.int64], kv_lens: NDArray[np.int64]) -> NDArray[np.int32]:
        """From the new tokens and all tokens of some requests to what `StepInputs.tiles` holds of them."""
        ...

    def most(self, tokens: int, requests: int) -> int:
        """Tiles that so many new tokens of so many requests may be cut into."""
        ...


@dataclass(frozen=True, slots=True)
class SharedInputs:
    """The pages with which several decodes begin, read once for all of them; int32 tensors, on the GPU.

    Made by the device from the groups of its cascade rule: the level's tiles, rows and pages, and each
    row's own pages, in the indices of the whole page table.
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


@dataclass(frozen=True, slots=True)
class ExpandedInputs:
    """Requests with several new tokens whose keys and values are made of latents, on the GPU."""

    tiles: Tensor
    """int32 [tiles, ...]: as `StepInputs.tiles` has those of other requests."""
    indptr: Tensor
    """int32 [R + 1]: where the keys of each of the step's requests begin; others have none."""
    rows: int
    """Tokens of all of them, or more."""


@dataclass(frozen=True, slots=True)
class EmbeddingRows:
    """Rows that take the place of the embeddings of token ids, in host memory."""

    at: Tensor
    """int64 [k]: which of the n tokens."""
    rows: Tensor
    """float32 [k, embedding_size]."""


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """Where the tokens of a step lie in the pages of a cache group behind the first; int32 tensors."""

    slots: Tensor
    """[n]: page · page_size + offset; where a page holds a state, the page of the token's request."""
    page_indptr: Tensor
    """[R + 1]."""
    page_indices: Tensor
    """[page_indptr[R]]; what stands for a page that was freed is never read."""


@dataclass(slots=True)
class StepInputs:
    """Views into buffers of fixed capacity, cut to this step's sizes. Tensors are int32, on the model's device.

    n new tokens, R requests with new tokens, m rows whose logits are wanted. Where a rank attends for its own requests
    alone, all but `ids`, `logits_rows`, `adapters`, `embeddings` and `own_places` are of their k tokens. Given to a
    model again, it has the same tensors as before, though there may be other numbers in them.
    """

    ids: Tensor
    """[n] token ids; where a rank attends for its own requests alone, those of padding are -1."""
    positions: Tensor
    """[n]: the index of each token in its request, and in front of it the rows of the rotary tables before that of the
    request (`RowInputs.prompt_lengths`)."""
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
    """On a GPU the requests with one new token come first: so many, of those that the rank attends for."""
    tiles: Tensor | None = None
    """On a GPU [tiles, ...]: how the new tokens of the others are cut (`kernels/cuda/attention/prefill.py`). A tile
    of request -1 is none."""
    bucket: int = 0
    """On a GPU: the step is padded to so many tokens, which other steps may be as well; 0: it is not."""
    num_rows: int = 0
    """With a bucket: so many of its rows of logits are real."""
    decode_rows: Tensor | None = None
    """With a bucket, in a step with prompts [R]: the row of the request if it has one new token, else -1."""
    shared: SharedInputs | None = None
    """With a bucket: what its rows share, where that pays."""

    expanded: ExpandedInputs | None = None
    """On a GPU, of latents: None where all requests stay latents."""
    groups: tuple[GroupInputs, ...] = ()
    """The inputs of the cache groups behind the first."""
    adapters: Tensor | None = None
    """[n]: the adapter slot of each token, -1 for none; None where no token has one."""
    embeddings: EmbeddingRows | None = None
    """None: all tokens are given by their ids."""
    axes: tuple[Tensor, ...] = ()
    """[n] for each of `POSITION_AXES`, where the model's tokens have several positions; empty: all are `positions`."""
    features: Tensor | None = None
    """float32 [n, …]: what a draft head reads beside the ids, its target's features of these tokens; or, in a step that
    `is_chained`, its own states of the tokens before its drafts."""
    is_chained: bool = False
    """A draft head's step behind its own drafts."""
    own_rows: Tensor | None = None
    """[k]: which of the n tokens; None: the rank attends for all."""
    own_places: Tensor | None = None
    """[n]: the place of each token among the k, -1 for those of other ranks."""

    def of_group(self, group: int) -> StepInputs:
        """The step as the layers of a cache group see it; only the first group's pages are read once for several
        requests."""
        if not group:
            return self
        own = self.groups[group - 1]
        return replace(
            self,
            slots=own.slots,
            page_indptr=own.page_indptr,
            page_indices=own.page_indices,
            shared=None,
            groups=(),
        )

    @property
    def place(self) -> tuple[int, ...]:
        """With a bucket: steps of one place have their tensors at the same addresses, in the same shapes."""
        kinds = self.decode_rows is not None, self.shared is not None, self.tiles is not None
        made = 0 if self.expanded is None else self.expanded.rows
        return self.bucket, self.positions.shape[0], *kinds, made


class StepMetadata(Protocol):
    """Prepares, once a step for all layers, what the op `attention` takes as `meta`: each device its own value."""

    @property
    def buffers(self) -> Sequence[Tensor]:
        """What ops write to beside the program's own buffers; a step looks at nothing that was there before it."""

    def of(self, inputs: StepInputs) -> Any: ...


class InputBuffers(Protocol):
    """int32 buffers of fixed capacity; `fill` gives out tensor views on the model's device."""

    is_shared: bool
    """What `fill` gives out are views of the buffers, not copies: then `advance` works."""
    wants_common: bool
    """`fill` makes something of what decodes have in common."""
    runs_ahead: bool
    """Steps run beside the host, so that the next one may be launched before the tokens of this one are known."""
    splits_drafts: bool
    """A request's last token and its drafts come as requests of one new token each, which have the same pages."""

    def fill(
        self, values: dict[str, NDArray[Any]], common: Ints | None = None, num_requests: int | None = None
    ) -> StepInputs:
        """All of `StepInputs`' tensors by name; "adapters" only where a token has one. `common`, in a step of decodes:
        see `SharedPages.of`. `num_requests` of the step, those of other attention ranks among them; None: there are no
        others. Where the buffers are shared, steps of equal lengths may get the same object."""

    def advance(self, tokens: Ints) -> None:
        """The same rows again, each with the next token, in the page that it is in; only where `is_shared`."""


def group_name(name: str, group: int) -> str:
    """The name of a step input of a cache group: the first group's have none of their own."""
    return f"{name}.{group}" if group else name


def axis_name(axis: str) -> str:
    """The name of the step input with the tokens' positions on one of `POSITION_AXES`."""
    return f"positions.{axis}"


def axis_names(num_positions: int) -> tuple[str, ...]:
    """The names of the inputs that a model whose tokens have so many positions takes beside `positions`."""
    return tuple(map(axis_name, POSITION_AXES)) if num_positions > 1 else ()


def with_groups(values: dict[str, Any], num_groups: int) -> StepInputs:
    """The inputs of these fields, with those of axes and of the cache groups behind the first by their names. A group's
    requests have as many pages as the first one's unless it has a `page_indptr` of its own."""
    if axes := tuple(values.pop(name) for name in _AXIS_NAMES if name in values):
        values["axes"] = axes
    if num_groups == 1:
        return StepInputs(**values)
    indptr = values["page_indptr"]
    groups = tuple(
        GroupInputs(
            values.pop(group_name("slots", group)),
            values.pop(group_name("page_indptr", group), indptr),
            values.pop(group_name("page_indices", group)),
        )
        for group in range(1, num_groups)
    )
    return StepInputs(**values, groups=groups)


_AXIS_NAMES = axis_names(len(POSITION_AXES))


def take_ids(inputs: StepInputs, tokens: Tensor, count: int) -> None:
    """Replaces the first `count` ids, which are places in `tokens` (int32 on the device), by the tokens there."""
    ids = inputs.ids[:count]
    ids.copy_(tokens.index_select(0, ids))
