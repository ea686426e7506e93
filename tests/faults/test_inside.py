"""Faults inside one rank: an exception in its forward pass, a collective that it leaves out."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from allspan import ClientEngine, SamplingParams
from allspan.protos.api.errors import Unavailable
from support.faults import make_fault
from support.serving import Served
from support.waiting import wait_until

Start = Callable[..., Served]

pytestmark = pytest.mark.timeout(180)

ENDLESS = SamplingParams(max_tokens=60000, temperature=0.0, ignore_eos=True)

BROKEN_FORWARD = """
from allspan.worker.models.model import Model

forward = Model.forward

def broken(self, *arguments):
    if due():
        raise ZeroDivisionError("injected into the forward pass")
    return forward(self, *arguments)

Model.forward = broken
"""

LEFT_OUT_COLLECTIVE = """
from allspan.worker.parallel.window import WindowCollectives

all_gather_rows = WindowCollectives.all_gather_rows

def sometimes(self, x, out):
    if not due():
        all_gather_rows(self, x, out)

WindowCollectives.all_gather_rows = sometimes
"""


def refusal(served: Served) -> tuple[int, str]:
    """What the gateway says to a request that runs until the ranks are gone."""
    body = json.dumps({"prompt": "ab", "max_tokens": 60000, "temperature": 0, "ignore_eos": True}).encode()
    request = urllib.request.Request(f"{served.http}/v1/completions", body, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    with caught.value as answer:
        return answer.code, str(json.load(answer)["error"]["message"])


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_an_exception_in_one_rank_is_told_once_and_ends_the_world_in_order(
    start: Start, tmp_path: Path, rank: int
) -> None:
    fault = make_fault(tmp_path / "fault", rank, BROKEN_FORWARD)
    served = start("--no-restart", env=fault.env)
    traces = served.traces()
    with ClientEngine(attach=served.run_dir) as engine:
        _, queue = engine.start_request([1, 2, 3], ENDLESS)
        assert queue.get(timeout=30) is not None
        fault.fire()
        fired = time.monotonic()
        status, message = refusal(served)
        with pytest.raises(Unavailable) as caught:
            list(queue)
        assert time.monotonic() - fired < 3.0
    assert status == 503
    for told in (message, caught.value.message):
        assert f"rank {rank}" in told
        assert "ZeroDivisionError: injected into the forward pass" in told
    assert served.wait_exit(10.0) == 1
    traces.assert_gone(within=1.0)
    assert served.log.count("Traceback") == 1
    assert 'raise ZeroDivisionError("injected into the forward pass")' in served.log
    assert "injected into the forward pass" in served.log.splitlines()[-1]


def test_a_collective_that_one_rank_leaves_out_is_noticed_and_shown_with_every_stack(
    start: Start, tmp_path: Path
) -> None:
    """Both ranks live and beat, and wait for each other: the watchdog's time is over after two seconds."""
    fault = make_fault(tmp_path / "fault", 1, LEFT_OUT_COLLECTIVE)
    served = start("--no-gateway", "--no-restart", "--watchdog-timeout=2", env=fault.env)
    traces = served.traces()
    with ClientEngine(attach=served.run_dir) as engine:
        _, queue = engine.start_request([1, 2, 3], ENDLESS)
        assert queue.get(timeout=30) is not None
        fault.fire()
        wait_until(lambda: fault.has_happened, 5.0)
        happened = time.monotonic()
        with pytest.raises(Unavailable, match="stuck"):
            list(queue)
        assert time.monotonic() - happened < 2.0 + 3.0
    assert served.wait_exit(10.0) == 1
    traces.assert_gone(within=1.0)
    for rank in (0, 1):
        assert f"stacks of rank {rank}" in served.log
    assert served.log.count("Current thread") + served.log.count("most recent call first") >= 2
    assert "engine/steps/runner.py" in served.log
    assert "stuck" in served.log.splitlines()[-1]
