"""Attention ranks with pages of their own: which rank a request goes to, who makes room for it, and what steps hold."""

from __future__ import annotations

from collections import Counter

import pytest

from allspan.protos.api.options import RequestOptions
from allspan.worker.cache.spec import PageLifetime
from allspan.worker.scheduler.limits import GroupLimits
from allspan.worker.scheduler.page_manager import PageManager
from allspan.worker.scheduler.request import Request
from support.drafters import Guesses, drafting
from support.simulated_kv import SimulatedRank, asked, continuation, rank


class Right(Guesses):
    """Drafts that are right."""

    def guess(self, request: Request, most: int) -> list[int]:
        return continuation([*request.prompt_token_ids, *request.output_token_ids], most)


def owners(world: SimulatedRank) -> list[int]:
    """Of all joins so far."""
    return [join.owner for plan in world.plans for join in plan.joins]


def held(world: SimulatedRank) -> list[int]:
    """Tokens of each rank's requests."""
    tokens: Counter[int] = Counter()
    for one in world.scheduler.requests():
        if one.row >= 0:
            tokens[one.owner] += one.num_tokens
    return [tokens[owner] for owner in range(world.scheduler.limits.attention_ranks)]


def run(world: SimulatedRank, number: int, prompt: list[int], **params: object) -> Request:
    """To its end."""
    one = world.submit(asked(number, prompt, **params))
    world.run()
    return one


def test_newcomers_go_to_the_rank_with_fewest_tokens():
    world = rank(attention_ranks=2, max_num_seqs=6, max_num_batched_tokens=64)
    for number, length in enumerate([20, 3, 4, 5, 6]):
        world.submit(asked(number, [number] * length, max_tokens=8))
    world.step()
    assert owners(world) == [0, 1, 1, 1, 1]
    assert held(world) == [21, 22]
    world.run()


def test_a_conversation_goes_on_where_its_pages_are():
    world = rank(attention_ranks=3)
    prompts = [[number] * 20 for number in range(3)]
    for number, prompt in enumerate(prompts):
        world.submit(asked(number, prompt, max_tokens=9))
    world.run()
    assert owners(world) == [0, 1, 2]
    for number in (2, 0, 1):
        prompt = [*prompts[number], *world.tokens[number.to_bytes(16, "little")], 7]
        one = run(world, 10 + number, prompt, max_tokens=2)
        assert (one.owner, one.cached_tokens) == (number, 28)


def test_a_prefix_that_all_share_does_not_bring_all_to_one_rank():
    world = rank(attention_ranks=2, max_num_seqs=4, max_num_batched_tokens=64)
    common = [1] * 8
    run(world, 0, [*common, 0], max_tokens=1)
    for number in range(1, 5):
        world.submit(asked(number, [*common, *[10 + number] * 42], max_tokens=12))
        world.step()
        world.step()
    assert owners(world)[1:] == [0, 0, 1, 1]
    assert [one.cached_tokens for one in world.scheduler.requests()] == [8, 8, 0, 8], "the second rank computed it once"
    world.run()


def test_a_prompt_that_one_rank_computes_is_not_computed_by_another():
    world = rank(attention_ranks=2)
    prompt = [5] * 30
    for number in range(3):
        world.submit(asked(number, prompt, max_tokens=2))
    world.run()
    assert [one.cached_tokens for one in world.known.values()] == [0, 28, 28]
    assert world.num_computed == 30 + 2 + 2 + 3


def test_a_request_that_waits_for_pages_is_not_looked_up_at_every_step(monkeypatch: pytest.MonkeyPatch):
    looked_up: Counter[bytes] = Counter()
    keys = PageManager._keys

    def counted(manager: PageManager, one: Request, count: int) -> list[bytes]:
        looked_up[one.request_id] += 1
        return keys(manager, one, count)

    monkeypatch.setattr(PageManager, "_keys", counted)
    world = rank(attention_ranks=2, max_num_batched_tokens=8)
    world.submit(asked(0, [5] * 60, max_tokens=1))
    second = world.submit(asked(1, [5] * 60, max_tokens=1))
    for _ in range(5):
        world.step()
    assert (second.row, looked_up[second.request_id]) == (-1, 2), "once on each rank"
    world.run()
    assert second.cached_tokens == 56


def test_a_request_that_finds_no_page_makes_room_among_those_of_its_rank():
    world = rank(attention_ranks=2, num_pages=17, max_num_seqs=4, max_num_batched_tokens=128, enabled=False)
    many = [world.submit(asked(n, [n] * length, max_tokens=14)) for n, length in enumerate([20, 28, 36, 8])]
    world.step()
    assert [one.owner for one in many] == [0, 1, 0, 1]
    world.run()
    assert [one.preemptions for one in many] == [0, 0, 1, 0], "the last one, of the other rank, went on"


def test_a_request_goes_to_another_rank_where_that_of_its_pages_has_no_room():
    world = rank(attention_ranks=2, num_pages=16, max_num_seqs=4, max_num_batched_tokens=128)
    assert run(world, 0, [0] * 20, max_tokens=1).owner == 0
    large = world.submit(asked(1, [1] * 50, max_tokens=10))
    world.step()
    again = world.submit(asked(2, [0] * 24, max_tokens=4))
    world.step()
    assert (large.owner, again.owner, again.cached_tokens) == (0, 1, 0)
    world.run()
    assert run(world, 3, [0] * 25, max_tokens=4).cached_tokens == 24


def test_a_better_priority_takes_pages_of_the_rank_where_they_suffice():
    world = rank(attention_ranks=2, num_pages=16, max_num_seqs=4, max_num_batched_tokens=128)

    def submit(number: int, length: int, priority: int) -> Request:
        one = asked(number, [number] * length, 0, RequestOptions(priority=priority), max_tokens=6)
        return world.submit(one)

    best, worse, worst = submit(0, 50, -1), submit(1, 52, 1), submit(2, 4, 2)
    world.step()
    assert (best.owner, worse.owner, worst.owner) == (0, 1, 0)
    one = submit(3, 40, 0)
    world.step()
    assert (one.owner, one.row >= 0) == (1, True)
    assert [each.preemptions for each in (best, worse, worst)] == [0, 1, 0], "the worst one's pages would not suffice"
    world.run()


def test_a_better_priority_that_lacks_pages_and_a_row_takes_both_from_one_request():
    world = rank(attention_ranks=2, num_pages=16, max_num_seqs=2, max_num_batched_tokens=128)

    def submit(number: int, prompt: list[int], priority: int) -> Request:
        return world.submit(asked(number, prompt, 0, RequestOptions(priority=priority), max_tokens=4))

    worse, worst = submit(0, [1] * 50, 1), submit(1, [2] * 4, 2)
    world.step()
    one = submit(2, [1] * 40 + [3] * 20, 0)  # most of it is cached where the worse request's pages are
    world.step()
    assert [each.owner for each in (worse, worst, one)] == [0, 1, 0]
    assert (one.row >= 0, worse.preemptions, worst.preemptions) == (True, 1, 0)
    world.run()


def test_chunks_of_prompts_are_shared_out_among_ranks_and_fill_the_step():
    world = rank(attention_ranks=2, max_num_batched_tokens=16, max_num_seqs=4, enabled=False)
    for number, length in enumerate([40, 40, 3]):
        world.submit(asked(number, [number] * length, max_tokens=2))
    rows = {}
    world.step()
    rows[0] = {run.row: run.num_tokens for run in world.plans[-1].runs}
    world.step()
    rows[1] = {run.row: run.num_tokens for run in world.plans[-1].runs}
    assert rows[0] == {0: 8, 1: 8}
    assert rows[1] == {0: 8, 1: 8}
    alone = rank(attention_ranks=2, max_num_batched_tokens=16, max_num_seqs=4, enabled=False)
    alone.submit(asked(0, [0] * 40, max_tokens=2))
    alone.step()
    assert [run.num_tokens for run in alone.plans[-1].runs] == [16], "what other ranks do not need"
    for each in (world, alone):
        each.run()


def test_a_decode_that_makes_room_for_a_chunk_in_a_window_is_not_in_the_step():
    """Both requests read the window's pages, so that the first one's next chunk gets none back."""
    window = GroupLimits(14, PageLifetime(8))
    world = rank(attention_ranks=2, page_size=1, max_num_seqs=2, max_num_batched_tokens=4, more_groups=(window,))
    prompt = [1 + number for number in range(40)]
    first = world.submit(asked(0, prompt, max_tokens=2))
    while first.num_computed < 12:
        world.step()
    second = world.submit(asked(1, [*prompt[: first.num_computed], 90], max_tokens=9))
    world.run()
    assert (first.owner, first.preemptions, second.preemptions) == (0, 0, 1)
    assert set(world.ends.values()) == {"length"}


def test_drafts_get_a_page_where_others_of_their_rank_need_none():
    world = rank(attention_ranks=3, num_pages=16, max_num_seqs=3, max_num_batched_tokens=256, enabled=False)
    world.scheduler.drafting = drafting(Right(), 4, world.scheduler.limits.vocab_size)
    for number in range(3):  # 14 pages of 16 on each rank: two are left, fewer than run on all
        world.submit(asked(number, [number] * 55, max_tokens=5))
    world.step()
    world.step()
    assert [len(drafts) for _, drafts in world.plans[-1].drafts] == [3, 3, 3]
    world.run()


def test_a_page_is_told_of_as_long_as_any_rank_has_it():
    world = rank(attention_ranks=2, num_pages=16, max_num_seqs=2, max_num_batched_tokens=128)
    memory = world.scheduler.memory
    for number in range(2):  # one on each rank, at the same time
        world.submit(asked(number, [number] * 9, max_tokens=2))
        world.submit(asked(10 + number, [7] * 9, 0, RequestOptions(prefix_cache=number == 0), max_tokens=2))
    world.run()
    reader = memory.log.open()
    told = {key for key, _ in reader.take(1000).stored}
    assert told == {key for manager in memory.managers for key in manager.cache.device._page_of}
    memory.reset()
    assert reader.take(1000).is_new
    reader.close()
