"""A request's tokens and log-probabilities are the same however it came to them: alone or among others, from cached
pages, put out and let in again, in chunks, from the host tier, or taken over from another world."""

from __future__ import annotations

import random

import numpy as np
import pytest

from allspan.protos.api.options import RequestOptions
from allspan.protos.api.results import Output
from support.cores import Collected, fake_core, request, step_until_idle
from support.fake_model import logits_after
from support.threads import ThreadWorld

WIDTHS = {1: (97,), 2: (50, 47), 3: (33, 32, 32)}


def conversations(count=14, seed=3):
    """Requests of three families of prompts, so that they share beginnings, each asking something else."""
    rng = random.Random(seed)
    families = [[rng.randrange(97) for _ in range(26)] for _ in range(3)]
    asked = []
    for number in range(count):
        prompt = families[number % 3][: rng.randint(9, 26)] + [rng.randrange(97) for _ in range(rng.randint(0, 6))]
        one = request(
            number,
            prompt,
            max_tokens=rng.randint(2, 20),
            temperature=number % 2 * 0.8,
            logprobs=rng.choice([None, 2]),
            prompt_logprobs=rng.choice([None, None, 1]),
        )
        one.options = RequestOptions(priority=rng.choice([0, 0, -1]), prefix_cache=rng.random() < 0.9)
        asked.append(one)
    return asked


def alone():
    """What each of them gets by itself, without a prefix cache."""
    outputs = {}
    for one in conversations():
        collected = Collected()
        core, _ = fake_core(64, collected)
        one.options = RequestOptions(prefix_cache=False)
        core.submit(one)
        step_until_idle(core)
        outputs |= collected.outputs
    return {key: told(output) for key, output in outputs.items()}


def told(output: Output):
    return output.token_ids, output.logprobs, output.prompt_logprobs, output.finish_reason


def together(size, num_pages, host, budget):
    """All at once, on `size` ranks; the leader's counters and what everyone got."""
    world, collected = ThreadWorld(size), Collected()
    cores = [
        fake_core(
            num_pages,
            collected,
            collectives=world.collectives[rank] if size > 1 else None,
            channel=world.channels[rank] if size > 1 else None,
            widths=WIDTHS[size],
            num_host_pages=host,
            max_num_batched_tokens=budget,
        )[0]
        for rank in range(size)
    ]

    def on_rank(rank):
        if rank == 0:
            for number in range(len(conversations())):
                for core in reversed(cores):
                    core.submit(conversations()[number])
                for _ in range(number % 4):
                    core.step()
                    core.check()
            step_until_idle(cores[0])
            cores[0].shutdown()
        cores[rank].run()

    world.run(on_rank)
    assert not collected.errors
    return cores[0].statistics(), {key: told(output) for key, output in collected.outputs.items()}


@pytest.mark.parametrize(
    ("size", "num_pages", "host", "budget"),
    [(1, 200, 0, 64), (1, 16, 0, 16), (1, 13, 40, 5), (2, 14, 6, 8), (3, 16, 0, 16)],
)
def test_however_they_are_run_they_get_what_they_get_alone(size, num_pages, host, budget):
    counters, outputs = together(size, num_pages, host, budget)
    assert outputs == alone()
    assert counters.pages_used == 0
    assert counters.prefix_hit_tokens > 0
    if num_pages < 20:
        assert counters.preemptions > 0
    assert (counters.prefix_host_hit_tokens > 0) == (host > 0)
    assert (counters.host_pages_total, counters.host_pages_used > 0) == (host, host > 0)


@pytest.mark.parametrize("resumed", [1, 5, 11])
def test_a_request_taken_over_goes_on_with_the_tokens_it_would_have_had(resumed):
    params = {
        "max_tokens": 12,
        "temperature": 0.9,
        "logprobs": 1,
        "min_tokens": 9,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
    }
    prompt = [5, 6, 7, 8, 9]
    outputs = []
    for known in ((), None):
        collected = Collected()
        core, _ = fake_core(64, collected)
        one = request(1, prompt, **params)
        if known is None:
            one.output_token_ids = list(outputs[0].token_ids[:resumed])
            one.num_resumed = resumed
        core.submit(one)
        step_until_idle(core)
        outputs.append(collected.outputs[one.request_id])
    whole, rest = outputs
    assert rest.token_ids == whole.token_ids[resumed:]
    assert rest.logprobs == whole.logprobs[resumed:]
    assert (rest.finish_reason, rest.timings.output_tokens) == ("length", 12)


def test_prompt_logprobs_are_the_model_s():
    prompt = [random.Random(1).randrange(97) for _ in range(30)]
    collected = Collected()
    core, _ = fake_core(64, collected, max_num_batched_tokens=8)
    one = request(1, prompt, max_tokens=2, prompt_logprobs=3)
    core.submit(one)
    step_until_idle(core)
    entries = collected.outputs[one.request_id].prompt_logprobs
    assert len(entries) == 29
    for i, entry in enumerate(entries, start=1):
        logits = logits_after(prompt[:i], 97).astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum())
        best = np.argsort(-expected)[:3]
        assert entry.logprob == pytest.approx(expected[prompt[i]], abs=1e-5)
        assert [token for token, _ in entry.top] == best.tolist()
        assert [value for _, value in entry.top] == pytest.approx(expected[best].tolist(), abs=1e-5)


def test_logits_that_are_not_finite_within_a_prompt_fail_its_request_alone():
    collected = Collected()
    core, model = fake_core(64, collected)
    forward = model.forward

    def broken(inputs):
        logits = forward(inputs)
        logits[inputs.ids[inputs.logits_rows.long()] == 66] = float("nan")
        return logits

    model.forward = broken
    bad, good = request(1, [1, 66, 2, 3], max_tokens=3, prompt_logprobs=0), request(2, [1, 2], max_tokens=3)
    core.submit(bad)
    core.submit(good)
    step_until_idle(core)
    assert "not finite" in collected.errors[bad.request_id].message
    assert collected.reason(good) == "length"
    assert core.statistics().running == 0
