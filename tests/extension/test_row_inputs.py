"""Adapter slots and embedding rows reach a model from outside: an adapter changes its own request alone, and embedding
rows of the same token ids give equal tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from allspan.protos.api.adapters import AdapterModule
from allspan.protos.api.errors import AdapterNotFound, InvalidRequest
from allspan.protos.model_files.regular_file import Opener
from allspan.worker.adapters.registry import AdapterRegistry
from allspan.worker.adapters.staged import Put, StagedAdapter
from allspan.worker.engine.core import EngineCore
from allspan.worker.parallel.local import LocalCollectives
from allspan.worker.scheduler.request import Request
from allspan.worker.step.inputs import StepInputs
from allspan.worker.step.row_inputs import PromptEmbeddings, RowInputs
from allspan.worker.step.side_copies import HostCopies
from support.cores import PAGE_SIZE, Collected, config, fake_core, host_parts, request, step_until_idle
from support.fake_model import logits_after

VOCABULARY, SIZE = 97, 8
TABLE = np.random.default_rng(1).standard_normal((VOCABULARY, SIZE)).astype(np.float32)


def mark(row: np.ndarray, adapter: int) -> int:
    """The "KV" of a token: what its embedding row is, to a model that an adapter changes."""
    return int.from_bytes(hashlib.blake2b(row.tobytes() + bytes([adapter + 1]), digest_size=6).digest(), "little")


class Rich:
    """Meets `StepModel`: takes two adapters, and embedding rows."""

    vocab_widths = (VOCABULARY,)
    max_model_len = 64
    row_inputs = RowInputs(num_adapters=2, embedding_size=SIZE)

    def __init__(self, num_pages: int) -> None:
        self._cache = np.zeros(num_pages * PAGE_SIZE, dtype=np.int64)

    def forward(self, inputs: StepInputs) -> Tensor:
        rows = TABLE[inputs.ids.numpy()]
        if inputs.embeddings is not None:
            rows[inputs.embeddings.at.numpy()] = inputs.embeddings.rows.numpy()
        indptr = inputs.qo_indptr.numpy()
        of = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
        adapters = [-1] * len(rows) if inputs.adapters is None else inputs.adapters.tolist()
        pairs = zip(rows, adapters, strict=True)
        self._cache[inputs.slots.numpy()] = [mark(row, adapter) for row, adapter in pairs]
        logits = [self._logits(inputs, int(row), int(of[row])) for row in inputs.logits_rows]
        return torch.from_numpy(np.stack(logits) if logits else np.zeros((0, VOCABULARY), np.float32))

    def _logits(self, inputs: StepInputs, row: int, at: int) -> np.ndarray:
        positions = np.arange(int(inputs.positions[row]) + 1)
        pages = inputs.page_indices[int(inputs.page_indptr[at]) :].numpy().astype(np.int64)
        entries = self._cache[pages[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE]
        return logits_after(entries.tolist(), VOCABULARY)


class Fixed:
    """Slots that hold what the test's model has by itself."""

    def stage(self, path: Path, goes_on: Callable[[], bool], opener: Opener, put: Put | None = None) -> StagedAdapter:
        return StagedAdapter({}, "")

    def write(self, slot: int, staged: StagedAdapter) -> None:
        assert not staged.tensors


def rich_core(pages: int = 64, **scheduler: int) -> EngineCore:
    settings, model = config(**scheduler), Rich(pages)
    registry = AdapterRegistry(Fixed(), LocalCollectives(), "", False, HostCopies())
    for slot in range(2):
        registry.take(AdapterModule(f"adapter {slot}", "", digest=slot), slot, StagedAdapter({}, ""))
    parts = replace(host_parts(settings, model.max_model_len), adapters=registry)
    return EngineCore(settings, model, pages, LocalCollectives(), parts)


def tokens_of(ones: list[Request], pages: int = 64) -> list[list[int]]:
    collected = Collected()
    core = rich_core(pages, max_num_batched_tokens=7)
    core.on_outputs = collected
    for one in ones:
        core.submit(one)
    step_until_idle(core)
    return [collected.tokens(one) for one in ones]


def asked(number: int, adapter: int = -1, embeddings: PromptEmbeddings | None = None, at: int = 0) -> Request:
    one = request(number, [*range(20, 29 + number % 3)], max_tokens=9, ignore_eos=True)
    ids = list(one.prompt_token_ids)
    if embeddings is not None:  # what the ids in their places are does not matter
        ids[at : at + len(embeddings.rows)] = [0] * len(embeddings.rows)
    one.prompt_token_ids, one.adapter, one.embeddings = tuple(ids), adapter, embeddings
    return one


@pytest.mark.parametrize("pages", [64, 16], ids=["enough", "scarce"])
def test_an_adapter_changes_its_own_request_alone(pages: int) -> None:
    plain = tokens_of([asked(number) for number in range(4)])
    mixed = tokens_of([asked(number, adapter=number - 1) for number in range(3)] + [asked(3)], pages)
    assert [ours == theirs for ours, theirs in zip(mixed, plain, strict=True)] == [True, False, False, True]
    alone = [tokens_of([asked(number, adapter=number - 1)])[0] for number in (1, 2)]
    assert mixed[1:3] == alone


def test_the_pages_of_an_adapter_are_told_with_it_and_shared_with_no_other() -> None:
    core = rich_core()
    ones = [asked(number, adapter) for number, adapter in ((0, -1), (3, 0), (6, 1), (9, 0))]  # of one prompt
    for one in ones:
        core.submit(one)
        step_until_idle(core)
    assert [one.cached_tokens > 0 for one in ones] == [False, False, False, True]
    assert core.page_log is not None
    adapters = [page[3] for _, page in core.page_log.snapshot()[0]]
    assert {adapter: adapters.count(adapter) for adapter in adapters} == dict.fromkeys((-1, 0, 1), len(adapters) // 3)


@pytest.mark.parametrize(("first", "last"), [(0, 9), (3, 8), (8, 9)])
@pytest.mark.parametrize("pages", [64, 16], ids=["enough", "scarce"])
def test_embedding_rows_of_the_same_ids_give_equal_tokens(first: int, last: int, pages: int) -> None:
    plain = tokens_of([asked(number) for number in range(4)])
    rows = PromptEmbeddings(first, TABLE[20 + first : 20 + last])
    given = [asked(number, embeddings=rows if number % 2 else None, at=first) for number in range(4)]
    assert tokens_of(given, pages) == plain


def test_other_embedding_rows_are_another_prompt_to_the_prefix_cache() -> None:
    one, other = (PromptEmbeddings(0, TABLE[first : first + 8]) for first in (20, 40))
    ones = [asked(0, embeddings=one), asked(3, embeddings=other), asked(6, embeddings=one)]
    first, second, third = tokens_of(ones)
    assert first == third != second


@pytest.mark.parametrize(
    ("adapter", "embeddings", "words"),
    [
        (-1, PromptEmbeddings(0, TABLE[:3, :5]), r"shape \(3, 5\), must be \[tokens, 8\]"),
        (-1, PromptEmbeddings(7, TABLE[:3]), r"places 7 to 9, must be within the prompt \(9 tokens\)"),
    ],
)
def test_what_the_model_cannot_take_is_refused(adapter: int, embeddings: PromptEmbeddings | None, words: str) -> None:
    one = request(0, [*range(20, 29)], max_tokens=2)
    one.adapter, one.embeddings = adapter, embeddings
    with pytest.raises(InvalidRequest, match=words):
        tokens_of([one])


def test_a_model_of_token_ids_refuses_both() -> None:
    core, _ = fake_core()
    refused = ((0, None, AdapterNotFound), (-1, PromptEmbeddings(0, TABLE[:1]), InvalidRequest))
    for adapter, embeddings, error in refused:
        one = request(0, [1], max_tokens=2)
        one.adapter, one.embeddings = adapter, embeddings
        with pytest.raises(error, match=r"unloaded just now|only"):
            core.submit(one)
