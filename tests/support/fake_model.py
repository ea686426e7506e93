"""A model without weights: its logits are a hash of all tokens that it finds in its cache, read through the page table,
so that a wrong page, slot, position or length changes the output."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from allspan.worker.cache.page_pool import Copy
from allspan.worker.step.inputs import SharedInputs, StepInputs
from allspan.worker.step.row_inputs import RowInputs

HIDDEN = 4
"""Elements of its hidden states: the first ones of the logits. `row_inputs` does not offer them."""


class FakeModel:
    """Meets `allspan.worker.step.model.StepModel`. Its "KV" of a token is the token and its position."""

    def __init__(
        self,
        num_pages: int,
        page_size: int = 4,
        max_model_len: int = 64,
        widths: tuple[int, ...] = (97,),
        rank: int = 0,
    ) -> None:
        self._page_size = page_size
        self.vocab_widths = widths
        self.max_model_len = max_model_len
        self.num_forwards = 0
        self.most_tokens = self.num_tokens = 0
        self._rank = rank
        self._states: list[np.ndarray] = []
        self._cache = np.full((num_pages * page_size, 2), -1, dtype=np.int64)

    @property
    def pages(self) -> np.ndarray:
        """[num_pages, page_size, 2]: the token and the position in each place."""
        return self._cache.reshape(-1, self._page_size, 2)

    row_inputs = RowInputs()

    def forward(self, inputs: StepInputs) -> Tensor:
        self.num_forwards += 1
        self.most_tokens = max(self.most_tokens, len(inputs.ids))
        self.num_tokens += len(inputs.ids)
        ids, positions, slots = (t.numpy().astype(np.int64) for t in (inputs.ids, inputs.positions, inputs.slots))
        self._cache[slots] = np.stack([ids, positions], axis=1)
        rows = [self._logits(inputs, int(row)) for row in inputs.logits_rows]
        self._states = [row[:HIDDEN] for row in rows]
        widths = self.vocab_widths
        first = sum(widths[: self._rank])
        logits = np.stack(rows) if rows else np.zeros((0, sum(widths)), np.float32)
        return torch.from_numpy(np.ascontiguousarray(logits[:, first : first + widths[self._rank]]))

    def hidden_states(self, rows: Sequence[int]) -> Tensor:
        return torch.from_numpy(np.stack([self._states[row] for row in rows]))

    def _logits(self, inputs: StepInputs, row: int) -> np.ndarray:
        request = int(np.searchsorted(inputs.qo_indptr.numpy(), row, side="right")) - 1
        behind = int(inputs.qo_indptr[request + 1]) - 1 - row
        length = int(inputs.kv_lens[request]) - behind
        pages = inputs.page_indices[int(inputs.page_indptr[request]) : int(inputs.page_indptr[request + 1])].numpy()
        at = np.arange(length)
        size = self._page_size
        entries = self._cache[pages[at // size].astype(np.int64) * size + at % size]
        if not np.array_equal(entries[:, 1], at):
            raise AssertionError(
                f"the cache of request {request} holds positions {entries[:, 1]}, expected 0..{length}"
            )
        return logits_after(entries[:, 0].tolist(), sum(self.vocab_widths))


class OneTile:
    """Tiles of a number and of the tokens, one a request."""

    def __call__(self, counts: np.ndarray, kv_lens: np.ndarray) -> np.ndarray:
        assert (counts != 1).all() or (kv_lens >= counts).all()
        return np.stack((np.arange(len(counts)), counts), 1).astype(np.int32)

    def most(self, tokens: int, requests: int) -> int:
        return requests


class FakeGpuModel(FakeModel):
    """One whose steps come as a GPU's: decodes first, padded where there is nothing else."""

    def __init__(
        self, num_pages: int, page_size: int = 4, max_model_len: int = 64, widths: tuple[int, ...] = (97,)
    ) -> None:
        super().__init__(num_pages, page_size, max_model_len, widths)
        self.buckets: list[int] = []
        self.num_shared = 0
        """Steps whose rows shared tokens."""

    def forward(self, inputs: StepInputs) -> Tensor:
        self.buckets.append(inputs.bucket)
        if inputs.decode_rows is not None:
            return self._forward_chunk(inputs, inputs.decode_rows)
        counts = inputs.qo_indptr.diff()
        assert (counts[: inputs.num_decodes] == 1).all()
        if not inputs.bucket:
            assert inputs.tiles is not None
            assert inputs.tiles[:, 0].tolist() == list(range(inputs.num_decodes, len(counts)))
            assert torch.equal(inputs.tiles[:, 1], counts[inputs.num_decodes :])
            return super().forward(inputs)
        rows = inputs.num_rows
        assert (inputs.slots[rows:] == -1).all()
        assert (inputs.kv_lens[rows:] == 0).all()
        assert len({len(t) for t in (inputs.ids, inputs.positions, inputs.slots, inputs.logits_rows)}) == 1
        if inputs.shared is not None:
            self.num_shared += 1
            self._check_shared(inputs, inputs.shared)
        names = ("ids", "positions", "slots", "kv_lens", "logits_rows")
        real = {name: getattr(inputs, name)[:rows] for name in names}
        indptr = {name: getattr(inputs, name)[: rows + 1] for name in ("qo_indptr", "page_indptr")}
        return super().forward(StepInputs(**real, **indptr, page_indices=inputs.page_indices))

    def _forward_chunk(self, inputs: StepInputs, decode_rows: Tensor) -> Tensor:
        """What is no padding says how much of it there is."""
        tokens, requests = int((inputs.slots >= 0).sum()), int((inputs.kv_lens > 0).sum())
        decodes = int((decode_rows >= 0).sum())
        assert inputs.tiles is not None
        assert len(inputs.ids) == len(inputs.slots) == inputs.bucket
        assert len({len(t) for t in (inputs.kv_lens, decode_rows, inputs.logits_rows)}) == 1
        assert decode_rows[:decodes].tolist() == list(range(decodes))
        assert inputs.tiles[: requests - decodes, 0].tolist() == list(range(decodes, requests))
        assert (inputs.tiles[requests - decodes :, 0] == -1).all()
        for indptr in (inputs.qo_indptr, inputs.page_indptr):
            assert (indptr[requests:] == indptr[-1]).all()
        assert int(inputs.qo_indptr[-1]) == tokens
        assert (inputs.logits_rows[inputs.num_rows :] == -1).all()
        real = {name: getattr(inputs, name)[:tokens] for name in ("ids", "positions", "slots")}
        real |= {name: getattr(inputs, name)[: requests + 1] for name in ("qo_indptr", "page_indptr")}
        real |= {"kv_lens": inputs.kv_lens[:requests], "logits_rows": inputs.logits_rows[: inputs.num_rows]}
        return super().forward(StepInputs(**real, page_indices=inputs.page_indices))

    def _check_shared(self, inputs: StepInputs, shared: SharedInputs) -> None:
        """What a row shares and what is its own are, together, all that it has."""
        pages, indptr = inputs.page_indices, inputs.page_indptr.tolist()
        group_of = np.repeat(np.arange(len(shared.kv_lens)), np.diff(shared.qo_indptr.numpy())).tolist()
        assert len(group_of) == inputs.bucket
        for row, group in enumerate(group_of):
            count, own = int(shared.kv_lens[group]), int(shared.own_kv_lens[row])
            assert count % self._page_size == 0
            assert count + own == inputs.kv_lens[row]
            first, own_first = int(shared.page_indptr[group]), int(shared.own_page_indptr[row])
            mine = pages[indptr[row] : indptr[row + 1]]
            assert torch.equal(pages[first : first + count // self._page_size], mine[: count // self._page_size])
            assert indptr[row] + count // self._page_size == own_first
        assert set(group_of) == set(shared.tiles[:, 0].tolist()) - {-1}


class FakeTiers:
    """Meets `allspan.worker.step.model.PageTiers` for a FakeModel's pages."""

    def __init__(self, model: FakeModel, num_host_pages: int) -> None:
        self.num_host_pages = num_host_pages
        self.num_copies = 0
        self._device = model.pages
        self._host = np.full((num_host_pages, *self._device.shape[1:]), -1, dtype=np.int64)

    def copy(self, saves: Sequence[Copy], loads: Sequence[Copy]) -> None:
        self.num_copies += len(saves) + len(loads)
        for copy in saves:
            self._host[copy.target] = self._device[copy.source]
        for copy in loads:
            self._device[copy.target] = self._host[copy.source]


def logits_after(tokens: list[int], vocab_size: int) -> np.ndarray:
    """float32 [vocab_size]: what the fake model says after these tokens."""
    seed = 1
    for token in tokens:
        seed = (seed * 6364136223846793005 + token + 1442695040888963407) % 2**64
    return np.random.default_rng(seed).standard_normal(vocab_size).astype(np.float32) * 2


def greedy(prompt: list[int], count: int, vocab_size: int = 97) -> list[int]:
    """The fake model's greedy output, computed without an engine."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_after(tokens, vocab_size).argmax()))
    return tokens[len(prompt) :]
