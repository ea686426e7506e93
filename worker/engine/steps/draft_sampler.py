"""DraftSampler: draws drafts as the tokens of their requests are drawn."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from allspan.protos.api.sampling import SamplingParams
from allspan.worker.parallel.base import Collectives
from allspan.worker.sampling.device import Sampling
from allspan.worker.sampling.sampler import Sampler
from allspan.worker.step.rank_drafter import DraftRows

_DRAWN = ("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "seed")
"""The sampling parameters that a draw depends on, whatever came before."""

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]

Behind = Callable[[int, Tensor], Tensor]
"""Runs the draft of this depth, from 1, of the first rows, one for each of the ids (int32): the logits behind it."""


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A draft of some rows, on its way on a device or known."""

    tokens: Tensor
    """int32, where the next step can take them; valid until the next draft is drawn."""
    result: Callable[[], Ints]
    """Waits for them. Raises DeadlineExceeded."""


class DraftSampler:
    """Draws by a request's own temperature, filters, seed and position: where a drafter is as sure as the model that it
    drafts for, the same number draws the same token. Penalties, bans and grammars are left out: they are for drafts
    that are verified."""

    def __init__(
        self,
        max_rows: int,
        widths: tuple[int, ...],
        collectives: Collectives,
        sampling: Sampling | None = None,
        runs_ahead: bool = False,
    ) -> None:
        """`widths`: columns of each rank's logits. `sampling` None: the host's kernel. `runs_ahead`: steps run beside
        the host, so that a draft need not be known there before the next one is run."""
        self._runs_ahead = runs_ahead
        self._sampler = Sampler(max_rows, widths, collectives, sampling=sampling)
        self._asked: dict[int, SamplingParams] = {}
        """What the rows ask for that the sampler knows."""

    def follow(self, rows: DraftRows) -> None:
        """Takes in what the rows ask for now."""
        for row, params in enumerate(rows.params):
            if (known := self._asked.get(row)) is params:
                continue
            if known is not None:
                del self._asked[row]
                self._sampler.remove(row)
            if params is not None:
                self._asked[row] = params
                self._sampler.add(row, _bare(params), 0, rows.tokens[row])

    def chain(
        self, logits: Tensor, rows: Longs, positions: Longs, counts: Longs, behind: Behind
    ) -> dict[int, tuple[int, ...]]:
        """Draws `counts` drafts for each of `rows`, of which those that get most come first: one by these `logits`, at
        these positions of the requests, the others by what `behind` runs. Those of a row end where no token could be
        drawn: what was run behind says nothing."""
        numbers, drawn = rows.tolist(), list[_Drawn]()
        for depth in range(1, int(counts.max(initial=0)) + 1):
            drawn.append(self._draw(logits, rows, positions))
            if going := int(np.count_nonzero(counts > depth)):
                rows, positions = rows[:going], positions[:going] + 1
                logits = behind(depth, drawn[-1].tokens[:going].clamp(min=0))
        results = [each.result().tolist() for each in drawn]
        of_rows = ([each[i] for each in results[:count]] for i, count in enumerate(counts.tolist()))
        return {
            row: tuple(itertools.takewhile(lambda token: token >= 0, tokens))
            for row, tokens in zip(numbers, of_rows, strict=True)
        }

    def _draw(self, logits: Tensor, rows: Longs, positions: Longs) -> _Drawn:
        """A token for each row of logits, which are of these rows, at these positions of their requests; negative where
        none can be drawn."""
        if self._runs_ahead and self._sampler.keeps_tokens:
            launched = self._sampler.launch(logits, rows, positions)
            return _Drawn(launched.tokens, lambda: launched.result().tokens)
        tokens = self._sampler.sample(logits, rows, positions).tokens
        return _Drawn(torch.from_numpy(tokens), lambda: tokens)


def _bare(params: SamplingParams) -> SamplingParams:
    """What a token is drawn by, but for what depends on the tokens before it."""
    return SamplingParams(**{name: getattr(params, name) for name in _DRAWN})
