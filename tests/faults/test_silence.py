"""A rank that is stopped (SIGSTOP): waited for, and told of, below the watchdog's time; beyond it, a new world."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from allspan import ClientEngine, SamplingParams
from support.faults import SLOW_STEPS, make_fault
from support.serving import Served
from support.waiting import wait_until

Start = Callable[..., Served]

pytestmark = pytest.mark.timeout(180)

LONG = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)


def test_a_stopped_rank_is_waited_for_and_then_given_up_and_no_token_is_lost(start: Start, tmp_path: Path) -> None:
    env = make_fault(tmp_path / "slow", 0, SLOW_STEPS).env
    served = start("--no-gateway", "--watchdog-timeout=5", env=env)
    with ClientEngine(attach=served.run_dir) as engine:
        expected = engine.generate([[1, 2, 3]], LONG)[0].token_ids

        rank, pid = 1, served.rank_pid(1)
        _, queue = engine.start_request([1, 2, 3], LONG)
        tokens = [*next(iter(queue)).token_ids]
        os.kill(pid, signal.SIGSTOP)
        stopped = time.monotonic()
        wait_until(lambda: not engine.is_ready, 2.0, "a facade that is not ready")
        wait_until(lambda: f"rank {rank} has been silent for " in served.log, 4.0, "a line about the silence")
        assert "(alive, state T)" in served.log
        os.kill(pid, signal.SIGCONT)
        tokens += [token for output in queue for token in output.token_ids]
        assert tokens == list(expected)
        assert time.monotonic() - stopped > 2.0
        assert (served.cluster()["epoch"], served.cluster()["state"]) == (1, "ready")

        _, queue = engine.start_request([1, 2, 3], LONG)
        tokens = [*next(iter(queue)).token_ids]
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: served.cluster()["epoch"] == 2, 5.0 + 5.0, "the next world")
        tokens += [token for output in queue for token in output.token_ids]
        assert tokens == list(expected)
    assert "was silent for 5" in served.log
    for rank in (0, 1):
        assert f"stacks of rank {rank} (pid " in served.log
    assert "most recent call first" in served.log
    assert served.ask_to_end() == 0
