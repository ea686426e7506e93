"""A draft head, over a model whose logits are a hash of all tokens before, and a head that finds the same tokens in
its own pages: a feature or a key that is missing, stale or another token's raises, or changes what is drafted."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from allspan.protos.api.options import RequestOptions
from allspan.protos.api.results import Output
from allspan.protos.config.speculation import Speculation
from allspan.worker.cache.spec import ALL_TOKENS
from allspan.worker.engine.core import EngineCore
from allspan.worker.engine.steps.draft_head import DraftHead, HeadPlace
from allspan.worker.engine.steps.draft_sampler import DraftSampler
from allspan.worker.parallel.local import LocalCollectives
from allspan.worker.scheduler.counters import SchedulerCounters
from allspan.worker.scheduler.drafting.draft_run_planner import DrafterFacts
from allspan.worker.scheduler.limits import GroupLimits
from allspan.worker.scheduler.request import Request
from allspan.worker.step.inputs import StepInputs
from allspan.worker.step.rank_drafter import Drafted
from support.cores import PAGE_SIZE, Collected, config, host_parts, request, step_until_idle
from support.drafted import few_asked, told
from support.fake_model import FakeModel, logits_after
from support.threads import ThreadWorld

WIDTHS = {1: (97,), 2: (50, 47), 3: (33, 33, 31)}
MAPPED = np.asarray([*range(40, 97), *range(40)], dtype=np.int32)
"""An order of the model's ids that is not theirs."""


class Target(FakeModel):
    """The features of a token are its id and its position."""

    def forward(self, inputs: StepInputs) -> Tensor:
        self._ran = torch.stack((inputs.ids, inputs.positions), dim=1).float()
        return super().forward(inputs)

    def features(self, num_tokens: int) -> Tensor:
        assert len(self._ran) == num_tokens
        return self._ran


class Head:
    """Meets `Head`: its key of a token is the token (-1: one that it has drafted itself), its position and the next id.
    Its logits are those of the model, in its own order of ids."""

    def __init__(self, num_pages: int, widths: tuple[int, ...], rank: int, target_ids: np.ndarray | None) -> None:
        self.vocab_widths = widths
        self.num_chained = 0
        self.num_followed = 0
        self._rank, self._target_ids = rank, target_ids
        self._cache = np.full((num_pages * PAGE_SIZE, 3), -1, dtype=np.int64)
        self._states = np.zeros((0, 2), dtype=np.float32)

    def forward(self, inputs: StepInputs) -> Tensor:
        assert inputs.features is not None
        ids, positions, slots = (t.numpy().astype(np.int64) for t in (inputs.ids, inputs.positions, inputs.slots))
        features = inputs.features.numpy().astype(np.int64)
        if inputs.is_chained:
            self.num_chained += 1
            assert (features[:, 0] == -1).all()
            assert (features[:, 1] == positions - 1).all()
        else:
            self.num_followed += len(ids)
            assert (features[:, 1] == positions).all()
        self._cache[slots] = np.stack([features[:, 0], positions, ids], axis=1)
        rows = [self._logits(inputs, int(row)) for row in inputs.logits_rows]
        last = positions[inputs.logits_rows.numpy()]
        self._states = np.stack((np.full_like(last, -1), last), axis=1).astype(np.float32)
        first, whole = sum(self.vocab_widths[: self._rank]), sum(self.vocab_widths)
        logits = np.stack(rows) if rows else np.zeros((0, whole), np.float32)
        return torch.from_numpy(np.ascontiguousarray(logits[:, first : first + self.vocab_widths[self._rank]]))

    def chained(self, num_rows: int) -> Tensor:
        assert len(self._states) >= num_rows
        return torch.from_numpy(self._states[:num_rows])

    def _logits(self, inputs: StepInputs, row: int) -> np.ndarray:
        request = int(np.searchsorted(inputs.qo_indptr.numpy(), row, side="right")) - 1
        length = int(inputs.positions[row]) + 1
        pages = inputs.page_indices[int(inputs.page_indptr[request]) : int(inputs.page_indptr[request + 1])].numpy()
        at = np.arange(length)
        entries = self._cache[pages[at // PAGE_SIZE].astype(np.int64) * PAGE_SIZE + at % PAGE_SIZE]
        assert np.array_equal(entries[:, 1], at)
        drafted = entries[:, 0] < 0
        assert not drafted[:-1][~drafted[1:]].any(), "a key of a draft is before one of the model's tokens"
        before = np.concatenate(
            (entries[:1, 0], np.where(drafted, entries[[0, *range(length - 1)], 2], entries[:, 0])[1:])
        )
        own = logits_after([*before.tolist(), int(entries[-1, 2])], sum(self.vocab_widths))
        return own if self._target_ids is None else own[self._target_ids]


def play(
    most: int = 0,
    *rounds: Sequence[Request],
    size: int = 1,
    num_pages: int = 200,
    target_ids: np.ndarray | None = None,
    costs: tuple[dict[int, float], dict[int, float]] = ({}, {}),
    **scheduler: int,
) -> tuple[dict[bytes, Output], SchedulerCounters, Head]:
    """What requests get, those each of `rounds` when the ones before are over; `most` drafts of a step, 0: no head."""
    world, collected, found = ThreadWorld(size), Collected(), dict[int, tuple[EngineCore, Head]]()
    settings, lifetimes = config(**scheduler), (ALL_TOKENS,) * 2

    def on_rank(rank: int) -> None:
        collectives = world.collectives[rank] if size > 1 else LocalCollectives()
        model = Target(num_pages, PAGE_SIZE, 64, WIDTHS[size], rank)
        head = Head(num_pages, WIDTHS[size], rank, target_ids)
        parts, groups = host_parts(settings, 64, lifetimes[: 1 + bool(most)]), [GroupLimits(num_pages)]
        if most:
            place = HeadPlace(1, PAGE_SIZE, ALL_TOKENS, 2, target_ids)
            sampler = DraftSampler(4, WIDTHS[size], collectives)
            drafter = DraftHead(head, model, host_parts(settings, 64).inputs, place, sampler)
            parts = replace(parts, drafter=drafter)
            groups.append(GroupLimits(num_pages, is_head=True))
        channel = world.channels[rank] if size > 1 else None
        core = EngineCore(settings, model, tuple(groups), collectives, parts, channel)
        found[rank] = core, head
        if most and rank == 0:
            facts = DrafterFacts(64, costs[1], follows=True)
            core.draft_with(Speculation("draft_model", most), costs[0], facts)
        for each in rounds:
            for one in copy.deepcopy(each):
                core.submit(one)
            world.barrier.wait(20)
            if rank == 0:
                core.on_outputs = collected
                step_until_idle(core)
        if rank == 0:
            core.shutdown()
        core.run()

    world.run(on_rank)
    assert not collected.errors
    core, head = found[0]
    core.check()
    return collected.outputs, core._planner.scheduler.counters, head


@pytest.mark.parametrize(
    ("size", "limits"),
    [
        (1, {}),
        (1, {"num_pages": 16}),
        (1, {"max_num_batched_tokens": 9}),
        (2, {}),
        (3, {"num_pages": 17, "max_num_batched_tokens": 12}),
    ],
    ids=str,
)
def test_a_head_changes_no_token(size: int, limits: dict[str, Any]) -> None:
    plain, _, _ = play(0, few_asked(), size=size, **limits)
    found, counters, head = play(4, few_asked(), size=size, **limits)
    assert told(found) == told(plain)
    assert counters.draft_tokens
    assert head.num_chained
    assert counters.preemptions if "num_pages" in limits else not counters.preemptions


@pytest.mark.parametrize(
    ("target_ids", "asks"),
    [(None, {}), (MAPPED, {}), (None, {"temperature": 0.9, "top_k": 40, "seed": 5})],
    ids=["the same ids", "mapped ids", "sampled"],
)
def test_a_head_that_knows_the_model_is_always_right(target_ids: np.ndarray | None, asks: dict[str, object]) -> None:
    prompts = [list(range(number, number + 9)) for number in range(3)]
    requests = [request(number, each, **{"max_tokens": 22, **asks}) for number, each in enumerate(prompts)]
    _, counters, head = play(5, requests, max_num_batched_tokens=32, target_ids=target_ids)
    assert counters.accepted_tokens == counters.draft_tokens > 2 * 22
    assert head.num_chained <= 4 * counters.steps


def test_a_request_begins_with_the_keys_that_another_has_left() -> None:
    first = request(1, range(20), max_tokens=12)
    answer = play(0, [first])[0][first.request_id].token_ids
    second = request(2, (*range(20), *answer, 1, 2), max_tokens=9)
    third = replace(second, request_id=bytes(16), options=RequestOptions(speculation=False))
    fourth = request(4, (*second.prompt_token_ids, 3, 4, 5, 6, 7, 8), max_tokens=9)
    rounds = ([first], [second], [third], [fourth])
    plain, without, _ = play(0, *rounds)
    found, counters, _ = play(3, *rounds, max_num_batched_tokens=32)
    assert told(found) == told(plain)
    assert counters.accepted_tokens == counters.draft_tokens > 12
    assert counters.prefix_hit_tokens == without.prefix_hit_tokens > 3 * 20


def test_a_head_that_is_too_slow_takes_in_tokens_and_hardly_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = DraftHead.draft

    def slowly(*arguments: Any) -> Mapping[int, Drafted]:
        time.sleep(0.02)
        return draft(*arguments)

    monkeypatch.setattr(DraftHead, "draft", slowly)
    requests = [request(number, range(9), max_tokens=40) for number in range(2)]
    found, counters, head = play(5, requests, costs=({1: 1e-3, 8: 1e-3}, {1: 0.3, 8: 0.3}))
    assert told(found) == told(play(0, requests)[0])
    assert 0 < counters.drafts <= 10
    assert head.num_followed >= 2 * 39
