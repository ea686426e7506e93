"""Memory that is not there: refused with numbers at the start; named as the cause when the kernel kills a rank."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from allspan import ClientEngine, SamplingParams
from allspan.protos.api.errors import Unavailable
from support.fault_hosts import memory_group
from support.faults import make_fault
from support.serving import Served, Traces

Start = Callable[..., Served]

pytestmark = pytest.mark.timeout(180)

MIB = 1 << 20
ENDLESS = SamplingParams(max_tokens=60000, temperature=0.0, ignore_eos=True)

HUNGRY_FORWARD = """
from allspan.worker.models.model import Model

forward = Model.forward

def hungry(self, *arguments):
    if due():
        bytearray(b"x") * (800 << 20)
    return forward(self, *arguments)

Model.forward = hungry
"""


def test_more_memory_than_the_group_has_is_refused_with_numbers(start: Start) -> None:
    with memory_group() as group:
        group.set_limit(2048 * MIB)
        served = start(f"--kv-cache-bytes={3000 * MIB}", wait=False, wrap=group.wrap)
        traces = Traces(served.runtime, [served.process.pid], [])
        assert served.wait_exit(60.0) == 2
        traces.assert_gone(within=1.0)
    line = served.log.splitlines()[-1]
    assert f"kv_cache_bytes is {3000 * MIB}" in line
    available = re.search(r"which has (\d\.\d+) GiB available", line)
    assert available, line
    assert 0.5 < float(available[1]) < 2.0


def test_a_rank_that_the_kernel_kills_for_its_memory_is_told_as_that(start: Start, tmp_path: Path) -> None:
    fault = make_fault(tmp_path / "fault", 1, HUNGRY_FORWARD)
    with memory_group() as group:
        served = start("--no-gateway", "--no-restart", env=fault.env, wrap=group.wrap)
        traces, victim = served.traces(), served.rank_pid(1)
        with ClientEngine(attach=served.run_dir) as engine:
            _, queue = engine.start_request([1, 2, 3], ENDLESS)
            assert queue.get(timeout=30) is not None
            limit = group.usage_bytes // MIB + 100
            group.set_limit(limit * MIB)
            fault.fire()
            fired = time.monotonic()
            with pytest.raises(Unavailable) as caught:
                list(queue)
            assert time.monotonic() - fired < 5.0  # the memory has to be filled first
        assert served.wait_exit(10.0) == 1
        traces.assert_gone(within=1.0)
    words = rf"rank 1 \(pid {victim} on \S+\) was killed by SIGKILL, likely out of memory \(cgroup \d+/{limit} MiB\)"
    assert re.search(words, caught.value.message), caught.value.message
    assert re.search(words, served.lines[-1]), served.lines[-1]
