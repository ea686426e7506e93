"""`kill -9` of every kind of process, with requests open: who is told what, how soon, and what is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from allspan import ClientEngine, SamplingParams
from allspan.protos import inference_pb2, inference_pb2_grpc
from allspan.protos.api.errors import Unavailable
from support.fault_facade import Facade
from support.serving import Served, Traces, is_alive, memory_folders
from support.waiting import wait_until

Start = Callable[..., Served]

pytestmark = pytest.mark.timeout(180)

ENDLESS = SamplingParams(max_tokens=60000, temperature=0.0, ignore_eos=True)
TOLD_WITHIN_S = 3.0


def fails_with(read: Callable[[], object], since: float) -> str:
    """The message of the Unavailable that a read ends with; it must come within three seconds of `since`."""
    with pytest.raises(Unavailable) as caught:
        list(iter(read, None))
    assert time.monotonic() - since < TOLD_WITHIN_S
    return caught.value.message


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_a_killed_rank_is_named_to_every_request_and_nothing_is_left(start: Start, rank: int) -> None:
    served = start("--no-gateway", "--no-restart")
    traces = served.traces()
    with ClientEngine(attach=served.run_dir) as engine:
        queues = [engine.start_request([1, 2, 3 + i], ENDLESS)[1] for i in range(3)]
        for queue in queues:
            assert queue.get(timeout=30) is not None
        victim = served.rank_pid(rank)
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        messages = [fails_with(lambda queue=queue: queue.get(timeout=10), killed) for queue in queues]  # type: ignore[misc]
    for message in messages:
        assert f"rank {rank} (pid {victim}" in message
        assert "signal 9" in message
    traces.assert_gone(within=10.0 - (time.monotonic() - killed))
    assert served.wait_exit(5.0) == 1
    assert f"rank {rank} (pid {victim}" in "".join(served.lines)


def test_a_killed_mpirun_is_told_and_leaves_nothing(start: Start) -> None:
    served = start("--no-gateway", "--no-restart")
    traces = served.traces()
    with ClientEngine(attach=served.run_dir) as engine:
        _, queue = engine.start_request([1, 2, 3], ENDLESS)
        assert queue.get(timeout=30) is not None
        os.kill(served.mpirun_pid(), signal.SIGKILL)
        message = fails_with(lambda: queue.get(timeout=10), time.monotonic())
    assert "mpirun" in message or "rank" in message
    traces.assert_gone()
    assert served.wait_exit(5.0) == 1


@pytest.mark.parametrize("flags", [(), pytest.param(("--no-gateway",), marks=pytest.mark.nightly)])
def test_a_killed_supervisor_leaves_nothing(start: Start, flags: tuple[str, ...]) -> None:
    served = start(*flags)
    traces = served.traces()
    os.kill(served.process.pid, signal.SIGKILL)
    traces.assert_gone()


def test_a_killed_program_takes_the_cluster_it_started_with_it(model: Path, runtime: Path) -> None:
    code = (
        "import sys, time\nfrom allspan import ClientEngine\n"
        f"engine = ClientEngine({str(model)!r}, ranks=2, oversubscribe=True, kv_cache_bytes=10**8)\n"
        "print('up', flush=True)\ntime.sleep(100)\n"
    )
    env = os.environ | {"XDG_RUNTIME_DIR": str(runtime)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "up\n"
        (run_dir,) = [path for path in (runtime / "allspan").iterdir() if path.is_dir()]
        info = json.loads((run_dir / "cluster.json").read_text())
        traces = Traces(runtime, [info["supervisor_pid"], *(r["pid"] for r in info["ranks"])], memory_folders(runtime))
        program.kill()
    traces.assert_gone()


def test_a_killed_facade_s_requests_are_cancelled_and_their_pages_freed(start: Start) -> None:
    served = start("--no-gateway")
    facade = Facade(served.run_dir)
    facade.start(60000)
    with ClientEngine(attach=served.run_dir) as engine:
        wait_until(lambda: facade.tokens, 30.0, "tokens")
        assert engine.statistics().pages_used > 0
        facade.close()  # kills it

        def is_idle() -> bool:
            found = engine.statistics()
            return (found.running, found.waiting, found.pages_used) == (0, 0, 0)

        wait_until(is_idle, 2.0, "an engine that has let its request go")
        assert len(engine.generate([[1, 2]], ENDLESS.with_(max_tokens=4))[0].token_ids) == 4


def completion(served: Served, **fields: Any) -> Any:
    body = json.dumps({"prompt": "ab", "max_tokens": 3, "temperature": 0} | fields).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{served.http}/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def is_ready(served: Served) -> bool:
    try:
        with urllib.request.urlopen(f"{served.http}/ready", timeout=5):
            return True
    except urllib.error.HTTPError as error:
        return error.code != 503


def test_without_resuming_a_killed_rank_is_told_at_once_and_the_next_world_serves(start: Start) -> None:
    """To the gateway's requests, and to those of a facade of its own."""
    served = start("--no-resume")
    first = completion(served)["choices"][0]["text"]
    victim = served.rank_pid(1)
    with (
        grpc.insecure_channel(served.grpc) as channel,
        ClientEngine(attach=served.run_dir, resume=False) as engine,
    ):
        options = inference_pb2.SamplingOptions(max_tokens=60000, temperature=0.0, ignore_eos=True)
        stream = inference_pb2_grpc.InferenceStub(channel).Generate(  # type: ignore[no-untyped-call]
            inference_pb2.GenerateRequest(text="abc", sampling=options), timeout=60
        )
        next(stream)
        _, queue = engine.start_request([1, 2, 3], ENDLESS)
        assert queue.get(timeout=30) is not None
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        wait_until(lambda: not is_ready(served), 2.0, "a gateway that is not ready")
        with pytest.raises(grpc.RpcError) as caught:
            list(stream)
        assert time.monotonic() - killed < TOLD_WITHIN_S
        assert f"rank 1 (pid {victim}" in fails_with(lambda: queue.get(timeout=10), killed)
        wait_until(lambda: engine.is_ready, 60.0, "the next world for the facade")
        assert engine.cluster.epoch == 2
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert f"rank 1 (pid {victim}" in caught.value.details()
    wait_until(lambda: is_ready(served), 60.0, "the next world for the gateway")
    assert completion(served)["choices"][0]["text"] == first
    assert served.ask_to_end() == 0


@pytest.mark.nightly
def test_a_rank_that_dies_before_the_gateway_is_there_is_followed_by_the_next_world(start: Start) -> None:
    served = start(wait=False)
    wait_until(lambda: next(served.runtime.glob("allspan/*/cluster.json"), None), 30.0)
    wait_until(lambda: served.cluster()["state"] == "ready", 90.0)
    os.kill(served.rank_pid(1), signal.SIGKILL)
    served.wait_ready()
    assert served.cluster()["epoch"] == 2
    assert completion(served)["choices"][0]["text"]
    assert served.ask_to_end() == 0


@pytest.mark.nightly
def test_without_restart_the_server_ends_with_the_cause(start: Start) -> None:
    served = start("--no-restart")
    traces, victim = served.traces(), served.rank_pid(0)
    os.kill(victim, signal.SIGKILL)
    assert served.wait_exit(10.0) == 1
    assert f"rank 0 (pid {victim}" in served.log.splitlines()[-1]
    traces.assert_gone()


@pytest.mark.nightly
def test_a_world_that_dies_again_and_again_is_given_up(start: Start) -> None:
    served = start("--no-gateway", "--max-failures=2")
    traces = served.traces()
    victims = []
    for epoch in (1, 2):
        wait_until(lambda: served.cluster()["epoch"] == epoch and served.cluster()["state"] == "ready", 60.0)  # noqa: B023
        victims.append(served.rank_pid(0))
        os.kill(victims[-1], signal.SIGKILL)
        wait_until(lambda: not is_alive(victims[-1]), 5.0)
    assert served.wait_exit(10.0) == 1
    assert "2 failures" in served.lines[-1]
    assert f"rank 0 (pid {victims[0]}" in served.lines[-1]
    traces.assert_gone()
