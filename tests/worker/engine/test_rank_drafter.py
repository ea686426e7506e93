"""A model that drafts in the ranks, over models whose logits are a hash of all that they find in their pages: a key
that is missing, stale or another token's changes what is drafted, and a wrong page raises."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from allspan.protos.api.options import RequestOptions
from allspan.protos.api.results import Output
from allspan.protos.config.speculation import Speculation
from allspan.worker.cache.spec import ALL_TOKENS
from allspan.worker.engine.core import EngineCore
from allspan.worker.engine.steps.draft_model import DraftModel
from allspan.worker.engine.steps.draft_sampler import DraftSampler
from allspan.worker.parallel.local import LocalCollectives
from allspan.worker.scheduler.counters import SchedulerCounters
from allspan.worker.scheduler.drafting.draft_run_planner import FIRST_TRIALS, TRIAL_DRAFTS, DrafterFacts
from allspan.worker.scheduler.limits import GroupLimits
from allspan.worker.scheduler.request import Request
from allspan.worker.step.inputs import StepInputs
from allspan.worker.step.rank_drafter import Drafted
from support.cores import PAGE_SIZE, Collected, config, host_parts, request, step_until_idle
from support.drafted import few_asked, told
from support.fake_model import FakeModel, greedy
from support.threads import ThreadWorld

WIDTHS = {1: (97,), 2: (50, 47), 3: (33, 33, 31)}


def play(
    most: int = 0,
    *rounds: Sequence[Request],
    size: int = 1,
    num_pages: int = 200,
    draft_widths: tuple[int, ...] = (),
    draft_len: int = 64,
    costs: tuple[dict[int, float], dict[int, float]] = ({}, {}),
    fails: int = 0,
    **scheduler: int,
) -> tuple[dict[bytes, Output], SchedulerCounters, FakeModel]:
    """What requests get, on one rank each of `rounds` when the one before is over; `most` drafts of a step, 0: none.
    `costs`: of steps, and of the drafter's. So many requests fail. Also the leader's counters and its drafter."""
    world, collected, found = ThreadWorld(size), Collected(), dict[int, tuple[EngineCore, FakeModel]]()
    settings = config(**scheduler)

    def on_rank(rank: int) -> None:
        collectives = world.collectives[rank] if size > 1 else LocalCollectives()
        model = FakeModel(num_pages, PAGE_SIZE, 64, WIDTHS[size], rank)
        draft = FakeModel(num_pages, PAGE_SIZE, draft_len, draft_widths or WIDTHS[size], rank)
        parts, groups = host_parts(settings, 64), [GroupLimits(num_pages)]
        if most:
            buffers = host_parts(settings, 64).inputs
            sampler = DraftSampler(4, draft.vocab_widths, collectives)
            parts = replace(parts, drafter=DraftModel(draft, buffers, (ALL_TOKENS,), PAGE_SIZE, sampler))
            groups.append(GroupLimits(num_pages, is_drafter=True))
        channel = world.channels[rank] if size > 1 else None
        core = EngineCore(settings, model, tuple(groups), collectives, parts, channel)
        found[rank] = core, draft
        if most and rank == 0:
            core.draft_with(Speculation("draft_model", most), costs[0], DrafterFacts(draft_len, costs[1]))
        for each in rounds or (few_asked(),):
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
    assert len(collected.errors) == fails
    core, draft = found[0]
    return collected.outputs, core._planner.scheduler.counters, draft


@pytest.mark.parametrize(
    ("size", "limits"),
    [
        (1, {}),
        (1, {"num_pages": 16}),
        (1, {"max_num_batched_tokens": 9}),
        (1, {"draft_len": 20}),
        (1, {"draft_widths": (80,)}),
        (1, {"draft_widths": (120,)}),
        (2, {}),
        (3, {"num_pages": 17, "max_num_batched_tokens": 12}),
    ],
    ids=str,
)
def test_a_model_that_drafts_changes_no_token(size: int, limits: dict[str, Any]) -> None:
    shared = {key: value for key, value in limits.items() if not key.startswith("draft")}
    plain, _, _ = play(size=size, **shared)
    found, counters, _ = play(4, size=size, **limits)
    assert told(found) == told(plain)
    assert counters.draft_tokens
    assert counters.preemptions if "num_pages" in limits else not counters.preemptions


def test_the_model_itself_is_always_right_about_its_likeliest_tokens() -> None:
    requests = [request(number, range(number, number + 9), max_tokens=22) for number in range(3)]
    _, counters, draft = play(5, requests, max_num_batched_tokens=32)
    assert counters.accepted_tokens == counters.draft_tokens > 2 * 22
    assert draft.num_forwards <= 5 * counters.steps
    assert draft.num_tokens <= 3 * (9 + 22 + 5)  # what is kept was run when it was proposed


def test_a_request_begins_with_the_keys_that_the_drafter_has_left() -> None:
    first = request(1, range(20), max_tokens=12)
    answer = play(0, [first])[0][first.request_id].token_ids
    second = request(2, (*range(20), *answer, 1, 2), max_tokens=9)
    third = replace(second, request_id=bytes(16), options=RequestOptions(speculation=False))
    fourth = request(4, (*second.prompt_token_ids, 3, 4, 5, 6, 7, 8), max_tokens=9)
    plain, _, _ = play(0, [first], [second], [third], [fourth])
    found, counters, draft = play(3, [first], [second], [third], [fourth], max_num_batched_tokens=32)
    assert told(found) == told(plain)
    assert counters.accepted_tokens == counters.draft_tokens > 12
    assert draft.most_tokens == 22  # the first prompt and two tokens: later ones begin behind it


def test_a_row_whose_logits_are_not_finite_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, end = FakeModel._logits, greedy([4, 5, 6], 4)[-1]

    def broken(model: FakeModel, inputs: StepInputs, row: int) -> np.ndarray:
        assert int(inputs.ids.min()) >= 0  # a real model has no such row of its embedding
        return logits(model, inputs, row) * (np.nan if inputs.ids[row] == end else 1.0)

    monkeypatch.setattr(FakeModel, "_logits", broken)
    good, bad = (request(number, range(number, number + 3), max_tokens=9, temperature=0.0) for number in (1, 4))
    found, counters, _ = play(4, [good, bad], fails=1)
    assert told(found)[good.request_id] == told(play(0, [good])[0])[good.request_id]
    assert counters.draft_tokens


def test_a_drafter_that_is_too_slow_is_tried_and_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = DraftModel.draft

    def slowly(*arguments: Any) -> Mapping[int, Drafted]:
        time.sleep(0.02)
        return draft(*arguments)

    monkeypatch.setattr(DraftModel, "draft", slowly)
    costs = {1: 1e-3, 8: 1e-3}, {1: 0.3, 8: 0.3}
    requests = [request(number, range(9), max_tokens=40) for number in range(2)]
    found, counters, model = play(5, requests, costs=costs)
    assert told(found) == told(play(0, requests)[0])
    assert 0 < model.num_forwards <= FIRST_TRIALS * TRIAL_DRAFTS
    assert counters.drafts <= FIRST_TRIALS
