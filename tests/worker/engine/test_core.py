"""The step loop with a model that hashes what it finds in its cache: any wrong page, length or token shows."""

from __future__ import annotations

import random
import threading
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allspan.protos.api import errors
from allspan.worker.engine import core as core_module
from allspan.worker.engine.core import IDLE_SECONDS
from allspan.worker.scheduler.codec import encode
from allspan.worker.scheduler.plan import StepPlan
from allspan.worker.scheduler.scheduler import Scheduler
from support.cores import Collected, fake_core, request, step_until_idle
from support.fake_model import greedy
from support.threads import ThreadWorld
from support.waiting import wait_until


@contextmanager
def running(core):
    """The core's loop on a thread of its own; the error that ended it, if any, is in the list given."""
    errors: list[BaseException] = []

    def run():
        try:
            core.run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield errors
    finally:
        core.shutdown()
        thread.join(20)
        assert not thread.is_alive()


def mixed(count, seed=0, longest=40):
    rng = random.Random(seed)
    return [[rng.randrange(97) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("budget", [4, 5, 16, 512])
@pytest.mark.parametrize("num_pages", [16, 400])
def test_a_batch_of_mixed_lengths_gives_the_tokens_of_each_alone(budget, num_pages):
    collected = Collected()
    core, model = fake_core(num_pages, collected, max_num_batched_tokens=budget)
    prompts = mixed(20)
    requests = [request(i, prompt, max_tokens=20) for i, prompt in enumerate(prompts)]
    for one in requests:
        core.submit(one)
    step_until_idle(core)
    for one, prompt in zip(requests, prompts, strict=True):
        assert collected.tokens(one) == greedy(prompt, 20)
        assert collected.reason(one) == "length"
    assert model.most_tokens <= budget
    assert core.statistics().pages_used == 0
    assert (core.statistics().preemptions > 0) == (num_pages == 16)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 24), st.integers(1, 20), st.integers(0, 6)), min_size=1, max_size=12),
    st.integers(11, 24),
    st.integers(1, 4),
    st.integers(0, 12),
    st.randoms(use_true_random=False),
)
def test_whatever_comes_in_whatever_order_no_token_is_lost_or_wrong(work, num_pages, rows, extra, rng):
    collected = Collected()
    core, _ = fake_core(num_pages, collected, max_num_seqs=rows, max_num_batched_tokens=rows + extra)
    requests = []
    for number, (length, max_tokens, pause) in enumerate(work):
        one = request(number, [rng.randrange(97) for _ in range(length)], max_tokens=max_tokens)
        requests.append(one)
        core.submit(one)
        for _ in range(pause):
            core.step()
            core.check()
        if rng.random() < 0.2:
            core.cancel([rng.choice(requests).request_id])
    step_until_idle(core)
    assert core.statistics().pages_used == 0
    for one in requests:
        tokens = collected.tokens(one)
        assert tokens == greedy(list(one.prompt_token_ids), len(tokens))
        assert collected.reason(one) in ("length", "cancelled")
        if collected.reason(one) == "length":
            assert len(tokens) == one.max_tokens


def seeded_requests():
    return [
        request(i, prompt, max_tokens=12, temperature=0.9, top_k=20, logprobs=i % 4 or None)
        for i, prompt in enumerate(mixed(9, seed=2, longest=20))
    ]


@pytest.mark.parametrize("size", [2, 3])
def test_several_ranks_give_the_tokens_of_one(size):
    alone = Collected()
    core, _ = fake_core(20, alone)
    for one in seeded_requests():
        core.submit(one)
    step_until_idle(core)

    world = ThreadWorld(size)
    widths = {2: (50, 47), 3: (33, 32, 32)}[size]
    together = Collected()
    cores = [
        fake_core(20, together, collectives=world.collectives[rank], channel=world.channels[rank], widths=widths)[0]
        for rank in range(size)
    ]
    for core in reversed(cores):
        for one in seeded_requests():
            core.submit(one)

    def on_rank(rank):
        if rank == 0:
            step_until_idle(cores[0])
            cores[0].shutdown()
        cores[rank].run()

    world.run(on_rank)
    assert {key: value.token_ids for key, value in together.outputs.items()} == {
        key: value.token_ids for key, value in alone.outputs.items()
    }
    for key, output in together.outputs.items():
        assert output.logprobs == alone.outputs[key].logprobs
    assert [core.statistics().running for core in cores] == [0] * size
    assert [core.state for core in cores] == ["stopped"] * size


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch():
    collected = Collected()
    core, _ = fake_core(20, collected)
    for one in seeded_requests():
        core.submit(one)
    step_until_idle(core)
    for one in seeded_requests():
        lone = Collected()
        core, _ = fake_core(100, lone)
        core.submit(one)
        step_until_idle(core)
        assert lone.tokens(one) == collected.tokens(one)


def test_the_end_of_sequence_ends_a_request():
    prompt = [5, 6]
    expected = greedy(prompt, 10)
    stop = next(token for i, token in enumerate(expected) if i >= 3 and token not in expected[:i])
    collected = Collected()
    core, _ = fake_core(64, collected, eos=(stop,))
    one = request(1, prompt, max_tokens=10)
    core.submit(one)
    step_until_idle(core)
    assert collected.tokens(one) == expected[: expected.index(stop) + 1]
    assert collected.outputs[one.request_id].stop_token_id == stop


def test_a_cancel_frees_the_pages_within_two_steps():
    collected = Collected()
    core, _ = fake_core(64, collected)
    one = request(1, [1] * 30, max_tokens=30)
    core.submit(one)
    core.step()
    assert core.statistics().pages_used > 0
    core.cancel([one.request_id])
    core.step()
    assert core.statistics().pages_used == 0
    assert collected.reason(one) == "cancelled"
    assert core.step() is False


def test_a_refused_request_does_not_disturb_the_others():
    collected = Collected()
    core, _ = fake_core(64, collected, max_queued_requests=1)
    one = request(1, [1], max_tokens=3)
    core.submit(one)
    for bad, error in (
        (request(2, [97]), errors.InvalidRequest),
        (request(3, [1] * 64), errors.InvalidRequest),
        (request(1, [2]), errors.AlreadyExists),
        (request(4, [1]), errors.QueueFull),
    ):
        with pytest.raises(error):
            core.submit(bad)
    assert core.statistics().refused_requests == 1, "by the full queue; the others are their callers' mistakes"
    step_until_idle(core)
    assert set(collected.outputs) == {one.request_id}


def test_what_a_follower_s_inbox_refuses_is_counted_there():
    world = ThreadWorld(2)
    follower, _ = fake_core(
        collectives=world.collectives[1],
        channel=world.channels[1],
        widths=(50, 47),
        max_queued_requests=1,
        max_num_seqs=1,
    )
    for number in range(4):
        follower.submit(request(number, [1]))
    with pytest.raises(errors.QueueFull):
        follower.submit(request(4, [1]))
    assert follower.statistics().refused_requests == 1


def test_a_cancelled_id_cannot_be_used_again_at_once():
    core, _ = fake_core(64)
    one = request(1, [1])
    core.submit(one)
    core.cancel([one.request_id])
    with pytest.raises(errors.AlreadyExists):
        core.submit(request(1, [1]))
    step_until_idle(core)
    with pytest.raises(errors.AlreadyExists):
        core.submit(request(1, [1]))


def test_an_id_can_be_used_again_once_its_request_has_finished():
    collected = [Collected(), Collected()]
    core, _ = fake_core(64)
    for each in collected:
        core.on_outputs = each
        core.submit(request(1, [1], max_tokens=2))
        step_until_idle(core)
        assert each.reason(request(1, [1])) == "length"


def test_a_refused_request_can_be_sent_again():
    collected = Collected()
    core, _ = fake_core(64, collected, max_queued_requests=1)
    core.submit(request(1, [1]))
    with pytest.raises(errors.QueueFull):
        core.submit(request(2, [1]))
    core.step()
    core.submit(request(2, [1]))
    step_until_idle(core)
    assert len(collected.outputs) == 2


def test_an_idle_loop_sleeps_and_wakes_for_a_request():
    collected = Collected()
    core, model = fake_core(64, collected)
    with running(core):
        for number in range(3):
            before = core.progress
            wait_until(lambda before=before: core.progress > before, 10 * IDLE_SECONDS, "progress while idle")
            one = request(number, [number + 1], max_tokens=4)
            core.submit(one)
            wait_until(lambda one=one: collected.reason(one), what="the end of the request")
            assert collected.tokens(one) == greedy([number + 1], 4)
        assert core.progress_age_s < 10 * IDLE_SECONDS
    assert model.num_forwards == 12


def test_the_books_are_checked_once_an_idle_spell(monkeypatch):
    monkeypatch.setattr(core_module, "IDLE_SECONDS", 0.005)
    checks = []
    monkeypatch.setattr(Scheduler, "check", lambda self: checks.append(1))
    core, _ = fake_core()
    with running(core):
        for spell in (1, 2):
            core.submit(request(spell, [1], max_tokens=2))
            wait_until(lambda spell=spell: len(checks) == spell, what="a check")
            seen = core.progress
            wait_until(lambda seen=seen: core.progress > seen + 3, what="idle rounds")
            assert len(checks) == spell


def test_stop_model_drains_and_start_model_lets_in_again():
    collected = Collected()
    core, _ = fake_core(64, collected)
    with running(core):
        one = request(1, [1], max_tokens=40)
        core.submit(one)
        core.stop_model(10)
        assert collected.reason(one) == "length"
        assert core.state == "stopped"
        with pytest.raises(errors.Unavailable, match="start_model"):
            core.submit(request(2, [1]))
        core.start_model()
        core.submit(request(2, [1], max_tokens=2))
        core.stop_model(10)
        assert len(collected.outputs) == 2


def test_stop_model_gives_up_after_its_timeout_by_saying_what_runs():
    core, _ = fake_core(64)
    core.submit(request(1, [1]))
    with pytest.raises(errors.DeadlineExceeded, match=r"1 requests still run after 0\.01 s"):
        core.stop_model(0.01)


def test_shutdown_fails_what_is_open_and_refuses_what_comes():
    collected = Collected()
    core, _ = fake_core(64, collected)
    one = request(1, [1])
    core.submit(one)
    core.shutdown()
    core.run()
    assert isinstance(collected.errors[one.request_id], errors.Unavailable)
    with pytest.raises(errors.Unavailable):
        core.submit(request(2, [1]))


def test_a_failure_ends_the_loop_and_tells_every_open_request():
    collected = Collected()
    core, model = fake_core(64, collected)
    requests = [request(number, [1]) for number in range(6)]
    for one in requests:
        core.submit(one)

    def broken(inputs):
        raise RuntimeError("the roof is gone")

    model.forward = broken
    with pytest.raises(RuntimeError, match="the roof is gone"):
        core.run()
    assert core.state == "failed"
    for one in requests:
        assert isinstance(collected.errors[one.request_id], errors.Unavailable)
        assert "the roof is gone" in collected.errors[one.request_id].message
    with pytest.raises(errors.Unavailable, match="the roof is gone"):
        core.submit(request(9, [1]))


def follower(world):
    return fake_core(64, collectives=world.collectives[1], channel=world.channels[1], widths=(50, 47))[0]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (StepPlan(9, 1, 0), "epoch 9, step 1"),
        (StepPlan(1, 5, 0), "step 5"),
        (StepPlan(1, 1, 77), "diverged"),
    ],
)
def test_a_follower_refuses_a_plan_that_is_not_the_next_of_its_world(plan, words):
    world = ThreadWorld(2)
    world.channels[0].publish(encode(plan))
    with pytest.raises(errors.InternalError, match=words):
        follower(world).run()


def test_a_follower_refuses_bytes_that_are_no_plan():
    world = ThreadWorld(2)
    world.channels[0].publish(b"garbage")
    with pytest.raises(errors.InternalError, match="malformed plan"):
        follower(world).run()


def test_a_follower_validates_what_it_is_sent():
    with pytest.raises(errors.InvalidRequest, match=r"prompt_token_ids\[0\] is token id 97"):
        follower(ThreadWorld(2)).submit(request(1, [97]))


def test_several_ranks_need_a_channel():
    with pytest.raises(errors.InternalError, match="plan channel"):
        fake_core(64, collectives=ThreadWorld(2).collectives[0])


def test_submits_and_cancels_from_many_threads_each_end_once():
    collected = Collected()
    core, _ = fake_core(24, collected)
    requests = [request(number, prompt, max_tokens=10) for number, prompt in enumerate(mixed(60, longest=12))]
    with running(core) as errors:

        def work(part):
            for one in part:
                core.submit(one)
                if one.request_id[0] % 3 == 0:
                    core.cancel([one.request_id])

        threads = [threading.Thread(target=work, args=(requests[i::4],)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        wait_until(lambda: errors or all(collected.reason(one) for one in requests), 30, "the end of all requests")
    assert not errors
    for one in requests:
        tokens = collected.tokens(one)
        assert tokens == greedy(list(one.prompt_token_ids), len(tokens))
    assert core.statistics().pages_used == 0
    assert core.statistics().finished_requests == 60
