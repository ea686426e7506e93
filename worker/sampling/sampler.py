"""Sampler: logits to tokens. The rows of a step are shared over the ranks; every rank ends with all tokens.

Log-probabilities are those of the model's own logits, before temperature and filters. A row's token depends on its
logits, its parameters, its seed and its position alone: never on its batch or on the number of ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from allspan.protos.results import TokenLogprob
from allspan.protos.sampling import SamplingParams
from allspan.worker.parallel.base import Collectives
from allspan.worker.sampling.features import (
    Change,
    Filter,
    Logits,
    MinP,
    MinTokens,
    Temperature,
    TopK,
    TopP,
    kth_largest,
    weights,
)
from allspan.worker.sampling.philox import uniforms

Rows = NDArray[np.int64]

_BLOCK = 256
"""Weights are added up by blocks, then searched within one."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step made of its m rows of logits."""

    tokens: NDArray[np.int32]
    """[m]: the token sampled, or where it was known, that one; negative where there is none (see `failure`)."""
    logprobs: dict[int, tuple[TokenLogprob, ...]]
    """Of the sampled tokens of those rows that asked."""
    prompt_logprobs: dict[int, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    """Of the known tokens of each row, in the order of their logits."""


class Sampler:
    """Keeps what each row asked for; the same on every rank."""

    def __init__(
        self, max_rows: int, widths: tuple[int, ...], collectives: Collectives, eos_token_ids: tuple[int, ...] = ()
    ) -> None:
        """`widths`: columns of each rank's logits; together the vocabulary."""
        self._widths = widths
        self._vocab_size = sum(widths)
        self._collectives = collectives
        self._min_tokens = MinTokens(eos_token_ids, self._vocab_size)
        self._temperature = Temperature()
        self._filters: tuple[Filter, ...] = (TopK(), TopP(), MinP())
        self._is_random = np.zeros(max_rows, dtype=np.bool_)
        self._seeds = np.zeros(max_rows, dtype=np.uint64)
        self._num_logprobs = np.full(max_rows, -1, dtype=np.int64)
        self._num_prompt_logprobs = np.zeros(max_rows, dtype=np.int64)

    @property
    def _features(self) -> tuple[Change | Filter, ...]:
        return self._min_tokens, self._temperature, *self._filters

    def add(self, row: int, params: SamplingParams, prompt_len: int, tokens: NDArray[np.int32]) -> None:
        """`tokens` [max_model_len] is the row's, prompt and output, kept up to date by its owner: when the token at
        `position` is to be sampled, the ones before it are there."""
        for feature in self._features:
            feature.add(row, params, prompt_len)
        self._is_random[row] = not params.is_greedy
        self._seeds[row] = params.seed or 0
        self._num_logprobs[row] = -1 if params.logprobs is None else min(params.logprobs, self._vocab_size)
        self._num_prompt_logprobs[row] = min(params.prompt_logprobs or 0, self._vocab_size)

    def remove(self, row: int) -> None:
        for feature in self._features:
            feature.remove(row)
        self._is_random[row] = False
        self._num_logprobs[row] = -1

    def sample(self, logits: Tensor, rows: Rows, positions: Rows, targets: Rows | None = None) -> Sampled:
        """A token, or its log-probabilities, for each row of logits.

        `logits` float32 [m, widths[rank]] is this rank's slice and is overwritten. `rows` [m] say whose they are, one
        row as often as it likes; `positions` [m] are the tokens' indices in their requests, prompt included. Where
        `targets` [m] is -1 (None: everywhere) the token is sampled; else it is known, a prompt's, and only its
        log-probability and the most likely tokens there are wanted.
        """
        world = self._collectives
        targets = np.full(len(rows), -1, dtype=np.int64) if targets is None else targets
        counts = np.where(targets < 0, self._num_logprobs[rows], self._num_prompt_logprobs[rows])
        most = int(counts.max(initial=-1))
        # The token; then, if any row asked, its log-probability, the most likely ids and theirs (floats as their bits).
        columns = 1 if most < 0 else 2 + 2 * most
        logits = logits.cpu()
        mine = slice(world.rank, None, world.size)
        asked = rows[mine], positions[mine], targets[mine], counts[mine]
        if world.size == 1:
            return self._unpack(self._sample_rows(logits.numpy(), *asked, columns), rows, targets, counts)
        whole = logits.new_empty((len(rows[mine]), self._vocab_size))
        world.exchange_rows(logits, self._widths, whole)
        part = self._sample_rows(whole.numpy(), *asked, columns)
        result = torch.empty((len(rows), columns), dtype=torch.int32)
        world.all_gather_rows(torch.from_numpy(part), result)
        return self._unpack(result.numpy(), rows, targets, counts)

    def _sample_rows(
        self, logits: Logits, rows: Rows, positions: Rows, targets: Rows, counts: Rows, columns: int
    ) -> NDArray[np.int32]:
        """int32 [m, columns] for whole rows of logits [m, vocabulary]."""
        result = np.zeros((len(rows), columns), dtype=np.int32)
        at = np.arange(len(rows))
        asked = np.flatnonzero(counts >= 0).tolist()
        logprobs = [(i, LogSoftmax(logits[i])) for i in asked if np.isfinite(logits[i].max())]
        if self._min_tokens.rows:
            for i, row in enumerate(rows.tolist()):
                self._min_tokens.apply(row, int(positions[i]), logits[i])
        tokens = np.argmax(logits, axis=1)
        is_finite = np.isfinite(logits[at, tokens])
        tokens = np.where(targets < 0, tokens, targets)
        random = np.flatnonzero(self._is_random[rows] & is_finite & (targets < 0))
        if random.size:
            shares = uniforms(self._seeds[rows[random]], positions[random])
            for i, share in zip(random.tolist(), shares.tolist(), strict=True):
                tokens[i] = self._draw(logits[i], int(rows[i]), int(positions[i]), share)
        result[:, 0] = np.where(is_finite, tokens, -1)
        for i, distribution in logprobs:
            result[i, 1:] = distribution.packed(int(tokens[i]), int(counts[i]), columns - 1)
        return result

    def _draw(self, logits: Logits, row: int, position: int, share: float) -> int:
        """The token at which the running sum of the probabilities passes `share` of their total."""
        self._temperature.apply(row, position, logits)
        ids: NDArray[np.int64] | None = None
        for each in self._filters:
            threshold = each.threshold(row, logits)
            if threshold is not None:
                kept = np.flatnonzero(logits >= np.float32(threshold))
                logits = logits[kept]
                ids = kept if ids is None else ids[kept]
        drawn = draw(weights(logits), share)
        return drawn if ids is None else int(ids[drawn])

    def _unpack(self, result: NDArray[np.int32], rows: Rows, targets: Rows, counts: Rows) -> Sampled:
        tokens = result[:, 0]
        if result.shape[1] == 1:
            return Sampled(tokens, {})
        most = (result.shape[1] - 2) // 2
        floats = result.view(np.float32)
        logprobs: dict[int, tuple[TokenLogprob, ...]] = {}
        prompt: dict[int, list[TokenLogprob]] = {}
        for i in np.flatnonzero(counts >= 0).tolist():
            row, count = int(rows[i]), int(counts[i])
            ids = result[i, 2 : 2 + count].tolist()
            top = floats[i, 2 + most : 2 + most + count].tolist()
            entry = TokenLogprob(float(floats[i, 1]), tuple(zip(ids, top, strict=True)))
            if targets[i] < 0:
                logprobs[row] = (entry,)
            else:
                prompt.setdefault(row, []).append(entry)
        return Sampled(tokens, logprobs, {row: tuple(entries) for row, entries in prompt.items()})


class LogSoftmax:
    """Log-probabilities of one row of logits, summed in float64."""

    def __init__(self, logits: Logits) -> None:
        """Keeps a copy: the row is changed later."""
        self._logits = logits.copy()
        self._normaliser = math.log(weights(logits).sum()) + float(logits.max())

    def packed(self, token: int, count: int, columns: int) -> NDArray[np.int32]:
        """int32 [columns]: the token's value; the ids of the `count` largest, best first, of equals the lowest first;
        their values. Floats as their bits; (columns - 1) / 2 places for each of the last two."""
        places = (columns - 1) // 2
        result = np.zeros(columns, dtype=np.int32)
        values = result.view(np.float32)
        values[0] = self._logits[token] - self._normaliser
        if count:
            ids = np.flatnonzero(self._logits >= np.float32(kth_largest(self._logits, count)))
            ids = ids[np.argsort(-self._logits[ids], kind="stable")][:count]
            result[1 : 1 + count] = ids
            values[1 + places : 1 + places + count] = self._logits[ids] - self._normaliser
        return result


def draw(probabilities: NDArray[np.float64], share: float) -> int:
    """The first index at which the running sum exceeds `share`, in [0, 1), of the total: never one of weight 0."""
    blocks = np.cumsum(np.add.reduceat(probabilities, np.arange(0, len(probabilities), _BLOCK)))
    wanted = share * blocks[-1]
    # `share` is at most 1 - 2**-53, so `wanted`, even rounded, is less than the total: the search ends in a block.
    block = int(np.searchsorted(blocks, wanted, side="right"))
    first = block * _BLOCK
    sums = np.cumsum(probabilities[first : first + _BLOCK])
    rest = wanted - (blocks[block - 1] if block else 0.0)
    # A block's running sum may end a rounding error below its share of `blocks`.
    rest = min(rest, np.nextafter(sums[-1], 0.0))
    return first + int(np.searchsorted(sums, rest, side="right"))
