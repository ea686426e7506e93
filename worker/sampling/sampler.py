"""Sampler: logits to tokens. The rows of a step are shared over the ranks; every rank ends with all tokens.

Log-probabilities are those of the model's own logits, before penalties, masks, temperature and filters. A row's token
depends on its logits, its parameters, its seed, its position and the tokens before it: never on its batch, on the
number of ranks, or on whether it was preempted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from allspan.kernels.abi.sampling import NOT_FINITE, SETTINGS
from allspan.protos.api.errors import InternalError
from allspan.protos.api.sampling import SamplingParams
from allspan.worker.parallel.base import Collectives
from allspan.worker.parallel.local import LocalCollectives
from allspan.worker.sampling.best_tokens import BestTokens
from allspan.worker.sampling.device import DeviceSampler, DeviceTokens, Sampling
from allspan.worker.sampling.grammar import CompiledGrammar
from allspan.worker.sampling.grammar_masks import GrammarMasks, MaskMaker
from allspan.worker.sampling.host_sampler import HostSampler
from allspan.worker.sampling.kernel import settings_of
from allspan.worker.sampling.logits_processors import device_change, needs_tokens, processors_of
from allspan.worker.sampling.masks import ends_of
from allspan.worker.sampling.processor import SamplingRow
from allspan.worker.sampling.result import LogprobCounts, Rows, Sampled, Wanted, unpack

_NO_TOKENS = np.zeros(0, dtype=np.int32)


class Launched(Protocol):
    """A step's tokens on their way on a GPU."""

    @property
    def tokens(self) -> Tensor:
        """int32 [m] there; negative as in `Sampled.tokens`."""

    def result(self) -> Sampled:
        """Waits for them. Raises DeadlineExceeded."""


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
    wanted: Wanted

    @property
    def tokens(self) -> Tensor:
        return self.step.tokens

    def result(self) -> Sampled:
        return unpack(self.step.result(), self.wanted)


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
        self.masks = masks or MaskMaker()
        self._widths = widths
        self._vocab_size = sum(widths)
        self._collectives = collectives if len(widths) > 1 else LocalCollectives()
        self._eos = eos_token_ids
        self._kernel = sampling.kernel
        self.to_host = sampling.to_host
        """See `allspan.worker.sampling.device.Sampling.to_host`."""
        self._device = sampling.device if len(widths) == 1 else None
        self._settings = np.zeros(max_rows, dtype=SETTINGS)
        self._logprobs = LogprobCounts(max_rows, self._vocab_size)
        share = (0, 1) if self._device else (self._collectives.rank, self._collectives.size)
        self._grammars = GrammarMasks(self._vocab_size, self.masks, self._device is None, share)
        self._host = HostSampler(sampling.kernel, self._grammars)
        self._best = BestTokens(max_rows, widths, self._collectives, sampling)
        self._demanding: set[int] = set()
        """Rows that want more than the most likely token. While there are none, a step takes a short way."""
        self._waiting: set[int] = set()
        """Rows that must know their last token on the host, or those of the prompt, before the next one is sampled; and
        where the host samples, all that want more than the most likely token."""

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
            asked = replace(asked, grammar=self._grammars.add(row, grammar, tokens, prompt_len, ends, first_end))
        processors = processors_of(asked)
        self._host.add(row, asked, processors)
        self._logprobs.add(row, params)
        if processors or not params.is_greedy or params.logprobs is not None:
            self._demanding.add(row)
        if self._device:
            self._device.add(row, device_change(asked, processors))
        if params.prompt_logprobs is not None or (needs_tokens(processors) if self._device else row in self._demanding):
            self._waiting.add(row)

    def remove(self, row: int) -> None:
        """The row has ended."""
        self._host.remove(row)
        self._grammars.remove(row)
        self._demanding.discard(row)
        self._waiting.discard(row)
        if self._device:
            self._device.remove(row)

    def begin_drafts(self, row: int, position: int) -> None:
        """The row's tokens from `position` on are drafts, until `retract`."""
        self._grammars.begin_drafts(row, position)

    def retract(self, row: int, position: int) -> None:
        """Drafts of the row have been verified: of what it was sampled by, its tokens before `position` hold. A device
        has counted no others."""
        self._grammars.retract(row, position)
        if not self._device:
            self._host.retract(row)

    def _asked(
        self, params: SamplingParams, prompt_len: int = 0, tokens: NDArray[np.int32] = _NO_TOKENS
    ) -> SamplingRow:
        return SamplingRow(params, prompt_len, tokens, self._vocab_size, self._eos, self._kernel)

    def prepare(self, rows: Rows, positions: Rows, targets: Rows | None) -> None:
        """Begins what `sample` will need of these, before their logits are there: returns at once."""
        if self._demanding:
            self._grammars.begin(rows, positions, targets)

    def wanted(self, rows: Rows, positions: Rows, targets: Rows | None) -> Wanted:
        """What `sample` makes of these rows of logits."""
        return self._logprobs.wanted(rows, positions, targets)

    def sample(self, logits: Tensor, rows: Rows, positions: Rows, targets: Rows | None = None) -> Sampled:
        """Returns a token, or its log-probabilities, for each row of logits.

        `logits` float32 [m, widths[rank]] is this rank's slice and is overwritten. `rows` [m] say whose they are, one
        row as often as it likes; `positions` [m] are the tokens' indices in their requests, prompt included. Where
        `targets` [m] is -1 (None: everywhere) the token is sampled; else it is known, a prompt's, and only its
        log-probability and the most likely tokens there are wanted.
        """
        if targets is None and not self._demanding and not self._device:
            return Sampled(self._best.of(logits), {})
        wanted = self._logprobs.wanted(rows, positions, targets)
        if self._device:
            return self._launch_on(self._device, logits, wanted).result()
        columns, world = wanted.columns, self._collectives
        logits = self.to_host(logits)
        if world.size == 1:
            return unpack(self._sample_rows(logits, wanted, columns), wanted)
        mine = wanted.share(world.rank, world.size)
        whole = logits.new_empty((len(mine.rows), self._vocab_size))
        world.exchange_rows(logits, self._widths, whole)
        part = self._sample_rows(whole, mine, columns)
        result = torch.empty((len(rows), columns), dtype=torch.int32)
        world.all_gather_rows(torch.from_numpy(part), result)
        return unpack(result.numpy(), wanted)

    def samples_ahead(self, params: SamplingParams) -> bool:
        """Whether rows that ask for this need not know their last token on the host to sample the next one: `launch`
        does not wait for them, in a batch of such rows alone."""
        if self._collectives.size > 1 or params.prompt_logprobs is not None or params.grammar is not None:
            return False
        processors = processors_of(self._asked(params))
        if self._device:
            return not needs_tokens(processors)
        return params.is_greedy and params.logprobs is None and not processors

    @property
    def takes_all_ranks(self) -> bool:
        """Whether ranks have parts of the logits, so that they sample together."""
        return self._collectives.size > 1

    @property
    def keeps_tokens(self) -> bool:
        """Whether the tokens of `launch` are there on the device, for the next step, before the host knows them."""
        return not (self.takes_all_ranks or self._waiting)

    def launch(self, logits: Tensor, rows: Rows, positions: Rows, targets: Rows | None = None) -> Launched:
        """Begins what `sample` does, for logits on a GPU, and returns while they are still being computed. Where a row
        is not `samples_ahead`, it samples when the result is asked for."""
        if not self.keeps_tokens or targets is not None:
            return _Deferred(self, logits, rows, positions, targets)
        if self._device:
            return self._launch_on(self._device, logits, self._logprobs.wanted(rows, positions, None))
        values, ids = logits.max(dim=1)
        return _Greedy(torch.where(values.isfinite(), ids, NOT_FINITE).int(), self.to_host)

    def _launch_on(self, device: DeviceSampler, logits: Tensor, wanted: Wanted) -> _OnDevice:
        if not self._demanding and wanted.counts.max(initial=-1) < 0 and wanted.targets.max(initial=-1) < 0:
            return _OnDevice(device.launch_best(logits), wanted)
        self._grammars.wait()
        step = device.launch(logits, wanted.rows, wanted.positions, wanted.targets, self._settings, wanted.counts)
        return _OnDevice(step, wanted)

    def _sample_rows(self, whole: Tensor, wanted: Wanted, columns: int) -> NDArray[np.int32]:
        return self._host.sample(np.ascontiguousarray(whole.numpy()), wanted, columns, self._settings)
