"""HostSampler: whole rows of logits to tokens, on the host's processors."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from allspan.kernels.abi.sampling import ALL_MASKED, NOT_FINITE
from allspan.worker.sampling.grammar_masks import GrammarMasks
from allspan.worker.sampling.kernel import SamplingKernel, Settings
from allspan.worker.sampling.logits_processors import processors_of
from allspan.worker.sampling.processor import Logits, LogitsProcessor, SamplingRow
from allspan.worker.sampling.result import Wanted


class HostSampler:
    """Keeps the logits processors of each row; the host's counterpart of `DeviceSampler`."""

    def __init__(self, kernel: SamplingKernel, grammars: GrammarMasks) -> None:
        self._kernel = kernel
        self._grammars = grammars
        self._processors: dict[int, tuple[LogitsProcessor, ...]] = {}
        """The processors of the rows that have any."""
        self._asked: dict[int, SamplingRow] = {}
        """What those rows asked for."""

    def add(self, row: int, asked: SamplingRow, processors: tuple[LogitsProcessor, ...]) -> None:
        """A row begins, which has these processors."""
        if processors:
            self._processors[row], self._asked[row] = processors, asked

    def remove(self, row: int) -> None:
        """The row has ended."""
        self._processors.pop(row, None)
        self._asked.pop(row, None)

    def retract(self, row: int) -> None:
        """Tokens of the row were taken back: its processors, which count tokens, begin anew."""
        if row in self._processors:
            self._processors[row] = processors_of(self._asked[row])

    def sample(self, logits: Logits, wanted: Wanted, columns: int, settings: Settings) -> NDArray[np.int32]:
        """Returns int32 [m, columns] for whole rows of logits [m, vocabulary], which are changed. `settings`: of all
        rows."""
        result = np.zeros((len(wanted.rows), columns), dtype=np.int32)
        raw, verdicts = self._process(logits, wanted) if self._processors else ({}, {})
        self._kernel.sample_rows(logits, wanted.rows, wanted.positions, wanted.targets, settings, result)
        for i in np.flatnonzero(result[:, 0] == ALL_MASKED).tolist():
            result[i, 0] = verdicts.get(i, NOT_FINITE)  # or it came so from the model
        if columns > 1:
            for i, row in raw.items():
                if row is not None:
                    logits[i] = row
            self._kernel.log_softmax_rows(logits, wanted.counts, result)
        return result

    def _process(self, logits: Logits, wanted: Wanted) -> tuple[dict[int, Logits | None], dict[int, int]]:
        """Applies the rows' processors. Returns the rows that have any, with their raw logits if these are needed
        later; and what each one gets when no token is left."""
        raw: dict[int, Logits | None] = {}
        verdicts: dict[int, int] = {}
        self._grammars.wait()
        for i, row in enumerate(wanted.rows.tolist()):
            processors = self._processors.get(row)
            if processors is None or wanted.targets[i] >= 0 or not math.isfinite(logits[i].max()):
                continue
            raw[i] = logits[i].copy() if wanted.counts[i] >= 0 else None
            position = int(wanted.positions[i])
            for processor in processors:
                processor.apply(position, logits[i])
            verdicts[i] = self._grammars.verdict(row)
        return raw, verdicts
