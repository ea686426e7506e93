"""Sampler: logits to tokens. The rows of a step are shared over the ranks; every rank ends with all tokens.

Log-probabilities are those of the model's own logits, before penalties, masks, temperature and filters. A row's token
depends on its logits, its parameters, its seed, its position and the tokens before it: never on its batch, on the
number of ranks, or on whether it was preempted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from allspan.kernels.abi.sampling import ALL_MASKED, NOT_FINITE, SETTINGS
from allspan.protos.api.errors import InternalError
from allspan.protos.api.results import TokenLogprob
from allspan.protos.api.sampling import SamplingParams
from allspan.worker.parallel.base import Collectives
from allspan.worker.parallel.local import LocalCollectives
from allspan.worker.sampling.device import DeviceSampler, DeviceTokens, Sampling
from allspan.worker.sampling.grammar import CompiledGrammar, GrammarRow, MaskMaker, SeenMasks
from allspan.worker.sampling.logits_processors import device_change, needs_tokens, processors_of
from allspan.worker.sampling.masks import ends_of
from allspan.worker.sampling.processor import Logits, LogitsProcessor, SamplingRow
from allspan.worker.sampling.settings import settings_of

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


class Launched(Protocol):
    """A step's tokens on their way on a GPU."""

    @property
    def tokens(self) -> Tensor:
        """int32 [m] there; negative as in `Sampled.tokens`."""

    def result(self) -> Sampled:
        """Waits for them. Raises DeadlineExceeded."""


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


@dataclass(frozen=True, slots=True)
class _Deferred:
    """Logits that are sampled when their tokens are asked for."""

    sampler: Sampler
    logits: Tensor
    rows: Rows
    positions: Rows
    targets: Rows | None

    @property
    def tokens(self) -> Tensor:
        raise InternalError("the tokens of rows that are sampled on the host were asked for on the device")

    def result(self) -> Sampled:
        return self.sampler.sample(self.logits, self.rows, self.positions, self.targets)


@dataclass(frozen=True, slots=True)
class _Greedy:
    tokens: Tensor
    to_host: Callable[[Tensor], Tensor]

    def result(self) -> Sampled:
        return Sampled(self.to_host(self.tokens).numpy(), {})


@dataclass(frozen=True, slots=True)
class _OnDevice:
    step: DeviceTokens
    wanted: _Wanted

    @property
    def tokens(self) -> Tensor:
        return self.step.tokens

    def result(self) -> Sampled:
        return _unpack(self.step.result(), self.wanted)


class Sampler:
    """Keeps what each row asked for; the same on every rank."""

    def __init__(
        self,
        max_rows: int,
        widths: tuple[int, ...],
        collectives: Collectives,
        eos_token_ids: tuple[int, ...] = (),
        sampling: Sampling | None = None,
        masks: MaskMaker | None = None,
    ) -> None:
        """`widths`: columns of each rank's logits; together the vocabulary. A single one: each rank has whole rows, and
        samples all of them, as the others do. `sampling` None: the host's kernel. `masks` makes those of grammars
        ahead."""
        sampling = sampling or Sampling()
        self._to_host = sampling.to_host
        self._widths = widths
        self._vocab_size = sum(widths)
        self._collectives = collectives if len(widths) > 1 else LocalCollectives()
        self._eos = eos_token_ids
        self._device = sampling.device if len(widths) == 1 else None
        self._local = sampling.device if len(widths) > 1 else None
        """Finds the best columns of this rank's part of the rows; those who want more exchange it on the host."""
        self._kernel = sampling.kernel
        self._settings = np.zeros(max_rows, dtype=SETTINGS)
        self._processors: dict[int, tuple[LogitsProcessor, ...]] = {}
        """Of those rows that have any."""
        self._rows: dict[int, SamplingRow] = {}
        """What those rows asked for."""
        self._num_logprobs = np.full(max_rows, -1, dtype=np.int64)
        self._num_prompt_logprobs = np.zeros(max_rows, dtype=np.int64)
        self._demanding: set[int] = set()
        """Rows that want more than the most likely token. While there are none, a step takes a short way."""
        self._waiting: set[int] = set()
        """Rows that want to know their last token on the host, or that of a prompt, before the next one is sampled; and
        where the host samples, all who want more than the most likely one."""
        self._grammars: dict[int, GrammarRow] = {}
        """Of those rows that have one."""
        self.masks = masks or MaskMaker()
        self._seen_masks = SeenMasks(self._vocab_size)
        self._seen: Tensor | None = None
        self._seen_as: Logits = np.zeros((0, 0), dtype=np.float32)
        """`_seen` for numpy: a model gives out the same tensor at every step of as many rows."""
        self._at = np.arange(max_rows)
        self._no_tokens = np.zeros(0, dtype=np.int32)
        self._first_columns = np.cumsum((0, *widths[:-1]), dtype=np.int32)
        self._best = torch.empty((1, 2), dtype=torch.int32)
        self._bests = torch.empty((self._collectives.size, 2), dtype=torch.int32)

    def add(
        self,
        row: int,
        params: SamplingParams,
        prompt_len: int,
        tokens: NDArray[np.int32],
        grammar: CompiledGrammar | None = None,
    ) -> None:
        """`tokens` [max_model_len] is the row's, prompt and output, kept up to date by its owner: when the token at
        `position` is to be sampled, the ones before it are there. `grammar`: that of `params`."""
        self._settings[row] = settings_of(params)
        asked = self._asked(params, prompt_len, tokens)
        if grammar is not None:
            ends, first_end = ends_of(params, self._eos, self._vocab_size), prompt_len + params.min_tokens
            on_host = self._device is None
            self._grammars[row] = GrammarRow(grammar, tokens, prompt_len, ends, self._seen_masks, first_end, on_host)
            asked = replace(asked, grammar=self._grammars[row])
        if processors := processors_of(asked):
            self._processors[row], self._rows[row] = processors, asked
        self._num_logprobs[row] = -1 if params.logprobs is None else min(params.logprobs, self._vocab_size)
        self._num_prompt_logprobs[row] = min(params.prompt_logprobs or 0, self._vocab_size)
        if processors or not params.is_greedy or params.logprobs is not None:
            self._demanding.add(row)
        if self._device:
            self._device.add(row, device_change(asked, processors))
        if params.prompt_logprobs is not None or (needs_tokens(processors) if self._device else row in self._demanding):
            self._waiting.add(row)

    def remove(self, row: int) -> None:
        self._processors.pop(row, None)
        self._rows.pop(row, None)
        self._grammars.pop(row, None)
        self._demanding.discard(row)
        self._waiting.discard(row)
        if self._device:
            self._device.remove(row)

    def verifies_drafts(self, params: SamplingParams) -> bool:
        """Whether several tokens of such a row can be sampled in one step, the later ones behind drafts."""
        return self._device is None or (
            params.grammar is None and not processors_of(self._asked(params, 0, self._no_tokens))
        )

    def begin_drafts(self, row: int, position: int) -> None:
        """The row's tokens from `position` on are drafts, until `retract`."""
        if grammar := self._grammars.get(row):
            grammar.begin_drafts(position)

    def retract(self, row: int, position: int) -> None:
        """Drafts of the row have been verified: of what it was sampled by, its tokens before `position` hold."""
        if grammar := self._grammars.get(row):
            grammar.retract(position)
        if row in self._processors:  # the others count tokens, and begin anew
            self._processors[row] = processors_of(self._rows[row])

    def _asked(self, params: SamplingParams, prompt_len: int, tokens: NDArray[np.int32]) -> SamplingRow:
        return SamplingRow(params, prompt_len, tokens, self._vocab_size, self._eos, self._kernel)

    def prepare(self, rows: Rows, positions: Rows, targets: Rows | None) -> None:
        """Begins what `sample` will need of these, before their logits are there: returns at once."""
        if not self._grammars:
            return
        size = 1 if self._device else self._collectives.size
        first = 0 if self._device else self._collectives.rank
        mine: dict[GrammarRow, int] = {}
        for i in range(first, len(rows), size):
            if (grammar := self._grammars.get(int(rows[i]))) and (targets is None or targets[i] < 0):
                mine.setdefault(grammar, int(positions[i]))  # those behind drafts are made one after the other
        if mine:
            self.masks.begin(list(mine.items()))

    def sample(self, logits: Tensor, rows: Rows, positions: Rows, targets: Rows | None = None) -> Sampled:
        """A token, or its log-probabilities, for each row of logits.

        `logits` float32 [m, widths[rank]] is this rank's slice and is overwritten. `rows` [m] say whose they are, one
        row as often as it likes; `positions` [m] are the tokens' indices in their requests, prompt included. Where
        `targets` [m] is -1 (None: everywhere) the token is sampled; else it is known, a prompt's, and only its
        log-probability and the most likely tokens there are wanted.
        """
        if targets is None and not self._demanding and not self._device:
            return Sampled(self._greedy(logits), {})
        counts = self._num_logprobs[rows]
        if targets is None:
            targets = np.full(len(rows), -1, dtype=np.int64)
        else:
            counts = np.where(targets < 0, counts, self._num_prompt_logprobs[rows])
        wanted = _Wanted(rows, positions, targets, counts)
        if self._device:
            return self._launch_on(self._device, logits, wanted).result()
        most = int(counts.max(initial=-1))
        # The token; then, if any row asked, its log-probability, the most likely ids and theirs (floats as their bits).
        columns = 1 if most < 0 else 2 + 2 * most
        world = self._collectives
        logits = self._to_host(logits)
        if world.size == 1:
            return _unpack(self._sample_rows(logits, wanted, columns), wanted)
        mine = wanted.share(world.rank, world.size)
        whole = logits.new_empty((len(mine.rows), self._vocab_size))
        world.exchange_rows(logits, self._widths, whole)
        part = self._sample_rows(whole, mine, columns)
        result = torch.empty((len(rows), columns), dtype=torch.int32)
        world.all_gather_rows(torch.from_numpy(part), result)
        return _unpack(result.numpy(), wanted)

    def samples_ahead(self, params: SamplingParams) -> bool:
        """Whether rows that ask for this need not know their last token on the host to sample the next one: `launch`
        does not wait for them, in a batch of such rows alone."""
        if self._collectives.size > 1 or params.prompt_logprobs is not None or params.grammar is not None:
            return False
        processors = processors_of(self._asked(params, 0, self._no_tokens))
        if self._device:
            return not needs_tokens(processors)
        return params.is_greedy and params.logprobs is None and not processors

    def launch(self, logits: Tensor, rows: Rows, positions: Rows, targets: Rows | None = None) -> Launched:
        """As `sample`, for logits on a GPU: returns while they are still being computed. Where a row is not
        `samples_ahead`, it samples when the result is asked for."""
        if self._collectives.size > 1 or self._waiting or targets is not None:
            return _Deferred(self, logits, rows, positions, targets)
        if self._device:
            wanted = _Wanted(rows, positions, np.full(len(rows), -1, dtype=np.int64), self._num_logprobs[rows])
            return self._launch_on(self._device, logits, wanted)
        values, ids = logits.max(dim=1)
        return _Greedy(torch.where(values.isfinite(), ids, NOT_FINITE).int(), self._to_host)

    def _launch_on(self, device: DeviceSampler, logits: Tensor, wanted: _Wanted) -> _OnDevice:
        if not self._demanding and wanted.counts.max(initial=-1) < 0 and wanted.targets.max(initial=-1) < 0:
            return _OnDevice(device.launch_best(logits), wanted)
        self.masks.wait()
        step = device.launch(logits, wanted.rows, wanted.positions, wanted.targets, self._settings, wanted.counts)
        return _OnDevice(step, wanted)

    def _greedy(self, logits: Tensor) -> NDArray[np.int32]:
        """The most likely token of each row, int32 [m]: what `_sample_rows` says of rows that want no more."""
        if self._local:
            return self._best_of_ranks(self._local.best_pairs(logits))
        if logits is not self._seen:
            self._seen = logits if logits.is_cpu else None
            self._seen_as = self._to_host(logits).numpy()
        array = self._seen_as
        tokens = np.empty(len(array), dtype=np.int32)
        self._kernel.best_tokens(array, tokens)
        if self._collectives.size > 1 and len(tokens) > 1:
            mine = np.empty((len(tokens), 2), dtype=np.int32)
            mine[:, 0] = tokens
            mine.view(np.float32)[:, 1] = array[self._at[: len(tokens)], np.maximum(tokens, 0)]
            return self._best_of_ranks(mine)
        if self._collectives.size > 1:
            tokens = self._one_best_of_ranks(array, tokens)
        if min(tokens.tolist(), default=0) < 0:
            tokens[tokens < 0] = NOT_FINITE
        return tokens

    def _best_of_ranks(self, mine: NDArray[np.int32]) -> NDArray[np.int32]:
        """From each rank's best columns, or what is wrong with them, and the bits of their logits, `mine` [m, 2], to
        tokens: no rank needs a whole row."""
        count, size, at = len(mine), self._collectives.size, self._at[: len(mine)]
        gathered = torch.empty((count * size, 2), dtype=torch.int32)
        self._collectives.all_gather_rows(torch.from_numpy(mine), gathered)
        everyone = gathered.numpy().reshape(count, size, 2)
        ranks = everyone.view(np.float32)[:, :, 1].argmax(axis=1)  # of equals the first, so the lowest id
        tokens = everyone[at, ranks, 0]
        is_bad = (tokens < 0) | (everyone[:, :, 0] == NOT_FINITE).any(axis=1)
        return np.where(is_bad, np.int32(NOT_FINITE), tokens + self._first_columns[ranks])

    def _one_best_of_ranks(self, logits: Logits, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """The same for one row of `logits`, without array operations: after a step's weights they would come from
        memory, too."""
        column = int(ids[0])
        mine, everyone = self._best.numpy(), self._bests.numpy()
        mine[0, 0] = column
        mine.view(np.float32)[0, 1] = logits[0, max(column, 0)]
        self._collectives.all_gather_rows(self._best, self._bests)
        columns, values = everyone[:, 0].tolist(), everyone.view(np.float32)[:, 1].tolist()
        if NOT_FINITE in columns:
            ids[0] = NOT_FINITE
        else:
            rank = values.index(max(values))  # of equals the first, so the lowest id
            ids[0] = columns[rank] + (int(self._first_columns[rank]) if columns[rank] >= 0 else 0)
        return ids

    def _sample_rows(self, whole: Tensor, wanted: _Wanted, columns: int) -> NDArray[np.int32]:
        """int32 [m, columns] for whole rows of logits [m, vocabulary]."""
        logits: Logits = np.ascontiguousarray(whole.numpy())
        result = np.zeros((len(wanted.rows), columns), dtype=np.int32)
        raw, verdicts = self._process(logits, wanted) if self._processors else ({}, {})
        self._kernel.sample_rows(logits, wanted.rows, wanted.positions, wanted.targets, self._settings, result)
        for i in np.flatnonzero(result[:, 0] == ALL_MASKED).tolist():
            result[i, 0] = verdicts.get(i, NOT_FINITE)  # or it came so from the model
        if columns > 1:
            for i, row in raw.items():
                if row is not None:
                    logits[i] = row
            self._kernel.log_softmax_rows(logits, wanted.counts, result)
        return result

    def _process(self, logits: Logits, wanted: _Wanted) -> tuple[dict[int, Logits | None], dict[int, int]]:
        """Applies the rows' processors. The rows that have any, with their raw logits if these are needed later; and
        what each one gets when no token is left."""
        raw: dict[int, Logits | None] = {}
        verdicts: dict[int, int] = {}
        self.masks.wait()
        for i, row in enumerate(wanted.rows.tolist()):
            processors = self._processors.get(row)
            if processors is None or wanted.targets[i] >= 0 or not math.isfinite(logits[i].max()):
                continue
            raw[i] = logits[i].copy() if wanted.counts[i] >= 0 else None
            position = int(wanted.positions[i])
            for processor in processors:
                processor.apply(position, logits[i])
            grammar = self._grammars.get(row)
            verdicts[i] = grammar.verdict if grammar else ALL_MASKED
        return raw, verdicts


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
            logprobs[row] = (*logprobs.get(row, ()), entry)
        else:
            prompt.setdefault(row, []).append(entry)
    return Sampled(tokens, logprobs, {row: tuple(entries) for row, entries in prompt.items()})
