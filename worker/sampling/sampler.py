"""Sampler: logits to tokens. The rows of a step are shared over the ranks; every rank ends with all tokens.

Log-probabilities are those of the model's own logits, before penalties, masks, temperature and filters. A row's token
depends on its logits, its parameters, its seed, its position and the tokens before it: never on its batch, on the
number of ranks, or on whether it was preempted.
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
from allspan.worker.sampling.failure import ALL_MASKED, NOT_FINITE
from allspan.worker.sampling.features import Change, Logits, Row, changes_of
from allspan.worker.sampling.kernel import SamplingKernel, sampling_kernel
from allspan.worker.sampling.settings import SETTINGS, settings_of

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step made of its m rows of logits."""

    tokens: NDArray[np.int32]
    """[m]: the token sampled, or where it was known, that one; negative where there is none (see `failure`)."""
    logprobs: dict[int, tuple[TokenLogprob, ...]]
    """Of the sampled tokens of those rows that asked."""
    prompt_logprobs: dict[int, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    """Of the known tokens of each row, in the order of their logits."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What is wanted of some rows of logits. All int64 [m]."""

    rows: Rows
    positions: Rows
    targets: Rows
    counts: Rows
    """Log-probabilities of so many of the most likely tokens, and of the chosen one; -1: none at all."""

    def share(self, rank: int, size: int) -> _Wanted:
        parts = (self.rows, self.positions, self.targets, self.counts)
        return _Wanted(*(np.ascontiguousarray(part[rank::size]) for part in parts))


class Sampler:
    """Keeps what each row asked for; the same on every rank."""

    def __init__(
        self,
        max_rows: int,
        widths: tuple[int, ...],
        collectives: Collectives,
        eos_token_ids: tuple[int, ...] = (),
        kernel: SamplingKernel | None = None,
    ) -> None:
        """`widths`: columns of each rank's logits; together the vocabulary. `kernel` None: the fastest there is."""
        self._widths = widths
        self._vocab_size = sum(widths)
        self._collectives = collectives
        self._eos = eos_token_ids
        self._kernel = kernel or sampling_kernel()
        self._settings = np.zeros(max_rows, dtype=SETTINGS)
        self._changes: dict[int, tuple[Change, ...]] = {}
        """Of those rows that have any."""
        self._num_logprobs = np.full(max_rows, -1, dtype=np.int64)
        self._num_prompt_logprobs = np.zeros(max_rows, dtype=np.int64)

    def add(self, row: int, params: SamplingParams, prompt_len: int, tokens: NDArray[np.int32]) -> None:
        """`tokens` [max_model_len] is the row's, prompt and output, kept up to date by its owner: when the token at
        `position` is to be sampled, the ones before it are there."""
        self._settings[row] = settings_of(params)
        asked = Row(params, prompt_len, tokens, self._vocab_size, self._eos, self._kernel)
        if changes := changes_of(asked):
            self._changes[row] = changes
        self._num_logprobs[row] = -1 if params.logprobs is None else min(params.logprobs, self._vocab_size)
        self._num_prompt_logprobs[row] = min(params.prompt_logprobs or 0, self._vocab_size)

    def remove(self, row: int) -> None:
        self._changes.pop(row, None)

    def sample(self, logits: Tensor, rows: Rows, positions: Rows, targets: Rows | None = None) -> Sampled:
        """A token, or its log-probabilities, for each row of logits.

        `logits` float32 [m, widths[rank]] is this rank's slice and is overwritten. `rows` [m] say whose they are, one
        row as often as it likes; `positions` [m] are the tokens' indices in their requests, prompt included. Where
        `targets` [m] is -1 (None: everywhere) the token is sampled; else it is known, a prompt's, and only its
        log-probability and the most likely tokens there are wanted.
        """
        counts = self._num_logprobs[rows]
        if targets is None:
            targets = np.full(len(rows), -1, dtype=np.int64)
        else:
            counts = np.where(targets < 0, counts, self._num_prompt_logprobs[rows])
        wanted = _Wanted(rows, positions, targets, counts)
        most = int(counts.max(initial=-1))
        # The token; then, if any row asked, its log-probability, the most likely ids and theirs (floats as their bits).
        columns = 1 if most < 0 else 2 + 2 * most
        world = self._collectives
        logits = logits.cpu()
        if world.size == 1:
            return _unpack(self._sample_rows(logits, wanted, columns), wanted)
        if columns == 1 and self._is_plain(rows, targets):
            return Sampled(self._greedy(logits, wanted), {})
        mine = wanted.share(world.rank, world.size)
        whole = logits.new_empty((len(mine.rows), self._vocab_size))
        world.exchange_rows(logits, self._widths, whole)
        part = self._sample_rows(whole, mine, columns)
        result = torch.empty((len(rows), columns), dtype=torch.int32)
        world.all_gather_rows(torch.from_numpy(part), result)
        return _unpack(result.numpy(), wanted)

    def _is_plain(self, rows: Rows, targets: Rows) -> bool:
        """Nothing but the most likely token of each row is wanted."""
        return not (self._changes or self._settings["is_random"][rows].any() or (targets >= 0).any())

    def _greedy(self, logits: Tensor, wanted: _Wanted) -> NDArray[np.int32]:
        """What `_sample_rows` says of plain rows, from each rank's best token instead of from whole rows."""
        size, count = self._collectives.size, len(wanted.rows)
        columns: Logits = np.ascontiguousarray(logits.numpy())
        best = np.zeros((count, 2), dtype=np.int32)
        best[:, :1] = self._tokens(columns, wanted)
        ids, values = best[:, 0], best.view(np.float32)[:, 1]
        values[:] = np.where(ids < 0, -np.inf, columns[np.arange(count), ids])
        gathered = torch.empty((count * size, 2), dtype=torch.int32)
        self._collectives.all_gather_rows(torch.from_numpy(best), gathered)
        everyone = gathered.numpy().reshape(count, size, 2)
        at, winner = np.arange(count), everyone.view(np.float32)[:, :, 1].argmax(axis=1)  # of equals, the lowest id
        tokens = everyone[at, winner, 0] + np.cumsum((0, *self._widths))[winner]
        is_bad = (everyone[:, :, 0] == NOT_FINITE).any(axis=1) | (everyone[at, winner, 0] < 0)
        return np.where(is_bad, NOT_FINITE, tokens).astype(np.int32)

    def _tokens(self, logits: Logits, wanted: _Wanted) -> NDArray[np.int32]:
        """[m, 1]"""
        result = np.zeros((len(wanted.rows), 1), dtype=np.int32)
        self._kernel.sample_rows(logits, wanted.rows, wanted.positions, wanted.targets, self._settings, result)
        return result

    def _sample_rows(self, whole: Tensor, wanted: _Wanted, columns: int) -> NDArray[np.int32]:
        """int32 [m, columns] for whole rows of logits [m, vocabulary]."""
        logits: Logits = np.ascontiguousarray(whole.numpy())
        result = np.zeros((len(wanted.rows), columns), dtype=np.int32)
        raw = self._change(logits, wanted) if self._changes else {}
        self._kernel.sample_rows(logits, wanted.rows, wanted.positions, wanted.targets, self._settings, result)
        for i in np.flatnonzero(result[:, 0] == ALL_MASKED).tolist():
            if i not in raw:  # it came so from the model
                result[i, 0] = NOT_FINITE
        if columns > 1:
            for i, row in raw.items():
                if row is not None:
                    logits[i] = row
            self._kernel.log_softmax_rows(logits, wanted.counts, result)
        return result

    def _change(self, logits: Logits, wanted: _Wanted) -> dict[int, Logits | None]:
        """Applies the rows' changes. Which have been changed, with their raw logits if these are needed later."""
        raw: dict[int, Logits | None] = {}
        for i, row in enumerate(wanted.rows.tolist()):
            changes = self._changes.get(row)
            if changes is None or wanted.targets[i] >= 0 or not math.isfinite(logits[i].max()):
                continue
            raw[i] = logits[i].copy() if wanted.counts[i] >= 0 else None
            position = int(wanted.positions[i])
            for change in changes:
                change(position, logits[i])
        return raw


def _unpack(result: NDArray[np.int32], wanted: _Wanted) -> Sampled:
    tokens = result[:, 0]
    if result.shape[1] == 1:
        return Sampled(tokens, {})
    most = (result.shape[1] - 2) // 2
    floats = result.view(np.float32)
    logprobs: dict[int, tuple[TokenLogprob, ...]] = {}
    prompt: dict[int, list[TokenLogprob]] = {}
    for i in np.flatnonzero(wanted.counts >= 0).tolist():
        row, count = int(wanted.rows[i]), int(wanted.counts[i])
        ids = result[i, 2 : 2 + count].tolist()
        top = floats[i, 2 + most : 2 + most + count].tolist()
        entry = TokenLogprob(float(floats[i, 1]), tuple(zip(ids, top, strict=True)))
        if wanted.targets[i] < 0:
            logprobs[row] = (entry,)
        else:
            prompt.setdefault(row, []).append(entry)
    return Sampled(tokens, logprobs, {row: tuple(entries) for row, entries in prompt.items()})
