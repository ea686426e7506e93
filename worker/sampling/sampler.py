"""Sampler: logits to tokens. The rows of a step are shared over the ranks; every rank ends with all tokens.

Log-probabilities are those of the model's own logits, before temperature and filters. A row's token depends on its
logits, its parameters, its seed and its position alone: never on its batch or on the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from allspan.protos.results import TokenLogprob
from allspan.protos.sampling import SamplingParams
from allspan.worker.parallel.base import Collectives
from allspan.worker.sampling.features import (
    Feature,
    MinP,
    MinTokens,
    Rows,
    Temperature,
    TopK,
    TopP,
    cumulative_weights,
)
from allspan.worker.sampling.philox import uniforms


@dataclass(frozen=True, slots=True)
class Sampled:
    """A step's tokens int32 [m], -1 where the logits were not finite, and the log-probabilities of rows that asked."""

    tokens: NDArray[np.int32]
    logprobs: dict[int, tuple[TokenLogprob, ...]]


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
        self._filters: tuple[Feature, ...] = (
            Temperature(max_rows),
            TopK(max_rows),
            TopP(max_rows),
            MinP(max_rows),
        )
        self._is_random = np.zeros(max_rows, dtype=np.bool_)
        self._seeds = np.zeros(max_rows, dtype=np.uint64)
        self._num_logprobs = np.full(max_rows, -1, dtype=np.int64)

    def add(self, row: int, params: SamplingParams, prompt_len: int) -> None:
        for feature in (self._min_tokens, *self._filters):
            feature.add(row, params, prompt_len)
        self._is_random[row] = not params.is_greedy
        self._seeds[row] = params.seed or 0
        self._num_logprobs[row] = -1 if params.logprobs is None else params.logprobs

    def remove(self, row: int) -> None:
        for feature in (self._min_tokens, *self._filters):
            feature.remove(row)
        self._is_random[row] = False
        self._num_logprobs[row] = -1

    def sample(self, logits: Tensor, rows: Rows, positions: Rows) -> Sampled:
        """One token for each of `rows` [m]. `logits` float32 [m, widths[rank]] is this rank's slice and is overwritten;
        `positions` [m] are the tokens' indices in their requests, prompt included."""
        world = self._collectives
        asked = self._num_logprobs[rows]
        most = int(asked.max(initial=-1))
        columns = 1 if most < 0 else 2 + 2 * most
        mine = slice(world.rank, None, world.size)
        if world.size == 1:
            result = self._sample_rows(logits, rows, positions, columns)
        else:
            whole = logits.new_empty((len(rows[mine]), self._vocab_size))
            world.exchange_rows(logits, self._widths, whole)
            part = self._sample_rows(whole, rows[mine], positions[mine], columns)
            result = part.new_empty((len(rows), columns))
            world.all_gather_rows(part, result)
        return _unpack(result.cpu().numpy(), rows, asked)

    def _sample_rows(self, logits: Tensor, rows: Rows, positions: Rows, columns: int) -> Tensor:
        """int32 [m, columns]: the token; then, if asked for, its log-probability, the most likely ids and theirs."""
        raw = torch.log_softmax(logits, dim=1) if columns > 1 else None
        self._min_tokens.apply(logits, rows, positions)
        best = torch.argmax(logits, dim=1)
        is_finite = torch.isfinite(logits.gather(1, best[:, None])[:, 0])
        random = np.flatnonzero(self._is_random[rows])
        if random.size:
            self._draw(logits, best, random, rows, positions)
        tokens = torch.where(is_finite, best, -1).to(torch.int32)[:, None]
        if raw is None:
            return tokens
        top = torch.topk(raw, min((columns - 2) // 2, raw.shape[1]), dim=1)
        chosen = raw.gather(1, best[:, None])
        floats = torch.cat([chosen, top.values], dim=1).view(torch.int32)
        result = torch.cat([tokens, floats[:, :1], top.indices.to(torch.int32), floats[:, 1:]], dim=1)
        return torch.nn.functional.pad(result, (0, columns - result.shape[1]))

    def _draw(self, logits: Tensor, tokens: Tensor, at: Rows, rows: Rows, positions: Rows) -> None:
        """Replaces tokens[at] by draws: the first token at which the running sum passes a random share of the total."""
        where = torch.from_numpy(at).to(logits.device)
        x = logits if at.size == len(rows) else logits[where]
        rows, positions = rows[at], positions[at]
        for feature in self._filters:
            feature.apply(x, rows, positions)
        sums = cumulative_weights(x)
        # A uniform number is at most 1 - 2**-53, so its product with the total is less than the total, even rounded:
        # the search never runs into the masked tokens at the end.
        shares = torch.from_numpy(uniforms(self._seeds[rows], positions)).to(x.device)[:, None]
        tokens[where] = torch.searchsorted(sums, shares * sums[:, -1:], right=True)[:, 0].clamp_(max=x.shape[1] - 1)


def _unpack(result: NDArray[np.int32], rows: Rows, asked: Rows) -> Sampled:
    tokens = result[:, 0]
    if result.shape[1] == 1:
        return Sampled(tokens, {})
    most = (result.shape[1] - 2) // 2
    values = result.view(np.float32)
    logprobs: dict[int, tuple[TokenLogprob, ...]] = {}
    for i in np.flatnonzero(asked >= 0).tolist():
        count = int(asked[i])
        ids = result[i, 2 : 2 + count].tolist()
        top = values[i, 2 + most : 2 + most + count].tolist()
        logprobs[int(rows[i])] = (TokenLogprob(float(values[i, 1]), tuple(zip(ids, top, strict=True))),)
    return Sampled(tokens, logprobs)
