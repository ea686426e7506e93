"""Who goes first and who runs out of time, through a client of two ranks; and what a prompt's tokens are worth."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from allspan import ClientEngine, SamplingParams
from allspan.protos.api.errors import DeadlineExceeded
from allspan.protos.api.options import RequestOptions
from support.waiting import wait_until

pytestmark = pytest.mark.timeout(180)

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
ENDLESS = GREEDY.with_(max_tokens=3000)


@pytest.fixture(scope="module")
def narrow(start_tiny: Callable[..., ClientEngine]) -> Iterator[ClientEngine]:
    """One request at a time."""
    with start_tiny(max_num_seqs=1, kv_cache_bytes=8_000_000) as made:
        yield made


def test_the_lower_number_goes_first(narrow: ClientEngine) -> None:
    running, _ = narrow.start_request([9, 9, 9], ENDLESS, options=RequestOptions(priority=-10))
    wait_until(lambda: narrow.statistics().running == 1, 10.0)
    order = [5, 0, -3, 0, 2]
    started = [
        narrow.start_request([1, 2, 3, i], GREEDY, options=RequestOptions(priority=priority))[1]
        for i, priority in enumerate(order)
    ]
    narrow.stop_request(running)
    for queue in started:
        assert queue.wait_finished(30.0)
    begun = [queue.timings.arrived_at + queue.timings.queue_s for queue in started if queue.timings is not None]
    assert sorted(range(5), key=lambda i: begun[i]) == [2, 1, 3, 4, 0]


def test_a_request_runs_out_of_its_time_running_or_waiting(narrow: ClientEngine) -> None:
    limited = RequestOptions(
        timeout_s=0.2
    )  # all its tokens take more, also where a step takes a tenth of a millisecond
    started = time.monotonic()
    _, running = narrow.start_request([1, 2, 3], ENDLESS, options=limited)
    _, waiting = narrow.start_request([4, 5, 6], ENDLESS, options=limited)
    for queue in (running, waiting):
        with pytest.raises(DeadlineExceeded, match="timeout_s"):
            list(queue)
    assert 0.15 < time.monotonic() - started < 10.0
    wait_until(lambda: (narrow.statistics().running, narrow.statistics().pages_used) == (0, 0), 5.0)
    assert len(narrow.generate([[1, 2, 3]], GREEDY)[0].token_ids) == 8


def test_prompt_logprobs_are_those_of_one_rank(start_tiny: Callable[..., ClientEngine], narrow: ClientEngine) -> None:
    """Also where the prompt takes several steps."""
    prompt = [(7 * i * i + 3) % 255 for i in range(700)]
    params = GREEDY.with_(prompt_logprobs=3, logprobs=3)
    with start_tiny(ranks=1, kv_cache_bytes=8_000_000, max_num_batched_tokens=2048) as single:
        one = single.generate([prompt], params)[0]
    two = narrow.generate([prompt], params)[0]
    assert len(one.prompt_logprobs) == len(two.prompt_logprobs) == len(prompt) - 1
    for left, right in zip(one.prompt_logprobs + one.logprobs, two.prompt_logprobs + two.logprobs, strict=True):
        assert left.logprob == pytest.approx(right.logprob, abs=2e-4)
        assert [value for _, value in left.top] == pytest.approx([value for _, value in right.top], abs=2e-4)
        assert len(left.top) == 3
