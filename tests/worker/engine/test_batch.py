"""The mirrored state: what a plan makes of rows, and the inputs that the model reads."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from allspan.protos.api.errors import InternalError
from allspan.worker.backend.cpu import step_inputs
from allspan.worker.backend.cpu.step_inputs import StepBuffers
from allspan.worker.cache.page_pool import Copy
from allspan.worker.engine.batch.batch import Batch
from allspan.worker.engine.batch.inbox import Inbox
from allspan.worker.parallel.local import LocalCollectives
from allspan.worker.sampling.result import Sampled
from allspan.worker.sampling.sampler import Sampler
from allspan.worker.scheduler.plan import Grant, Join, Run, StepPlan
from allspan.worker.step.buffer_sizes import BatchSizes
from support.cores import request

SIZES = BatchSizes(max_rows=4, max_tokens=16, max_model_len=32, page_size=4, max_logits_rows=64)

TABLES = {name: np.arange(2) for name in ("qo_indptr", "page_indptr", "page_indices", "logits_rows")}


@pytest.fixture
def inbox():
    return Inbox(10)


@pytest.fixture
def batch():
    return Batch(SIZES, Sampler(4, (97,), LocalCollectives()), StepBuffers(SIZES, torch.device("cpu")))


def joined(inbox, number, prompt, row, **more):
    one = request(number, prompt)
    inbox.put(one)
    return Join(row, one.request_id, one.digest(), **more)


def tokens(*sampled):
    return Sampled(np.array(sampled, dtype=np.int32), {})


def lists(step):
    names = ("ids", "positions", "slots", "qo_indptr", "page_indptr", "page_indices", "kv_lens", "logits_rows")
    return {name: getattr(step.inputs, name).tolist() for name in names}


def test_a_chunk_and_a_whole_prompt_in_one_step(batch, inbox):
    plan = StepPlan(
        1,
        1,
        0,
        joins=(joined(inbox, 1, [10, 11, 12, 13, 14, 15], 2), joined(inbox, 2, [20, 21], 0)),
        grants=(Grant(2, (7, 3)), Grant(0, (9,))),
        runs=(Run(2, 5), Run(0, 2)),
    )
    step = batch.apply(plan, inbox)
    assert lists(step) == {
        "ids": [10, 11, 12, 13, 14, 20, 21],
        "positions": [0, 1, 2, 3, 4, 0, 1],
        "slots": [28, 29, 30, 31, 12, 36, 37],
        "qo_indptr": [0, 5, 7],
        "page_indptr": [0, 2, 3],
        "page_indices": [7, 3, 9],
        "kv_lens": [5, 2],
        "logits_rows": [6],
    }
    logits = step.logits
    assert (logits.rows.tolist(), logits.positions.tolist(), logits.targets) == ([0], [2], None)
    result = batch.commit(step, tokens(50))
    assert result.tokens == {0: (50,)}
    following = StepPlan(1, 2, result.tokens_hash, runs=(Run(0, 1), Run(2, 1)))
    inputs = lists(batch.apply(following, inbox))
    assert inputs["ids"] == [50, 15]
    assert inputs["positions"] == [2, 5]
    assert inputs["slots"] == [38, 13]
    assert inputs["page_indices"] == [9, 7, 3]
    assert inputs["logits_rows"] == [0, 1]


def test_a_step_of_one_request_has_the_inputs_that_it_has_among_others(inbox):
    """A prompt in chunks, then decodes with drafts of which some are kept, over pages that do not follow each other."""

    def of_one(other: bool) -> list[dict[str, list[int]]]:
        """What the first request's steps read, alone or behind a request with one token in the same steps."""
        batch, inbox = Batch(SIZES, Sampler(4, (97,), LocalCollectives()), StepBuffers(SIZES)), Inbox(10)
        joins = (joined(inbox, 1, [10, 11, 12, 13, 14, 15], 2), *([joined(inbox, 2, [20] * 9, 0)] if other else []))
        grants = (Grant(2, (7, 3, 5, 9)), *([Grant(0, (1, 2, 0))] if other else []))
        more = (Run(0, 1),) if other else ()
        found, tokens_hash = [], 0
        for step, (count, drafts, sampled) in enumerate(
            [
                (4, (), ()),
                (2, (), (30,)),
                (4, (31, 32, 40), (31, 32, 33, 34)),
                (1, (), (35,)),
                (3, (36, 8), (36, 37, 1)),
            ]
        ):
            told = {"joins": joins, "grants": grants} if not step else {}
            drafted = ((2, drafts),) if drafts else ()
            plan = StepPlan(1, step + 1, tokens_hash, runs=(*more, Run(2, count)), drafts=drafted, **told)
            made = batch.apply(plan, inbox)
            found.append(lists(made) | {"at": made.logits.positions.tolist(), "rows": made.logits.rows.tolist()})
            tokens_hash = batch.commit(made, tokens(*sampled) if sampled else None).tokens_hash
        return found

    for alone, among in zip(of_one(False), of_one(True), strict=True):
        count, pages, first = len(alone["ids"]), len(alone["page_indices"]), among["qo_indptr"][-1] - len(alone["ids"])
        for name in ("ids", "positions", "slots"):
            assert alone[name] == among[name][first : first + count]
        assert alone["page_indices"] == among["page_indices"][-pages:]
        assert (alone["qo_indptr"], alone["page_indptr"]) == ([0, count], [0, pages])
        assert alone["kv_lens"] == among["kv_lens"][-1:]
        assert (alone["rows"], alone["at"]) == (among["rows"], among["at"])
        assert alone["logits_rows"] == [row - first for row in among["logits_rows"]]


def test_inputs_of_equal_lengths_are_the_same_tensors_with_other_numbers():
    buffers = StepBuffers(SIZES)

    def fill(*given: int):
        return buffers.fill({name: np.array(given) for name in ("ids", "positions", "slots", "kv_lens")} | TABLES)

    first, other = fill(1, 2), fill(1, 2, 3)
    assert fill(4, 5) is first is not other
    assert first.ids.tolist() == [4, 5]
    for length in range(200):
        fill(*range(length % 16))
        assert len(buffers._kept) <= step_inputs._MOST_KEPT


def test_a_prompt_keeps_its_rotary_table_to_the_end_and_across_a_preemption(inbox):
    """Prompts of up to 3 tokens have the first table, those of up to 6 the second."""
    sizes = replace(SIZES, prompt_lengths=(3, 6))
    batch = Batch(sizes, Sampler(4, (97,), LocalCollectives()), StepBuffers(sizes, torch.device("cpu")))
    joins = joined(inbox, 1, [10, 11, 12], 0), joined(inbox, 2, [20, 21, 22, 23], 1)
    grants = Grant(0, (1, 2)), Grant(1, (3, 4))
    step = batch.apply(StepPlan(1, 1, 0, joins=joins, grants=grants, runs=(Run(0, 3), Run(1, 4))), inbox)
    assert lists(step)["positions"] == [0, 1, 2, 32, 33, 34, 35]
    tokens_hash = batch.commit(step, tokens(50, 60)).tokens_hash
    step = batch.apply(StepPlan(1, 2, tokens_hash, runs=(Run(0, 1), Run(1, 1))), inbox)
    assert lists(step)["positions"] == [3, 36]
    tokens_hash = batch.commit(step, tokens(51, 61)).tokens_hash
    step = batch.apply(StepPlan(1, 3, tokens_hash, leaves=(0, 1)), inbox)
    again = (replace(joins[0], row=1, num_output=2), replace(joins[1], row=0, num_output=2))
    grants = Grant(1, (1, 2)), Grant(0, (3, 4))
    plan = StepPlan(1, 4, tokens_hash, joins=again, grants=grants, runs=(Run(1, 5), Run(0, 6)))
    assert lists(batch.apply(plan, inbox))["positions"] == [*range(5), *range(32, 38)]


def test_behind_a_step_in_flight_rows_whose_token_is_unknown_come_first(batch, inbox):
    """Whatever the plan's order: a newcomer, the last token of a prompt, one that is not known yet, a chunk."""
    plan = StepPlan(
        1,
        1,
        0,
        joins=(
            joined(inbox, 1, [10, 11, 12, 13, 14, 15], 2),
            joined(inbox, 2, [20, 21], 0),
            joined(inbox, 3, [30], 1),
            joined(inbox, 4, [40, 41, 42], 3),
        ),
        grants=(Grant(2, (7, 3)), Grant(0, (9,)), Grant(1, (8,)), Grant(3, (2,))),
        runs=(Run(2, 5), Run(0, 2)),
    )
    first = batch.apply(plan, inbox)
    ahead = StepPlan(1, 2, 0, runs=(Run(3, 2), Run(1, 1), Run(2, 1), Run(0, 1)), in_flight=1)
    second = batch.apply(ahead, inbox, first)
    assert second.num_unknown == 1
    assert lists(second) == {
        "ids": [0, 30, 15, 40, 41],
        "positions": [2, 0, 5, 0, 1],
        "slots": [38, 32, 13, 8, 9],
        "qo_indptr": [0, 1, 2, 3, 5],
        "page_indptr": [0, 1, 2, 4, 5],
        "page_indices": [9, 8, 7, 3, 2],
        "kv_lens": [3, 1, 6, 2],
        "logits_rows": [0, 1, 2],
    }
    assert (second.logits.rows.tolist(), second.logits.positions.tolist()) == ([0, 1, 2], [3, 1, 6])
    result = batch.commit(first, tokens(50))
    assert result.tokens == {0: (50,)}
    # Row 1 has ended meanwhile, and another request has it: what is still in flight for it is passed over.
    following = StepPlan(
        1, 3, result.tokens_hash, leaves=(1,), joins=(joined(inbox, 5, [60], 1),), grants=(Grant(1, (4,)),),
        runs=(Run(1, 1), Run(0, 1)), in_flight=1,
    )  # fmt: skip
    third = batch.apply(following, inbox, second)
    assert third.num_unknown == 1
    assert lists(third)["ids"] == [0, 60]
    assert batch.commit(second, tokens(70, 71, 72)).tokens == {0: (70,), 2: (72,)}
    assert batch.commit(third, tokens(80, 81)).tokens == {0: (80,), 1: (81,)}


def test_inputs_are_int32_views(batch, inbox):
    plan = StepPlan(1, 1, 0, joins=(joined(inbox, 1, [1], 0),), grants=(Grant(0, (0,)),), runs=(Run(0, 1),))
    inputs = batch.apply(plan, inbox).inputs
    assert inputs.ids.dtype is torch.int32
    assert inputs.page_indices.dtype is torch.int32
    assert inputs.ids.is_contiguous()


def run_once(batch, inbox, tokens_hash=0, token=50):
    plan = StepPlan(
        1, 1, tokens_hash, joins=(joined(inbox, 1, [1, 2], 0),), grants=(Grant(0, (5,)),), runs=(Run(0, 2),)
    )
    return batch.commit(batch.apply(plan, inbox), tokens(token))


def test_a_row_that_leaves_without_a_drop_comes_back_with_its_output(batch, inbox):
    result = run_once(batch, inbox)
    one = request(1, [1, 2])
    batch.apply(StepPlan(1, 2, result.tokens_hash, leaves=(0,)), inbox)
    assert batch.num_rows == 0
    join = Join(3, one.request_id, one.digest(), num_output=1)
    plan = StepPlan(1, 3, result.tokens_hash, joins=(join,), grants=(Grant(3, (8,)),), runs=(Run(3, 3),))
    inputs = lists(batch.apply(plan, inbox))
    assert inputs["ids"] == [1, 2, 50]
    assert inputs["slots"] == [32, 33, 34]
    assert inputs["logits_rows"] == [2]


def test_a_drop_forgets_the_payload_and_the_output(batch, inbox):
    result = run_once(batch, inbox)
    one = request(1, [1, 2])
    batch.apply(StepPlan(1, 2, result.tokens_hash, leaves=(0,), drops=(one.request_id,)), inbox)
    assert len(inbox) == 0
    inbox.put(one)
    join = Join(0, one.request_id, one.digest(), num_output=1)
    with pytest.raises(InternalError, match="joins with 1 output tokens, this rank has 0"):
        batch.apply(StepPlan(1, 3, result.tokens_hash, joins=(join,)), inbox)


def test_a_hash_of_other_tokens_is_a_divergence(batch, inbox):
    result = run_once(batch, inbox)
    with pytest.raises(InternalError, match=f"{result.tokens_hash ^ 1:08x}.*{result.tokens_hash:08x}"):
        batch.apply(StepPlan(1, 2, result.tokens_hash ^ 1), inbox)


def test_the_hash_tells_tokens_rows_and_history_apart():
    def after(*sampled):
        inbox = Inbox(10)
        batch = Batch(SIZES, Sampler(4, (97,), LocalCollectives()), StepBuffers(SIZES, torch.device("cpu")))
        result = run_once(batch, inbox, token=sampled[0])
        for step, token in enumerate(sampled[1:], start=2):
            made = batch.apply(StepPlan(1, step, result.tokens_hash, runs=(Run(0, 1),)), inbox)
            result = batch.commit(made, tokens(token))
        return result.tokens_hash

    assert len({after(5), after(6), after(5, 7), after(6, 7), after(5, 8)}) == 5
    assert after(5, 7) == after(5, 7)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (StepPlan(1, 2, 0, leaves=(3,)), "row 3 leaves, but no request has it"),
        (StepPlan(1, 2, 0, runs=(Run(0, 1),)), "past its tokens or its pages"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(batch, inbox, plan, words):
    with pytest.raises(InternalError, match=words):
        batch.apply(plan, inbox)


def test_a_run_past_the_pages_is_refused(batch, inbox):
    plan = StepPlan(1, 1, 0, joins=(joined(inbox, 1, [1] * 6, 0),), grants=(Grant(0, (1,)),), runs=(Run(0, 5),))
    with pytest.raises(InternalError, match="past its tokens or its pages"):
        batch.apply(plan, inbox)


def test_a_row_that_is_taken_is_refused(batch, inbox):
    result = run_once(batch, inbox)
    with pytest.raises(InternalError, match="row 0, which is taken"):
        batch.apply(StepPlan(1, 2, result.tokens_hash, joins=(joined(inbox, 2, [1], 0),)), inbox)


def test_prompt_log_probabilities_need_logits_of_every_prompt_position(batch, inbox):
    one, other = request(1, [10, 11, 12, 13], prompt_logprobs=0), request(2, [20, 21])
    for each in (one, other):
        inbox.put(each)
    joins = (Join(0, one.request_id, one.digest()), Join(1, other.request_id, other.digest()))
    grants = (Grant(0, (7,)), Grant(1, (9,)))
    step = batch.apply(StepPlan(1, 1, 0, joins=joins, grants=grants, runs=(Run(0, 2), Run(1, 2))), inbox)
    assert step.inputs.logits_rows.tolist() == [0, 1, 3]
    logits = step.logits
    assert logits.rows.tolist() == [0, 0, 1]
    assert logits.positions.tolist() == [1, 2, 2]
    assert logits.targets.tolist() == [11, 12, -1]
    result = batch.commit(step, tokens(11, 12, 50))
    assert result.tokens == {1: (50,)}
    step = batch.apply(StepPlan(1, 2, result.tokens_hash, runs=(Run(0, 2),)), inbox)
    assert step.inputs.logits_rows.tolist() == [0, 1]
    assert (step.logits.positions.tolist(), step.logits.targets.tolist()) == ([3, 4], [13, -1])
    result = batch.commit(step, tokens(-1, 60))
    assert result.tokens == {0: (-1,)}, "the model had no numbers for a prompt token: the request fails"


def test_a_prefix_hit_begins_behind_it_and_a_resumption_has_its_output(batch, inbox):
    one = request(1, [1, 2, 3])
    one.output_token_ids, one.num_resumed = [4, 5], 2
    inbox.put(one)
    join = Join(0, one.request_id, one.digest(), num_computed=4, num_output=2)
    step = batch.apply(StepPlan(1, 1, 0, joins=(join,), grants=(Grant(0, (7, 8)),), runs=(Run(0, 1),)), inbox)
    inputs = lists(step)
    assert (inputs["ids"], inputs["positions"], inputs["slots"]) == ([5], [4], [32])
    assert inputs["page_indices"] == [7, 8]
    assert step.logits.positions.tolist() == [5]


def test_pages_cannot_move_to_a_tier_that_is_not_there(batch, inbox):
    with pytest.raises(InternalError, match="this rank has none"):
        batch.apply(StepPlan(1, 1, 0, saves=(Copy(1, 2),)), inbox)
