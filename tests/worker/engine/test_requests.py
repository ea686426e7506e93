"""Outcomes reach the queue of their request, and an ended request is kept no longer."""

import pytest

from allspan.protos.api.errors import AlreadyExists, InternalError
from allspan.protos.api.results import Output, RequestState
from allspan.protos.api.sampling import SamplingParams
from allspan.worker.engine.requests import OpenRequests
from support.cores import request

ONE = request(1, [1])


def opened():
    cancelled = []
    requests = OpenRequests(cancelled.extend)
    return requests, requests.add(ONE.request_id, SamplingParams(), None)


@pytest.mark.parametrize(
    ("end", "state"),
    [
        (Output((4,), finish_reason="length"), RequestState.FINISHED),
        (Output(finish_reason="cancelled"), RequestState.CANCELLED),
        (InternalError("broken"), RequestState.FAILED),
    ],
)
def test_an_ended_request_is_forgotten_and_its_queue_stays_readable(end, state):
    requests, queue = opened()
    requests.deliver([(ONE, Output((3,)))])
    assert requests.queue(ONE.request_id) is queue
    requests.deliver([(ONE, end)])
    assert requests.queues() == []
    assert queue.state is state
    read = queue.get_nowait()
    assert read is not None
    assert read.token_ids[0] == 3


def test_an_id_is_in_use_until_its_request_ends():
    requests, _ = opened()
    with pytest.raises(AlreadyExists):
        requests.add(ONE.request_id, SamplingParams(), None)
    requests.deliver([(ONE, Output(finish_reason="stop"))])
    requests.add(ONE.request_id, SamplingParams(), None)
