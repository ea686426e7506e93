"""The times of steps that a model is asked for before its first one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from allspan.worker.engine.steps import step_times as timed
from allspan.worker.engine.steps.step_times import LEAST_STEPS, SIZES
from allspan.worker.parallel.local import LocalCollectives
from support.cores import fake_core, request, step_until_idle
from support.fake_model import greedy
from support.threads import ThreadWorld

WIDTHS = {1: (97,), 2: (50, 47)}


def times(size: int) -> tuple[list[dict[int, float]], list[Sequence[int]]]:
    """What the ranks have timed, and what the leader generates after that."""
    world = ThreadWorld(size)
    told: list[Sequence[int]] = []

    def on_rank(rank: int) -> dict[int, float]:
        collectives, channel = (world.collectives[rank], world.channels[rank]) if size > 1 else (None, None)
        core, model = fake_core(
            collectives=collectives, channel=channel, widths=WIDTHS[size], max_num_batched_tokens=32
        )
        found = core.time_steps(model, world.collectives[rank])
        one = request(1, [5, 6, 7], max_tokens=9)
        core.submit(one)
        world.barrier.wait(20)
        if rank == 0:
            step_until_idle(core)
            told.append(core.on_outputs.tokens(one))  # type: ignore[attr-defined]
            core.shutdown()
        core.run()
        return found

    return world.run(on_rank), told


@pytest.mark.parametrize("size", [1, 2])
def test_all_ranks_time_the_same_steps_and_leave_no_trace(size: int) -> None:
    found, told = times(size)
    assert all(each == found[0] for each in found)
    assert list(found[0]) == [each for each in SIZES if each <= 32]
    assert min(found[0].values()) >= 0
    assert list(told[0]) == greedy([5, 6, 7], 9)


def test_a_model_of_a_shorter_context_is_timed_within_it() -> None:
    core, model = fake_core(max_num_batched_tokens=32)
    model.max_model_len = 9  # as one that drafts may have
    assert list(core.time_steps(model, LocalCollectives())) == [each for each in SIZES if each <= 8]


@pytest.mark.parametrize(("seconds", "tokens"), [(10.0, 16), (-1.0, 8)])
def test_steps_are_timed_behind_as_many_tokens_as_there_is_time_for(
    seconds: float, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timed, "CONTEXT", 16)
    monkeypatch.setattr(timed, "CONTEXT_SECONDS", seconds)
    core, model = fake_core(max_num_batched_tokens=8)
    lengths: list[int] = []
    forward = model.forward
    model.forward = lambda inputs: (lengths.append(int(inputs.kv_lens[0])), forward(inputs))[1]  # type: ignore[assignment,func-returns-value,method-assign]
    core.time_steps(model, LocalCollectives())
    taken_in = tokens // 8
    assert lengths[:taken_in] == [8, 16][:taken_in]
    assert {length - tokens for length in lengths[taken_in:]} == {each for each in SIZES if each <= 8}


def test_slow_steps_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed, "MOST_SECONDS", 0.0)
    found, _ = times(2)
    assert [len(each) for each in found] == [LEAST_STEPS] * 2
