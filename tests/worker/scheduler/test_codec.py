"""Plans survive the wire; bytes that are no plan are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allspan.protos.api.errors import InternalError
from allspan.worker.cache.page_pool import Copy
from allspan.worker.scheduler.codec import decode, encode
from allspan.worker.scheduler.plan import Grant, Join, Operation, Run, StepPlan
from allspan.worker.step.rank_drafter import DraftRun

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
ids = st.binary(min_size=16, max_size=16)


def tuples(of):
    return st.lists(of, max_size=5).map(tuple)


plans = st.builds(
    StepPlan,
    epoch=u32,
    step=u64,
    tokens_hash=u32,
    leaves=tuples(u32),
    drops=tuples(ids),
    joins=tuples(st.builds(Join, u32, ids, u64, u32, u32, st.integers(-1, 2**31 - 1), u32)),
    grants=tuples(st.builds(Grant, u32, tuples(u32), u32, u32)),
    saves=tuples(st.builds(Copy, u32, u32, u32, u32)),
    loads=tuples(st.builds(Copy, u32, u32, u32, u32)),
    runs=tuples(st.builds(Run, u32, u32)),
    in_flight=u32,
    drafts=tuples(st.tuples(u32, tuples(u32))),
    draft_runs=tuples(st.builds(DraftRun, u32, u32, u32, u32)),
    operation=st.sampled_from(Operation),
)
PLAN = StepPlan(1, 2, 3, (0,), (bytes(16),), (Join(1, bytes(16), 5),), (Grant(1, (7, 8)),), runs=(Run(1, 9),))


@given(plans)
def test_a_plan_survives_the_wire(plan):
    assert decode(encode(plan)) == plan


@given(plans, st.data())
def test_a_plan_cut_short_is_refused(plan, data):
    whole = encode(plan)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(InternalError, match="malformed plan"):
        decode(whole[:cut])


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(data):
    with pytest.raises(InternalError, match="malformed plan"):
        decode(data)


@given(plans, st.data())
def test_a_changed_byte_never_fails_in_another_way(plan, data):
    changed = bytearray(encode(plan))
    at = data.draw(st.integers(0, len(changed) - 1))
    changed[at] ^= data.draw(st.integers(1, 255))
    try:
        decoded = decode(bytes(changed))
    except InternalError:
        return
    assert decoded != plan


def test_trailing_bytes_are_refused():
    with pytest.raises(InternalError, match="malformed plan"):
        decode(encode(PLAN) + b"\0\0\0\0")


def test_an_unknown_operation_is_refused():
    data = bytearray(encode(PLAN))
    data[20] = 200
    with pytest.raises(InternalError, match="operation 200"):
        decode(bytes(data))


@pytest.mark.parametrize(
    "plan",
    [
        StepPlan(1, 2, 2**32),
        StepPlan(1, 2, 3, leaves=(-1,)),
        StepPlan(1, 2, 3, drops=(b"short",)),
        StepPlan(1, 2, 3, joins=(Join(0, b"x" * 17, 1),)),
    ],
)
def test_a_value_that_does_not_fit_is_refused(plan):
    with pytest.raises(InternalError):
        encode(plan)


def test_a_decode_step_of_64_rows_is_small():
    plan = StepPlan(1, 2, 3, runs=tuple(Run(row, 1) for row in range(64)))
    assert len(encode(plan)) < 1024
