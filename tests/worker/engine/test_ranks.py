"""Followers keep step with their leader while requests are refused, put out and cancelled at any moment."""

import random
import threading

import pytest

from allspan.protos.api.errors import QueueFull
from support.cores import Collected, fake_core, fake_gpu_core, request
from support.fake_model import greedy
from support.threads import ThreadWorld
from support.waiting import wait_until

WIDTHS = {2: (50, 47), 3: (33, 32, 32)}


class Facade(threading.Thread):
    """Sends requests to followers first, to the leader last; cancels some, and stops the world at the end."""

    def __init__(self, cores, seed, count):
        super().__init__(daemon=True)
        self.accepted = []
        self._leader, *self._followers = cores
        self._rng = random.Random(seed)
        self._count = count

    def run(self):
        for number in range(1, self._count + 1):
            self._start(number)
            if self._rng.random() < 0.3 and self.accepted:
                self._cancel(self._rng.choice(self.accepted))
            wait_until(lambda: self._leader.statistics().waiting < self._rng.randrange(1, 6), what="a shorter queue")
        wait_until(lambda: self._leader.statistics().waiting + self._leader.statistics().running == 0, what="the end")
        self._leader.shutdown()

    def _start(self, number):
        prompt = [self._rng.randrange(97) for _ in range(self._rng.randrange(1, 40))]
        max_tokens = self._rng.randrange(1, 24)
        for follower in self._followers:
            follower.submit(request(number, prompt, max_tokens=max_tokens))
        one = request(number, prompt, max_tokens=max_tokens)
        try:
            self._leader.submit(one)
            self.accepted.append(one)
        except QueueFull:
            self._withdraw(one)

    def _cancel(self, one):
        self._leader.cancel([one.request_id])
        if self._rng.random() < 0.7:
            self._withdraw(one)

    def _withdraw(self, one):
        for follower in self._followers:
            follower.cancel([one.request_id])


def cpu_core(world, rank, collected):
    collectives, channel = world.collectives[rank], world.channels[rank]
    widths = WIDTHS[collectives.size]
    return fake_core(18, collected, collectives=collectives, channel=channel, widths=widths, max_queued_requests=3)[0]


def gpu_core(world, rank, collected):
    collectives, channel = world.collectives[rank], world.channels[rank]
    return fake_gpu_core(18, collected, collectives=collectives, channel=channel, max_queued_requests=3)[0]


@pytest.mark.parametrize(
    ("core", "size", "seed"), [(cpu_core, 2, 1), (cpu_core, 3, 2), (cpu_core, 2, 3), (gpu_core, 2, 4), (gpu_core, 3, 5)]
)
def test_whatever_is_refused_and_cancelled_the_ranks_agree_and_nothing_is_left(core, size, seed):
    world, collected = ThreadWorld(size), Collected()
    cores = [core(world, rank, collected) for rank in range(size)]
    facade = Facade(cores, seed, 50)
    facade.start()
    world.run(lambda rank: cores[rank].run())
    facade.join(10)
    assert not collected.errors
    assert set(collected.outputs) == {one.request_id for one in facade.accepted}
    for one in facade.accepted:
        tokens = collected.tokens(one)
        assert tokens == greedy(list(one.prompt_token_ids), one.params.max_tokens)[: len(tokens)]
        assert collected.reason(one) == ("length" if len(tokens) == one.params.max_tokens else "cancelled")
    assert [core.statistics().running for core in cores] == [0] * size
    assert cores[0].statistics().pages_used == 0
    assert [channel.num_expected for channel in world.channels] == [0] + [50] * (size - 1)
