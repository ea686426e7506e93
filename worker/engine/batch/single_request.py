"""SingleRequestSteps: the inputs of steps that run one request, made with few arrays: the weights have put everything
else out of the caches, so that each array that is touched takes time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from allspan.protos.api.errors import InternalError
from allspan.worker.engine.batch.batch_step import BatchStep, DecodeRun, LogitsRows
from allspan.worker.engine.batch.rows import Longs, RowStates
from allspan.worker.scheduler.plan import StepPlan
from allspan.worker.step.buffer_sizes import BatchSizes
from allspan.worker.step.inputs import InputBuffers
from allspan.worker.step.rank_drafter import RanStep


class SingleRequestSteps:
    """Makes steps of one request, for models with one cache group and one position a token."""

    def __init__(self, rows: RowStates, sizes: BatchSizes) -> None:
        self._rows = rows
        self._page_size = sizes.page_size
        self._numbers: Longs = np.arange(sizes.max_model_len + 1)

    @staticmethod
    def serves(sizes: BatchSizes) -> bool:
        """Whether steps of such sizes can be made here."""
        is_plain = len(sizes.lifetimes) == sizes.num_positions == sizes.attention_ranks == 1
        return is_plain and not (sizes.lifetimes[0].is_state or sizes.prompt_lengths)

    def takes(self, plan: StepPlan) -> bool:
        """Whether the plan runs one row, which asks for nothing but tokens, by ids and without an adapter."""
        if len(plan.runs) != 1:
            return False
        rows, row = self._rows, plan.runs[0].row
        return rows.adapters[row] < 0 and not (rows.prompt_ends[row] or rows.hidden or rows.embeddings)

    def begin(self, plan: StepPlan, buffers: InputBuffers) -> tuple[BatchStep, DecodeRun | None]:
        """The plan's step, and the run of decodes that begins with it."""
        rows, (run,) = self._rows, plan.runs
        values, logits = self._values(plan.step, run.row, run.num_tokens)
        inputs = buffers.fill(values)
        step = BatchStep(plan.step, inputs, logits, rows.leaves.count)
        step.drafted = tuple(row for row, _ in plan.drafts)
        ran = np.array([[run.row], [run.num_tokens], [rows.num_computed[run.row]]])
        step.ran = RanStep(inputs, *ran)
        rows.num_computed[run.row] += run.num_tokens
        rows.num_tokens[run.row] += len(logits.rows) > 0
        if run.num_tokens > 1 or not len(logits.rows):
            return step, None
        room = self._page_size - 1 - int(values["positions"][0]) % self._page_size
        return step, DecodeRun(plan.runs, step, room)

    def _values(self, step: int, row: int, count: int) -> tuple[dict[str, NDArray[Any]], LogitsRows]:
        """What the model reads of the row's next `count` tokens, and what their logits are for; see `Batch`."""
        rows, size, numbers = self._rows, self._page_size, self._numbers
        start, num_tokens = int(rows.num_computed[row]), int(rows.num_tokens[row])
        end, first = start + count, max(start, num_tokens - 1)
        pages = -(-end // size)
        if pages > rows.num_pages[0, row] or end > num_tokens + int(rows.num_drafts[row]):
            raise InternalError(f"step {step}: a row runs past its tokens or its pages")
        table, positions = rows.tables[0][row], numbers[start:end]
        values = {
            "ids": rows.tokens[row, start:end],
            "positions": positions,
            "qo_indptr": np.array([0, count]),
            "kv_lens": np.array([end]),
            "logits_rows": numbers[first - start : count],
            "page_indptr": np.array([0, pages]),
            "slots": table[positions // size] * size + positions % size,
            "page_indices": table[:pages],
        }
        return values, LogitsRows(np.full(max(end - first, 0), row), numbers[first + 1 : end + 1].copy())
