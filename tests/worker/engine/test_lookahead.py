"""Lookahead: steps are in flight before the tokens of the one before are known, and give the plain loop's tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from allspan.kernels.cuda.attention import cascade_rule
from allspan.kernels.cuda.attention.cascade_rule import CascadeRule
from allspan.kernels.cuda.jit import modules
from allspan.kernels.cuda.jit.modules import Gpu
from allspan.protos.api.errors import Unavailable
from allspan.protos.api.options import RequestOptions
from allspan.worker.backend.cuda.step_inputs import DeviceBuffers
from allspan.worker.backend.cuda.step_layout import chunk_buckets, chunk_of
from allspan.worker.engine.batch.batch_step import BatchStep
from allspan.worker.engine.core import EngineCore
from allspan.worker.scheduler.plan import Operation, StepPlan
from allspan.worker.scheduler.request import Request
from support.cores import Collected, fake_gpu_core, request, step_until_idle
from support.fake_model import greedy

EOS = (3, 5, 8)


def expected(one: Request, eos: tuple[int, ...] = EOS) -> list[int]:
    tokens = greedy(list(one.prompt_token_ids), one.params.max_tokens)
    ends = [i + 1 for i, token in enumerate(tokens) if token in eos]
    return tokens[: ends[0]] if ends and not one.params.ignore_eos else tokens


def plans_of(core: EngineCore) -> list[StepPlan]:
    """Grows with each plan that the core runs."""
    plans: list[StepPlan] = []
    apply = core._batch.apply

    def noted(plan: StepPlan, *rest: Any) -> BatchStep:
        plans.append(plan)
        return apply(plan, *rest)

    core._batch.apply = noted  # type: ignore[method-assign]
    return plans


def buffers_of(core: EngineCore) -> DeviceBuffers:
    buffers = core._batch.buffers
    assert isinstance(buffers, DeviceBuffers)
    return buffers


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_decodes_are_planned_before_their_last_token_is_known(depth: int) -> None:
    collected = Collected()
    core, model = fake_gpu_core(collected=collected, depth=depth)
    plans = plans_of(core)
    ones = [request(i, [7, 8, 9 + i], max_tokens=9 + i, ignore_eos=True) for i in range(3)]
    for one in ones:
        core.submit(one)
    step_until_idle(core)
    assert [collected.tokens(one) for one in ones] == [expected(one) for one in ones]
    steps = [plan for plan in plans if plan.runs]
    assert [len(plan.runs) for plan in steps] == [3, 3, 3, 3, 3, 3, 3, 3, 3, 2, 1]
    assert [plan.in_flight for plan in steps] == [*range(depth - 1), *[depth - 1] * (12 - depth)]
    assert model.num_forwards == 11, "no step has run in vain"


def runs_of(plans: list[StepPlan]) -> list[tuple[list[tuple[int, int]], int]]:
    """Rows and tokens of each step, and how many were in flight when it was planned."""
    return [([(run.row, run.num_tokens) for run in plan.runs], plan.in_flight) for plan in plans if plan.runs]


def test_chunks_of_prompts_and_newcomers_join_steps_that_are_planned_ahead() -> None:
    collected = Collected()
    core, model = fake_gpu_core(collected=collected)
    plans = plans_of(core)
    ones = [request(i, [i + 1] * length, max_tokens=3, ignore_eos=True) for i, length in enumerate((10, 30, 7))]
    for one in ones:
        core.submit(one)
    step_until_idle(core)
    assert [collected.tokens(one) for one in ones] == [expected(one) for one in ones]
    steps = runs_of(plans)
    assert steps[:4] == [
        ([(0, 10), (1, 6)], 0),
        ([(0, 1), (1, 15)], 1),
        ([(0, 1), (1, 9), (2, 6)], 1),
        ([(1, 1), (2, 1)], 1),
    ]
    assert [len(plan.joins) for plan in plans[:3]] == [2, 0, 1]
    assert model.num_forwards == len(steps), "no step has run in vain"


def test_nothing_is_planned_ahead_of_a_step_that_samples_nothing() -> None:
    collected = Collected()
    core, _ = fake_gpu_core(collected=collected)
    plans = plans_of(core)
    core.submit(one := request(0, [7] * 40, max_tokens=2, ignore_eos=True))
    core.step()
    core.submit(other := request(1, [8] * 5, max_tokens=2, ignore_eos=True))
    step_until_idle(core)
    assert runs_of(plans) == [
        ([(0, 16)], 0),
        ([(0, 16)], 0),
        ([(0, 8), (1, 5)], 0),
        ([(0, 1), (1, 1)], 1),
    ]
    assert [collected.tokens(each) for each in (one, other)] == [expected(one), expected(other)]


def test_a_request_that_ends_within_its_prompt_is_passed_over() -> None:
    collected = Collected()
    core, _ = fake_gpu_core(collected=collected)
    ones = [request(i, [i + 1] * length, max_tokens=9, ignore_eos=True) for i, length in enumerate((4, 40))]
    for one in ones:
        core.submit(one)
    core.step()
    core.cancel([ones[1].request_id])
    core.submit(late := request(2, [9] * 33, max_tokens=4, ignore_eos=True))
    step_until_idle(core)
    assert collected.reason(ones[1]) == "cancelled"
    for one in (ones[0], late):
        assert collected.tokens(one) == expected(one)


@pytest.mark.parametrize("asks", [{"prompt_logprobs": 0}, {"logprobs": 1}, {"no_repeat_ngram_size": 3}], ids=str)
def test_a_synchronous_request_ends_lookahead_without_waiting_for_the_others(asks: dict[str, int]) -> None:
    collected = Collected()
    core, _ = fake_gpu_core(200, collected)
    plans = plans_of(core)
    first = request(0, [1, 2, 3], max_tokens=30, ignore_eos=True)
    core.submit(first)
    for _ in range(4):
        core.step()
    core.submit(one := request(1, [4, 5] * 12, max_tokens=2, ignore_eos=True, **asks))
    step_until_idle(core)
    joined = next(i for i, plan in enumerate(plans) if any(join.request_id == one.request_id for join in plan.joins))
    assert joined == 5, "one step was in flight"
    left = next(i for i, plan in enumerate(plans) if one.request_id in plan.drops)
    assert not any(plan.in_flight for plan in plans[joined : left + 1])
    assert all(plan.in_flight for plan in plans[left + 1 : left + 5])
    assert collected.tokens(first) == expected(first)
    assert len(collected.tokens(one)) == 2


def test_a_request_of_higher_priority_preempts_rows_with_lookahead() -> None:
    collected = Collected()
    core, _ = fake_gpu_core(collected=collected, max_num_seqs=2)
    ones = [request(i, [i + 1] * 5, max_tokens=20, ignore_eos=True) for i in range(3)]
    ones[2].options = RequestOptions(priority=-1)
    for one in ones[:2]:
        core.submit(one)
    for _ in range(3):
        core.step()
    core.submit(ones[2])
    for _ in range(3):
        core.step()
    assert collected.tokens(ones[2])
    step_until_idle(core)
    assert [collected.tokens(one) for one in ones] == [expected(one) for one in ones]


def test_a_row_that_ends_is_passed_over_in_the_step_that_runs_already() -> None:
    collected = Collected()
    core, _ = fake_gpu_core(collected=collected, eos=EOS)
    ones = [request(i, [i, 2 * i, 3], max_tokens=40) for i in range(8)]
    for one in ones:
        core.submit(one)
    step_until_idle(core)
    assert [collected.tokens(one) for one in ones] == [expected(one) for one in ones]
    assert {collected.reason(one) for one in ones} == {"stop", "length"}


def test_a_cancelled_row_leaves_while_its_next_step_runs() -> None:
    collected = Collected()
    core, _ = fake_gpu_core(collected=collected)
    ones = [request(i, [5, 5, i], max_tokens=30, ignore_eos=True) for i in range(2)]
    for one in ones:
        core.submit(one)
    for _ in range(6):
        core.step()
    core.cancel([ones[0].request_id])
    late = request(9, [5, 5, 0, 1], max_tokens=12, ignore_eos=True)
    core.submit(late)
    step_until_idle(core)
    assert collected.reason(ones[0]) == "cancelled"
    assert collected.tokens(ones[0]) == expected(ones[0])[: len(collected.tokens(ones[0]))]
    for one in (ones[1], late):
        assert collected.tokens(one) == expected(one)


def test_an_operation_waits_until_no_step_is_in_flight() -> None:
    collected = Collected()
    core, _ = fake_gpu_core(collected=collected)
    done: list[Operation] = []
    core.operations.on_operation = lambda operation, argument: done.append(operation)
    one = request(1, [4, 4, 4], max_tokens=20, ignore_eos=True)
    core.submit(one)
    for _ in range(5):
        core.step()
    pending = core.operations.add(Operation.START_PROFILE)
    step_until_idle(core)
    assert done == [Operation.START_PROFILE]
    assert pending.is_done
    assert collected.tokens(one) == expected(one)


def test_preemption_waits_until_no_step_is_in_flight() -> None:
    collected = Collected()
    core, _ = fake_gpu_core(16, collected)
    ones = [request(i, [1, i, 1, i, 2], max_tokens=25, ignore_eos=True) for i in range(4)]
    for one in ones:
        core.submit(one)
    step_until_idle(core)
    assert [collected.tokens(one) for one in ones] == [expected(one) for one in ones]


def test_a_shut_down_loop_plans_nothing_more() -> None:
    core, _ = fake_gpu_core()
    plans = plans_of(core)
    core.shutdown()
    core.run()
    assert [plan.operation for plan in plans] == [Operation.SHUTDOWN]


def test_a_shut_down_loop_tells_everybody() -> None:
    collected = Collected()
    core, _ = fake_gpu_core(collected=collected)
    one = request(1, [4, 4, 4], max_tokens=50, ignore_eos=True)
    core.submit(one)
    for _ in range(5):
        core.step()
    core.shutdown()
    core.run()
    assert isinstance(collected.errors[one.request_id], Unavailable)


class _Gpu:
    """So small that sharing a page pays; see `always_pays`."""

    def gpu(self, device: torch.device) -> Gpu:
        return Gpu(1, 0)


@pytest.fixture
def always_pays(monkeypatch: pytest.MonkeyPatch) -> CascadeRule:
    monkeypatch.setattr(modules, "driver", _Gpu)
    monkeypatch.setattr(cascade_rule, "LAUNCHES", 0)
    return CascadeRule(4, 1, 64, 0.1, 64, torch.device("cpu"))


def test_rows_that_share_pages_go_on_ahead_together(always_pays: CascadeRule) -> None:
    collected = Collected()
    core, model = fake_gpu_core(200, collected, rule=always_pays, max_num_seqs=7, max_num_batched_tokens=64)
    prefixes = [[1] * 9, [1] * 4 + [2] * 8]
    for number, prefix in enumerate(prefixes):
        core.submit(request(number, prefix, max_tokens=1))
    step_until_idle(core)
    assert model.num_shared == 0
    ones = [request(10 + i, [*prefixes[i % 2], i], max_tokens=6 + i, ignore_eos=True) for i in range(5)]
    for one in ones:
        core.submit(one)
    step_until_idle(core)
    assert [collected.tokens(one) for one in ones] == [expected(one) for one in ones]
    assert model.num_shared == 8, "all but the prompts' step, and the last, in which one row is left"


prompts = st.tuples(
    st.sampled_from([[], [1] * 4, [1] * 9, [1] * 4 + [2] * 8]), st.lists(st.integers(0, 9), min_size=1, max_size=20)
).map(lambda prompt: prompt[0] + prompt[1])

requests = st.lists(
    st.tuples(
        prompts,
        st.integers(1, 30),
        st.booleans(),
        st.integers(0, 12),
        st.sampled_from([None, None, 2, 5]),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests, st.sampled_from([20, 40, 64]), st.sampled_from([(), (2, 8, 16)]), st.sampled_from([1, 2, 3]))
def test_both_loops_give_equal_tokens_whoever_comes_and_goes(
    always_pays: CascadeRule,
    days: list[tuple],  # type: ignore[type-arg]
    pages: int,
    chunks: tuple[int, ...],
    depth: int,
) -> None:
    """Prompt, tokens, whether it heeds ends, steps before it comes, and steps after which it is cancelled."""
    collected = Collected()
    core, _ = fake_gpu_core(pages, collected, EOS, always_pays, depth=depth)
    buffers_of(core).chunks = chunks
    ones, cancels = [], []
    for number, (prompt, count, ignore_eos, pause, cancelled) in enumerate(days):
        one = request(number, prompt, max_tokens=count, ignore_eos=ignore_eos)
        core.submit(one)
        ones.append(one)
        for _ in range(pause):
            core.step()
            core.check()
        if cancelled is not None:
            core.cancel([one.request_id])
            cancels.append(one)
    step_until_idle(core)
    for one in ones:
        tokens, right = collected.tokens(one), expected(one)
        if collected.reason(one) == "cancelled":
            assert one in cancels
            assert tokens == right[: len(tokens)]
        else:
            assert tokens == right


def test_a_plain_loop_can_be_chosen() -> None:
    core, model = fake_gpu_core(async_scheduling=0)
    plans = plans_of(core)
    core.submit(request(1, [4, 4, 4], max_tokens=10, ignore_eos=True))
    step_until_idle(core)
    assert not any(plan.in_flight for plan in plans)
    assert model.num_forwards == 10


@pytest.mark.parametrize(("rows", "bucket"), [(1, 1), (2, 2), (3, 4), (5, 8), (17, 20)])
def test_decodes_are_padded_to_the_next_bucket(rows: int, bucket: int) -> None:
    core, model = fake_gpu_core(200, max_num_seqs=20, max_num_batched_tokens=64)
    for i in range(rows):
        core.submit(request(i, [i, 1], max_tokens=3, ignore_eos=True))
    step_until_idle(core)
    assert model.buckets == [0, bucket, bucket]


def test_steps_with_prompts_are_padded_to_the_next_chunk_or_not_at_all() -> None:
    collected = Collected()
    core, model = fake_gpu_core(200, collected, max_num_seqs=4, max_num_batched_tokens=32)
    buffers_of(core).chunks = (8, 16)
    ones = []
    for number, length in enumerate((6, 9, 17, 1)):
        ones.append(request(number, [number + 1] * length, max_tokens=2, ignore_eos=True))
        core.submit(ones[-1])
        step_until_idle(core)
    # A prompt, then its first token; one that fits no chunk; one that is a decode of its own.
    assert model.buckets == [8, 1, 16, 1, 0, 1, 1, 1]
    assert [collected.tokens(one) for one in ones] == [expected(one) for one in ones]


def test_chunks_are_as_many_tokens_as_a_step_may_have() -> None:
    assert chunk_buckets(40) == (16, 32, 40)
    assert chunk_buckets(64) == (16, 32, 64)
    assert chunk_buckets(8192)[-8:] == (1920, 2048, 3072, 4096, 5120, 6144, 7168, 8192)
    assert chunk_buckets(65536) == chunk_buckets(8192)


@pytest.mark.parametrize(
    ("tokens", "chunk"), [(2000, 2048), (2049, 0), (2880, 3072), (2879, 0), (8192, 8192), (9000, 0)]
)
def test_large_steps_are_padded_by_a_sixteenth_at_most(tokens: int, chunk: int) -> None:
    assert chunk_of(tokens, chunk_buckets(8192)) == chunk
