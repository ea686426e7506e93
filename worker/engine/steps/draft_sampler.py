"""DraftSampler: draws drafts as the tokens of their requests are drawn."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from allspan.protos.api.sampling import SamplingParams
from allspan.worker.parallel.base import Collectives
from allspan.worker.sampling.device import Sampling
from allspan.worker.sampling.sampler import Sampler
from allspan.worker.step.rank_drafter import DraftRows

_DRAWN = ("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "seed")
"""The sampling parameters that a draw depends on, whatever came before."""


class DraftSampler:
    """Draws by a request's own temperature, filters, seed and position: where a drafter is as sure as the model that it
    drafts for, the same number draws the same token. Penalties, bans and grammars are left out: they are for drafts
    that are verified."""

    def __init__(
        self, max_rows: int, widths: tuple[int, ...], collectives: Collectives, sampling: Sampling | None = None
    ) -> None:
        """`widths`: columns of each rank's logits. `sampling` None: the host's kernel."""
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

    def sample(self, logits: Tensor, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int32]:
        """Returns the token of each row of logits, which are of these rows, at these positions of their requests;
        negative where none can be drawn."""
        if not len(rows):
            return np.zeros(0, dtype=np.int32)
        return self._sampler.sample(logits, rows, positions).tokens


def _bare(params: SamplingParams) -> SamplingParams:
    """What a token is drawn by, but for what depends on the tokens before it."""
    return SamplingParams(**{name: getattr(params, name) for name in _DRAWN})
