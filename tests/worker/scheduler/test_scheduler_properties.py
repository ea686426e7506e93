"""Scheduler, prefix cache and page pool together, whatever comes: on pages that remember what was written to them,
every invariant holds after every step, and every request ends once, with all its tokens."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allspan.protos.api.errors import DeadlineExceeded
from allspan.protos.api.options import RequestOptions
from allspan.worker.cache.spec import ALL_TOKENS, PageLifetime
from allspan.worker.scheduler.limits import GroupLimits
from allspan.worker.scheduler.request import Request
from support.drafters import Guesses, drafting
from support.simulated_kv import Clock, SimulatedRank, asked, continuation, rank

prompts = st.builds(
    lambda family, length, tail: [family] * length + tail,
    st.integers(1, 3),
    st.sampled_from([30, 25, 18, 9, 4, 1]),
    st.lists(st.integers(4, 6), max_size=3),
)
options = st.builds(
    RequestOptions,
    priority=st.sampled_from([0, 0, 0, -1, 1]),
    timeout_s=st.sampled_from([None, None, None, 3.0, 20.0]),
    prefix_cache=st.sampled_from([True, True, True, False]),
    cache_salt=st.sampled_from(["", "", "salt"]),
)
submits = st.tuples(
    st.just("submit"),
    st.tuples(
        prompts,
        st.sampled_from([12, 7, 1]),
        st.sampled_from([0, 0, 5]),
        st.sampled_from([None, None, None, 0]),
        options,
    ),
)
actions = st.lists(
    st.one_of(
        submits,
        submits,
        submits,
        st.tuples(st.sampled_from(["cancel", "cancel in flight"]), st.integers(0, 20)),
        st.tuples(st.just("steps"), st.integers(1, 6)),
        st.tuples(st.just("steps"), st.integers(7, 30)),
        st.tuples(st.sampled_from(["wait", "reset"]), st.integers(1, 5)),
    ),
    min_size=12,
    max_size=40,
)


def groups(window: int, size: int, rows: int, step: int, kinds: str) -> dict[str, object]:
    """Limits with a cache group for each letter: "a" keeps all tokens, "w" a window, "s" a state."""
    lifetimes = {"w": PageLifetime(window), "s": PageLifetime(is_state=True)}
    more = []
    for kind in kinds[1:]:
        least = GroupLimits(1, lifetimes[kind]).most_pages(45, size, step)
        more.append(GroupLimits(least * (rows if kind == "s" else 1) + 1, lifetimes[kind], num_host_pages=3))
    return {"lifetime": lifetimes["w"] if kinds.startswith("w") else ALL_TOKENS, "more_groups": tuple(more)}


class Mixed(Guesses):
    """A drafter that is right, wrong, or right for a while; it proposes too many tokens and ids that do not exist."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def guess(self, request: Request, most: int) -> list[int]:
        tokens = [*request.prompt_token_ids, *request.output_token_ids]
        right = continuation(tokens, self._random.randint(0, most + 2))
        return right + [self._random.choice([0, 5, 96, -1, 97]) for _ in range(self._random.randint(0, 3))]


def draft(world: SimulatedRank, most: int) -> None:
    """Up to `most` drafts of a request in a step; 0: none."""
    if most:
        size = world.scheduler.limits.vocab_size
        world.scheduler.drafting = drafting(Mixed(most), most, size)


class Story:
    """Carries actions out and remembers what must come of them."""

    def __init__(self, world: SimulatedRank, clock: Clock) -> None:
        self.world = world
        self.clock = clock
        self.submitted: list[Request] = []
        self.cancelled: set[bytes] = set()

    def act(self, kind: str, what: object) -> None:
        world = self.world
        if kind == "submit":
            prompt, max_tokens, resumed, prompt_logprobs, chosen = what
            one = asked(
                len(self.submitted),
                prompt,
                min(resumed, max_tokens - 1),
                chosen,
                max_tokens=max_tokens,
                prompt_logprobs=prompt_logprobs,
            )
            self.submitted.append(world.submit(one))
        elif kind == "cancel" and what < len(self.submitted):
            self._cancel(self.submitted[what])
        elif kind == "cancel in flight" and what < len(self.submitted):
            world.between = lambda: self._cancel(self.submitted[what])
            world.step()
            world.between = lambda: None
        elif kind == "steps":
            for _ in range(what):
                world.step()
        elif kind == "wait":
            self.clock.now += what
        elif kind == "reset":
            world.scheduler.memory.reset()
        world.scheduler.check()

    def _cancel(self, one: Request) -> None:
        self.cancelled.add(one.request_id)
        self.world.cancel(one)

    def check_end(self) -> None:
        world = self.world
        assert not any(pages.used for pages in world.scheduler.memory.counts)
        assert not world.rows
        assert not world.parked
        assert world.dropped == {one.request_id for one in self.submitted} == world.ends.keys()
        for one in self.submitted:
            key, prompt = one.request_id, list(one.prompt_token_ids)
            tokens, end = world.tokens[key], world.ends[key]
            assert tokens == continuation(prompt, len(tokens))
            told = world.prompt_logprobs[key]
            assert told == [float(i + 1) for i in range(len(told))]
            if end == "length":
                assert len(tokens) == one.max_tokens
                assert len(told) == (len(prompt) - 1 if one.wants_prompt_logprobs else 0)
            elif end == "cancelled":
                assert key in self.cancelled
            else:
                assert isinstance(end, DeadlineExceeded)
                assert one.options.timeout_s is not None


def drawn(rng: random.Random) -> tuple[str, object]:
    """One action, of a busier day than hypothesis likes to make up."""
    kind = rng.choice(["submit"] * 6 + ["cancel", "cancel in flight", "steps", "steps", "steps", "wait", "reset"])
    if kind == "submit":
        prompt = [rng.randint(1, 2)] * rng.randint(1, 30) + [rng.randint(4, 6)] * rng.randint(0, 3)
        chosen = RequestOptions(
            priority=rng.choice([0, 0, 0, -1, 1]),
            timeout_s=rng.choice([None, None, None, None, 9.0]),
            prefix_cache=rng.random() < 0.9,
            cache_salt=rng.choice(["", "", "", "salt"]),
        )
        return kind, (prompt, rng.randint(1, 12), rng.choice([0, 0, 0, 3]), rng.choice([None, None, None, 0]), chosen)
    most = {"steps": 12, "wait": 3, "reset": 1}.get(kind, 40)
    return ("steps", 1) if kind == "reset" and rng.random() < 0.7 else (kind, rng.randint(1, most))


@pytest.mark.parametrize("seed", range(40))
def test_busy_days_on_tiny_pools_end_well(seed):
    rng = random.Random(seed)
    clock, size, host = Clock(), rng.randint(1, 4), rng.choice([0, 4, 12, 40])
    rows = rng.randint(2, 4)
    world = rank(
        host,
        clock,
        page_size=size,
        num_pages=-(-45 // size) + rng.randint(0, 4),
        max_num_seqs=rows,
        max_num_batched_tokens=rows + rng.randint(0, 20),
        depth=1 + seed % 3,
        attention_ranks=(1, 2, 1, 3)[seed % 4],
        **groups(rng.randint(1, 12), size, rows, rows + 20, rng.choice(["", "", "aw", "w", "aww", "as", "aws"])),
    )
    draft(world, rng.choice([0, 0, 1, 3, 9]))
    story = Story(world, clock)
    for _ in range(80):
        story.act(*drawn(rng))
    world.run()
    story.check_end()
    if not any(group.lifetime.is_state for group in world.groups):
        assert world.scheduler.counters.prefix_hit_tokens > 0


@settings(max_examples=160, deadline=None)
@given(
    actions,
    st.sampled_from([4, 2, 3, 1]),
    st.sampled_from([0, 1, 6]),
    st.sampled_from([4, 3, 1]),
    st.integers(0, 12),
    st.sampled_from([8, 30, 1, 0]),
    st.sampled_from([1, 2, 3]),
    st.tuples(
        st.integers(1, 12),
        st.sampled_from(["", "w", "aw", "ww", "as", "aws"]),
        st.sampled_from([0, 0, 2, 7]),
        st.sampled_from([1, 2, 1, 3]),
    ),
)
def test_whatever_comes_every_page_that_is_read_holds_the_right_tokens(
    actions, size, extra, rows, budget, host, depth, more
):
    clock = Clock()
    world = rank(
        host,
        clock,
        page_size=size,
        num_pages=-(-(33 + 12) // size) + extra,
        max_num_seqs=rows,
        max_num_batched_tokens=rows + budget,
        depth=depth,
        attention_ranks=more[3],
        **groups(more[0], size, rows, rows + budget, more[1]),
    )
    draft(world, more[2])
    story = Story(world, clock)
    for kind, what in actions:
        story.act(kind, what)
    world.run()
    story.check_end()


@pytest.mark.parametrize("depth", [2, 3])
def test_steps_planned_ahead_are_as_full_as_others_and_take_newcomers_along(depth):
    world = rank(num_pages=200, depth=depth, enabled=False)
    for number in range(12):
        world.submit(asked(number, [number] * (5 + 3 * number), max_tokens=6))
    world.run()
    early = [plan for plan in world.plans if plan.in_flight]
    assert max(plan.in_flight for plan in early) == depth - 1
    assert any(plan.joins for plan in early)
    assert any(run.num_tokens > 1 for plan in early for run in plan.runs)
    plain = rank(num_pages=200, enabled=False)
    for number in range(12):
        plain.submit(asked(number, [number] * (5 + 3 * number), max_tokens=6))
    plain.run()
    assert world.tokens == plain.tokens
    # A row that becomes free is taken some steps later.
    assert len(plain.plans) <= len(world.plans) <= len(plain.plans) + 12 * (depth - 1)


def test_ten_thousand_cancels_leave_no_page_behind():
    world = rank(num_pages=16, host=8)
    for number in range(10_000):
        one = world.submit(asked(number, [number % 7] * (number % 12 + 1), max_tokens=20))
        if number % 3:
            assert world.step() is not None
        world.cancel(one)
    world.run()
    cache = world.scheduler.memory.cache
    assert cache.device.num_used == cache.host.num_used == 0
    assert len(world.dropped) == 10_000
    assert not cache.owners()
