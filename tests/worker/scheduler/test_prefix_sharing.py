"""Scheduler, prefix cache and page pool together: what is shared, who goes first, who has to wait."""

from __future__ import annotations

import pytest

from allspan.protos.api.errors import DeadlineExceeded, QueueFull
from allspan.protos.api.options import RequestOptions
from allspan.worker.scheduler.request import RequestStatus
from allspan.worker.scheduler.scheduler import Scheduler
from allspan.worker.step.row_inputs import RowInputs
from support.simulated_kv import LIMITS, Clock, SimulatedRank, asked, continuation, rank


def hits(world: SimulatedRank) -> tuple[int, int, int]:
    counters = world.scheduler.counters
    return counters.prefix_query_tokens, counters.prefix_hit_tokens, counters.prefix_host_hit_tokens


def test_a_prompt_that_was_seen_is_not_computed_again_but_for_its_last_page():
    world = rank()
    for number in (1, 2):
        one = world.submit(asked(number, [7] * 20, max_tokens=4))
        before = world.num_computed
        world.run()
        assert world.tokens[one.request_id] == continuation([7] * 20, 4)
    assert world.num_computed - before == 20 + 3 - 16, "the last token must be computed, and its page with it"
    assert hits(world) == (40, 16, 0)
    assert world.scheduler.requests() == ()
    assert world.scheduler.memory.cache.device.num_used == 0


def test_output_is_found_by_the_next_turn():
    world = rank()
    world.submit(asked(1, [7] * 10, max_tokens=11))
    world.run()
    turn = [7] * 10 + continuation([7] * 10, 11) + [8, 9]
    world.submit(asked(2, turn, max_tokens=2))
    world.run()
    assert hits(world)[1] == 20


@pytest.mark.parametrize(
    "options", [RequestOptions(prefix_cache=False), RequestOptions(cache_salt="mine")], ids=["opt-out", "salt"]
)
def test_who_does_not_share_finds_nothing_and_is_not_found(options):
    world = rank()
    world.submit(asked(1, [7] * 20, max_tokens=2))
    world.run()
    world.submit(asked(2, [7] * 20, max_tokens=2, options=options))
    world.run()
    assert hits(world)[1] == 0
    before = world.scheduler.memory.cache.device.num_cached
    world.submit(asked(3, [8] * 20, max_tokens=2, options=options))
    world.run()
    world.submit(asked(4, [8] * 20, max_tokens=2))
    world.run()
    assert hits(world)[1] == 0
    assert world.scheduler.memory.cache.device.num_cached > before


def test_prompts_of_different_rotary_tables_share_nothing():
    world = rank(row_inputs=RowInputs(prompt_lengths=(20,)))
    for number, (length, found) in enumerate([(20, 0), (21, 0), (20, 16), (24, 16 + 20)]):
        world.submit(asked(number, [7] * length, max_tokens=2))
        world.run()
        assert hits(world)[1] == found


def test_two_of_one_salt_share():
    world = rank()
    for number in (1, 2):
        world.submit(asked(number, [7] * 20, max_tokens=2, options=RequestOptions(cache_salt="ours")))
        world.run()
    assert hits(world)[1] == 16


def test_equal_prompts_in_flight_are_computed_once_and_hold_up_nobody_else():
    world = rank(max_num_batched_tokens=8)
    same = [world.submit(asked(number, [7] * 21, max_tokens=2)) for number in range(3)]
    other = world.submit(asked(9, [8] * 3, max_tokens=1))
    world.run()
    joined = [join.request_id for plan in world.plans for join in plan.joins]
    assert joined.index(other.request_id) < joined.index(same[1].request_id)
    assert world.num_computed == 21 + 2 * 1 + 3 + 3 * 1, "one whole prompt, two last tokens, the other one, 3 decodes"
    assert [one.cached_tokens for one in same] == [0, 20, 20]


def test_nobody_waits_for_one_that_goes_after_it():
    world = rank(max_num_batched_tokens=8)
    world.submit(asked(1, [7] * 20, max_tokens=2, options=RequestOptions(priority=5)))
    world.step()
    world.submit(asked(2, [7] * 20, max_tokens=2))
    plan = world.step()
    assert [join.request_id[0] for join in plan.joins] == [2]
    assert world.rows[plan.runs[0].row].request.request_id[0] == 2


def test_when_the_one_that_computes_is_cancelled_the_next_computes():
    world = rank(max_num_batched_tokens=4)
    first, second = (world.submit(asked(number, [7] * 20, max_tokens=2)) for number in (1, 2))
    world.step()
    assert second.status is RequestStatus.WAITING
    world.cancel(first)
    world.run()
    assert world.ends == {first.request_id: "cancelled", second.request_id: "length"}


def test_a_page_that_a_cancelled_request_was_about_to_fill_is_not_found():
    world = rank(max_num_batched_tokens=8)
    one = world.submit(asked(1, [7] * 8, max_tokens=2))
    world.between = lambda: world.cancel(one)
    world.step()
    assert world.scheduler.memory.cache.device.num_cached == 0


def test_a_better_one_puts_out_the_worst_for_its_row_and_for_its_pages():
    for limits in ({"max_num_seqs": 2, "max_num_batched_tokens": 16}, {"num_pages": 12}):
        world = rank(enabled=False, **limits)
        low = [world.submit(asked(n, [n] * 12, max_tokens=20, options=RequestOptions(priority=n))) for n in (1, 2)]
        world.step()
        urgent = world.submit(asked(9, [9] * 20, max_tokens=4, options=RequestOptions(priority=-1)))
        world.step()
        assert urgent.status is RequestStatus.RUNNING
        assert [one.status for one in low] == [RequestStatus.RUNNING, RequestStatus.PREEMPTED]
        world.run()
        assert low[0].preemptions == 0
        for one in (*low, urgent):
            assert world.tokens[one.request_id] == continuation(list(one.prompt_token_ids), one.max_tokens)


def test_equals_are_not_put_out_for_each_other():
    world = rank(max_num_seqs=1)
    first = world.submit(asked(1, [1] * 5, max_tokens=5))
    world.step()
    world.submit(asked(2, [2] * 5, max_tokens=5))
    world.run()
    assert first.preemptions == 0


def test_nobody_is_put_out_in_vain():
    world = rank(num_pages=8, max_num_seqs=3)
    first = world.submit(asked(1, [1] * 15, max_tokens=9, options=RequestOptions(priority=0)))
    low = world.submit(asked(2, [2] * 4, max_tokens=8, options=RequestOptions(priority=5)))
    world.step()
    urgent = world.submit(asked(3, [3] * 24, max_tokens=2, options=RequestOptions(priority=1)))
    world.step()
    assert (low.preemptions, urgent.status) == (0, RequestStatus.WAITING)
    world.run()
    assert first.preemptions == 0


def test_better_ones_are_taken_first_and_their_chunks_go_first():
    world = rank(max_num_batched_tokens=8)
    world.submit(asked(1, [1] * 40, max_tokens=2, options=RequestOptions(priority=3)))
    world.step()
    urgent = world.submit(asked(2, [2] * 14, max_tokens=2))
    plan = world.step()
    assert {run.row: run.num_tokens for run in plan.runs} == {urgent.row: 8}


def test_a_decode_is_in_every_step_whatever_prompts_are_read():
    world = rank(max_num_batched_tokens=8, max_model_len=64)
    one = world.submit(asked(1, [1] * 3, max_tokens=30))
    world.step()
    for number in range(2, 6):
        world.submit(asked(number, [number] * 50, max_tokens=2))
    while one.request_id not in world.ends:
        row = one.row
        plan = world.step()
        assert row in {run.row for run in plan.runs}
        assert plan.num_tokens <= 8


def test_a_preempted_request_finds_its_pages_again():
    world = rank(max_num_seqs=1)
    one = world.submit(asked(1, [1] * 12, max_tokens=12))
    for _ in range(9):
        world.step()
    world.submit(asked(2, [2] * 4, max_tokens=1, options=RequestOptions(priority=-1)))
    before = world.num_computed
    world.run()
    assert one.preemptions == 1
    assert world.num_computed - before < 12
    assert world.tokens[one.request_id] == continuation([1] * 12, 12)
    assert one.cached_tokens == 0, "what it finds of its own is no hit of its prompt"


def test_what_the_device_gives_up_comes_back_from_the_host_tier():
    world = rank(num_pages=8, host=16, max_num_seqs=1)
    for number in (1, 2, 1):
        one = world.submit(asked(number + 10 * len(world.known), [number] * 25, max_tokens=3))
        world.run()
    assert one.cached_tokens == 24
    assert one.host_cached_tokens > 0
    assert hits(world)[2] == one.host_cached_tokens
    assert any(plan.saves for plan in world.plans)
    assert any(plan.loads for plan in world.plans)


def test_prompt_logprobs_are_told_once_in_order_within_the_rows_of_logits():
    world = rank(max_num_seqs=2, num_pages=17, max_num_batched_tokens=100, max_model_len=200, page_size=16)
    one = world.submit(asked(1, [1] * 150, max_tokens=3, prompt_logprobs=0))
    world.step()
    world.submit(asked(2, [2] * 8, max_tokens=20, options=RequestOptions(priority=-1)))
    world.submit(asked(3, [3] * 8, max_tokens=20, options=RequestOptions(priority=-1)))
    world.run()
    assert one.preemptions == 1
    assert world.prompt_logprobs[one.request_id] == [float(i) for i in range(1, 150)]
    assert world.tokens[one.request_id] == continuation([1] * 150, 3)


def test_a_resumed_request_goes_on_where_it_was():
    world = rank()
    one = world.submit(asked(1, [1] * 9, resumed=5, max_tokens=8, prompt_logprobs=1))
    world.run()
    assert world.tokens[one.request_id] == continuation([1] * 9, 8)
    assert world.prompt_logprobs[one.request_id] == []
    assert world.ends[one.request_id] == "length"


def test_the_time_limit_counts_from_arrival_waiting_or_running():
    clock = Clock()
    world = rank(clock=clock, max_num_seqs=1)
    options = RequestOptions(timeout_s=2.0)
    running, waiting, free = (
        world.submit(asked(number, [1] * 5, max_tokens=9, options=options if number < 3 else None))
        for number in (1, 2, 3)
    )
    world.step()
    clock.now = 1.9
    world.step()
    assert not world.ends
    clock.now = 2.0
    world.step()
    for one, state in ((running, "running"), (waiting, "waiting")):
        assert isinstance(world.ends[one.request_id], DeadlineExceeded)
        assert f"timeout_s is 2: the request was still {state}" in world.ends[one.request_id].message
    world.run()
    assert world.ends[free.request_id] == "length"
    assert world.scheduler.counters.failed_requests == 2
    assert world.scheduler.memory.cache.device.num_used == 0


def test_a_full_queue_says_when_to_come_again():
    world = rank(max_queued_requests=1)
    world.submit(asked(1, [1]))
    with pytest.raises(QueueFull, match="try again"):
        world.submit(asked(2, [1]))


def test_a_sequence_of_ids_ends_the_output_and_stays_in_it():
    out = continuation([1, 2], 10)
    for min_tokens, words, expected in ((0, ((90, 90), tuple(out[2:4])), 4), (6, (tuple(out[2:4]),), 10)):
        world = rank()
        one = world.submit(asked(1, [1, 2], max_tokens=10, stop_words_ids=words, min_tokens=min_tokens))
        world.run()
        assert world.tokens[one.request_id] == out[:expected]
        assert world.ends[one.request_id] == ("stop" if expected == 4 else "length")


def test_after_a_reset_nothing_is_found_not_even_what_was_in_use():
    world = rank(max_num_batched_tokens=8)
    world.submit(asked(1, [7] * 20, max_tokens=4))
    world.step()
    world.step()
    world.scheduler.memory.reset()
    world.run()
    assert world.scheduler.memory.cache.device.num_cached == 0
    world.submit(asked(2, [7] * 20, max_tokens=4))
    world.run()
    assert hits(world)[1] == 0


def test_other_weights_void_everything():
    world = rank(host=8, num_pages=8)
    for number in range(3):
        world.submit(asked(number, [number] * 20, max_tokens=4))
        world.run()
    world.scheduler.memory.invalidate(2)
    cache = world.scheduler.memory.cache
    assert (cache.device.num_free, cache.host.num_free) == (8, 8)


def test_timings_tell_of_arrival_first_token_and_end():
    clock = Clock()
    scheduler = Scheduler(LIMITS, clock=clock)
    told = []
    one = asked(1, [1, 2], max_tokens=3)
    scheduler.submit(one)
    world = SimulatedRank(scheduler)
    world.known[one.request_id] = one
    world.take = lambda outcomes: told.extend(outcome.timings for _, outcome in outcomes)
    for now in (1.0, 2.0, 4.0):
        clock.now = now
        world.step()
    first, middle, last = told
    assert (first.queue_s, first.ttft_s, first.output_tokens) == (1.0, 1.0, 1)
    assert middle is None
    assert (last.ttft_s, last.total_s, last.output_tokens) == (1.0, 4.0, 3)
    assert last.arrived_at > 1e9
