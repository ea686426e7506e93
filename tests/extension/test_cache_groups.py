"""A model with two kinds of layers and two cache groups comes from outside: one keeps all tokens, the other those of a
window. Its tokens are those of a reference without pages, and pages behind the window are free again."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from allspan.protos.api.results import Output
from allspan.protos.config.speculation import Speculation
from allspan.worker.cache.spec import PageLifetime
from allspan.worker.engine.core import EngineCore
from allspan.worker.parallel.local import LocalCollectives
from allspan.worker.scheduler.limits import GroupLimits
from allspan.worker.scheduler.request import Request
from allspan.worker.step.inputs import StepInputs
from allspan.worker.step.row_inputs import RowInputs
from support.cores import PAGE_SIZE, Collected, config, host_parts, request, step_until_idle
from support.fake_model import logits_after

WINDOW = 6
VOCABULARY = 97


def attend(everything: list[int], seen: list[int]) -> np.ndarray:
    """What the toy model says where its full layers see `everything`, and its others `seen`."""
    return logits_after([*everything, 1000, *seen], VOCABULARY)


def greedy(prompt: list[int], count: int) -> list[int]:
    """The reference: no pages."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(attend(tokens, tokens[-WINDOW:]).argmax()))
    return tokens[len(prompt) :]


class TwoKinds:
    """Meets `StepModel`. The "KV" of a token in either kind of layer is the token and its position."""

    vocab_widths = (VOCABULARY,)
    max_model_len = 64
    row_inputs = RowInputs()

    def __init__(self, num_pages: tuple[int, int]) -> None:
        self._caches = [np.full((pages * PAGE_SIZE, 2), -1, dtype=np.int64) for pages in num_pages]

    def forward(self, inputs: StepInputs) -> Tensor:
        entries = torch.stack((inputs.ids, inputs.positions), dim=1).numpy()
        for group, cache in enumerate(self._caches):
            cache[inputs.of_group(group).slots.numpy()] = entries
        rows = [self._logits(inputs, int(row)) for row in inputs.logits_rows]
        return torch.from_numpy(np.stack(rows) if rows else np.zeros((0, VOCABULARY), np.float32))

    def _logits(self, inputs: StepInputs, row: int) -> np.ndarray:
        at = int(np.searchsorted(inputs.qo_indptr.numpy(), row, side="right")) - 1
        length = int(inputs.kv_lens[at]) - (int(inputs.qo_indptr[at + 1]) - 1 - row)
        first = max(0, length - WINDOW)
        return attend(self._read(inputs, 0, at, 0, length), self._read(inputs, 1, at, first, length))

    def _read(self, inputs: StepInputs, group: int, at: int, first: int, last: int) -> list[int]:
        pages = inputs.of_group(group).page_indices[int(inputs.page_indptr[at]) :].numpy().astype(np.int64)
        positions = np.arange(first, last)
        entries = self._caches[group][pages[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE]
        assert np.array_equal(entries[:, 1], positions), "a page of the window holds another request's tokens"
        return [int(token) for token in entries[:, 0]]


def two_kinds(pages: tuple[int, int], collected: Collected, **scheduler: int) -> EngineCore:
    groups = GroupLimits(pages[0]), GroupLimits(pages[1], PageLifetime(WINDOW))
    settings, model = config(**scheduler), TwoKinds(pages)
    parts = host_parts(settings, model.max_model_len, [group.lifetime for group in groups])
    core = EngineCore(settings, model, groups, LocalCollectives(), parts)
    core.on_outputs = collected
    return core


def used(core: EngineCore, group: int) -> int:
    return core._planner.scheduler.memory.groups[group].cache.device.num_used


def test_pages_behind_the_window_are_free_again() -> None:
    collected = Collected()
    core = two_kinds((16, 16), collected)
    core.submit(one := request(1, [5, 6, 7], max_tokens=50, ignore_eos=True))
    most = [0, 0]
    while core.step():
        core.check()
        most = [max(before, used(core, group)) for group, before in enumerate(most)]
    assert collected.tokens(one) == greedy([5, 6, 7], 50)
    assert most == [13, 2], "52 tokens fill 13 pages of 4; between two steps, 5 tokens before the window's end lie in 2"


@pytest.mark.parametrize("pages", [(64, 64), (20, 9)], ids=["enough", "scarce"])
@pytest.mark.parametrize("most", [0, 3], ids=["plain", "drafts"])
def test_tokens_are_those_of_a_reference_without_pages(pages: tuple[int, int], most: int) -> None:
    """Chunks of long prompts, shared prefixes, preemption, and drafts."""
    collected = Collected()
    core = two_kinds(pages, collected, max_num_batched_tokens=10)
    if most:
        core.draft_with(Speculation("ngram", most, 3, 3))
    ones: list[Request] = []
    for number in range(10):
        prompt = [[2] * 21, [2] * 9, [3, 4] * 4][number % 3] + [number] * (1 + number % 4)
        ones.append(request(number, prompt, max_tokens=12 + number, ignore_eos=True))
        core.submit(ones[-1])
        for _ in range(number % 5):
            core.step()
            core.check()
    step_until_idle(core)
    for one in ones:
        assert collected.tokens(one) == greedy(list(one.prompt_token_ids), one.max_tokens)
    assert used(core, 0) == used(core, 1) == 0
    outputs: list[Output] = list(collected.outputs.values())
    assert any(output.timings and output.timings.cached_tokens for output in outputs)
    assert any(output.timings and output.timings.preemptions for output in outputs) == (pages == (20, 9))
