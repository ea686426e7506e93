"""What the engine asks of a model that drafts tokens in the ranks, beside the one that verifies them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from allspan.protos.api.sampling import SamplingParams
from allspan.worker.cache.spec import PageLifetime

if TYPE_CHECKING:  # the scheduler, which plans these runs, names no tensor
    from torch import Tensor

    from allspan.worker.step.inputs import StepInputs


@dataclass(frozen=True, slots=True)
class DraftRun:
    """What a drafter does for a row once the tokens of a step are known."""

    row: int
    first: int
    """Tokens of the row, from its beginning, whose keys and values the drafter's pages hold."""
    most: int
    """The most that it takes in of those behind."""
    num_drafts: int
    """Tokens that it then proposes, if it has taken in all of the row's."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """What has come of a DraftRun, the same on every rank."""

    num_tokens: int
    """Tokens of the row whose keys and values the drafter's pages hold now. No more than before: the drafter cannot
    take in what follows."""
    drafts: tuple[int, ...] = ()


class RowLeaves(Protocol):
    """Counts the requests that have left a row."""

    count: int

    def stayed(self, rows: NDArray[np.int64], since: int) -> NDArray[np.bool_]:
        """Which of `rows` belong to the request that had them when `count` was `since`."""


class DraftRows(Protocol):
    """The running rows as a drafter sees them; `allspan.worker.engine.batch.rows` has the real ones."""

    tokens: NDArray[np.int32]
    """[rows, max_model_len]: the tokens of each."""
    num_tokens: NDArray[np.int64]
    """[rows]."""
    params: list[SamplingParams | None]
    """What the request of each asks for; None: no request has the row."""

    @property
    def leaves(self) -> RowLeaves: ...

    tables: list[NDArray[np.int32]]
    """For each cache group, those of the drafter last, [rows, pages]: the pages of each row by their places."""
    num_pages: NDArray[np.int64]
    """[cache groups, rows]: the place up to which a row has pages."""


@dataclass(frozen=True, slots=True)
class RanStep:
    """What the model ran in a step, whose tokens are known by now."""

    inputs: StepInputs
    rows: NDArray[np.int64]
    """[R]: the row of each request, in the order of `inputs`; again for each of its drafts, where a device takes these
    as requests of their own."""
    counts: NDArray[np.int64]
    """[R]: the tokens of each."""
    starts: NDArray[np.int64]
    """[R]: the position of each one's first."""


class RankDrafter(Protocol):
    """A model that drafts, with its cache bound. All ranks call it alike, and end with equal drafts."""

    @property
    def lifetimes(self) -> tuple[PageLifetime, ...]:
        """How long its cache groups keep pages. They are the engine's last ones; page numbers come from its plans."""

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest row that it drafts for."""

    @property
    def follows(self) -> bool:
        """Whether it takes in the tokens of every step as the model runs them, in pages that requests get and keep with
        the model's: then `draft` or `follow` is called behind each step, and what its runs say of tokens taken in says
        nothing. Else it takes in tokens by its runs alone, in its own time."""

    def draft(self, runs: Sequence[DraftRun], rows: DraftRows, ran: RanStep) -> Mapping[int, Drafted]:
        """Carries out the runs of a step whose tokens are known, each of another row; what has come of them by row."""

    def follow(self, rows: DraftRows, ran: RanStep, tokens: Tensor | None) -> None:
        """Takes in a step that goes on beside the host, where it `follows`. `tokens`: int32 on the device, one for each
        of the step's first rows of logits; None: it samples nothing."""

    def trial(self, count: int, start: int) -> StepInputs:
        """The inputs of a step with `count` tokens of one request behind `start` others, in the first pages. For the
        time before the first plan."""
