"""Ctrl-C and SIGTERM: in order within ten seconds, at once the second time, and clean at any moment."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from allspan import ClientEngine, SamplingParams
from allspan.protos import inference_pb2, inference_pb2_grpc
from allspan.protos.api.errors import AllspanError, Unavailable
from support.faults import SLOW_STEPS, make_fault
from support.serving import Served
from support.waiting import wait_until

Start = Callable[..., Served]

pytestmark = pytest.mark.timeout(180)

ENDLESS = SamplingParams(max_tokens=60000, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize(
    ("number", "flags"),
    [(signal.SIGINT, ()), pytest.param(signal.SIGTERM, ("--no-gateway",), marks=pytest.mark.nightly)],
)
def test_one_signal_ends_it_in_order(start: Start, number: signal.Signals, flags: tuple[str, ...]) -> None:
    served = start(*flags)
    traces = served.traces()
    served.process.send_signal(signal.SIGHUP)  # as a terminal does that is closed
    if not flags:
        wait_until(lambda: "have been read again" in served.log, 5.0, "a line about the keys")
    assert served.ask_to_end(number) == 0
    traces.assert_gone(within=1.0)


def test_open_requests_end_with_an_error_and_do_not_hold_it_up(start: Start) -> None:
    served = start("--no-gateway", "--shutdown-timeout=1")
    traces = served.traces()
    with ClientEngine(attach=served.run_dir) as engine:
        _, queue = engine.start_request([1, 2, 3], ENDLESS)
        assert queue.get(timeout=30) is not None
        assert served.ask_to_end() == 0
        with pytest.raises(AllspanError):
            list(queue)
    traces.assert_gone(within=1.0)


def test_running_requests_finish_while_new_ones_are_refused(start: Start, tmp_path: Path) -> None:
    """Over HTTP and through a facade of its own; then the server ends by itself, long before its limit."""
    env = make_fault(tmp_path / "slow", 0, SLOW_STEPS).env
    served = start("--shutdown-timeout=60", env=env)
    traces = served.traces()
    long = ENDLESS.with_(max_tokens=400)
    with ClientEngine(attach=served.run_dir) as engine, ThreadPoolExecutor() as pool:
        over_http = pool.submit(complete, served, max_tokens=400, ignore_eos=True)
        _, queue = engine.start_request([1, 2, 3], long)
        first = queue.get(timeout=30)
        assert first is not None
        wait_until(lambda: engine.statistics().running == 2, 10.0, "both requests running")
        served.process.send_signal(signal.SIGTERM)
        wait_until(lambda: status_of(served, "/ready") == 503, 2.0, "a gateway that is not ready")
        with pytest.raises(urllib.error.HTTPError) as refused:
            complete(served, max_tokens=1)
        with refused.value as answer:
            assert answer.code == 503
        rest = [token for output in queue for token in output.token_ids]
        assert len(first.token_ids) + len(rest) == 400
        assert over_http.result(60)["usage"]["completion_tokens"] == 400
    assert served.wait_exit(10.0) == 0
    assert "still run" in served.log
    traces.assert_gone(within=1.0)


@pytest.mark.nightly
def test_a_rank_killed_while_requests_finish_ends_none_of_them(start: Start, tmp_path: Path) -> None:
    env = make_fault(tmp_path / "slow", 0, SLOW_STEPS).env
    served = start("--shutdown-timeout=60", env=env)
    traces = served.traces()
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(complete, served, max_tokens=600, ignore_eos=True) for _ in range(3)]
        time.sleep(1.0)
        served.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "still run" in served.log, 5.0, "a line about what still runs")
        os.kill(served.rank_pid(1), signal.SIGKILL)
        assert [answer.result(60)["usage"]["completion_tokens"] for answer in answers] == 3 * [600]
    assert served.wait_exit(10.0) == 0
    assert "is ready again" in served.log
    traces.assert_gone(within=1.0)


@pytest.mark.nightly
def test_a_working_directory_that_is_gone_is_not_needed(start: Start, tmp_path: Path) -> None:
    leave = 'mkdir -p "$0" && cd "$0" && rmdir "$0" && exec "$@"'
    path = os.pathsep.join(os.path.abspath(part) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part)
    served = start(wrap=("sh", "-c", leave, str(tmp_path / "gone")), env={"PYTHONPATH": path})
    assert complete(served, max_tokens=4)["usage"]["completion_tokens"] == 4
    traces = served.traces()
    assert served.ask_to_end() == 0
    traces.assert_gone(within=1.0)


def complete(served: Served, **fields: Any) -> Any:
    body = json.dumps({"prompt": "ab", "temperature": 0} | fields).encode()
    request = urllib.request.Request(f"{served.http}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def status_of(served: Served, path: str) -> int:
    try:
        with urllib.request.urlopen(f"{served.http}{path}", timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_a_second_signal_ends_it_at_once(start: Start) -> None:
    """The first one drains, which a running request would keep up for a minute."""
    served = start("--no-gateway", "--shutdown-timeout=60")
    traces = served.traces()
    with ClientEngine(attach=served.run_dir) as engine:
        _, queue = engine.start_request([1, 2, 3], ENDLESS)
        assert queue.get(timeout=30) is not None
        served.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "still run" in served.log, 5.0, "a line about what still runs")
        started = time.monotonic()
        served.process.send_signal(signal.SIGTERM)
        assert served.wait_exit(4.0) == 128 + signal.SIGTERM
        assert time.monotonic() - started < 4.0
        traces.assert_gone(within=1.0)
        with pytest.raises(Unavailable):
            list(queue)
        assert time.monotonic() - started < 7.0


@pytest.mark.nightly
def test_ranks_that_do_not_answer_are_killed_in_time(start: Start) -> None:
    served = start("--no-gateway", "--shutdown-timeout=1")
    traces = served.traces()
    for rank in (0, 1):
        os.kill(served.rank_pid(rank), signal.SIGSTOP)
    assert served.ask_to_end() == 0
    traces.assert_gone(within=1.0)


def test_a_gateway_whose_requests_get_no_answer_is_ended_in_time(start: Start) -> None:
    """The gateway's own time for open requests is over before the ranks are even asked."""
    served = start("--shutdown-timeout=1")
    traces = served.traces()
    with grpc.insecure_channel(served.grpc) as channel:
        request = inference_pb2.GenerateRequest(
            text="abc", sampling=inference_pb2.SamplingOptions(max_tokens=60000, ignore_eos=True)
        )
        stream = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60)  # type: ignore[no-untyped-call]
        next(stream)
        for rank in (0, 1):
            os.kill(served.rank_pid(rank), signal.SIGSTOP)
        served.ask_to_end()
    traces.assert_gone(within=1.0)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.nightly), signal.SIGTERM])
def test_a_signal_while_loading_leaves_nothing(start: Start, number: signal.Signals) -> None:
    served = start(wait=False)
    wait_until(lambda: "loading the model" in served.log, 30.0)
    traces = served.traces()
    assert served.ask_to_end(number) == 0
    traces.assert_gone(within=1.0)


@pytest.mark.nightly
def test_two_clusters_on_a_host_do_not_meet(start: Start, runtime: Path) -> None:
    first, second = start("--no-gateway", wait=False), start("--no-gateway", f"--run-dir={runtime}/own", wait=False)
    first.wait_ready()
    second.wait_ready()
    with ClientEngine(attach=first.run_dir) as one, ClientEngine(attach=runtime / "own") as two:
        params = SamplingParams(max_tokens=4, temperature=0.0)
        assert one.generate([[5, 6, 7]], params)[0].token_ids == two.generate([[5, 6, 7]], params)[0].token_ids
        assert second.ask_to_end() == 0
        assert len(one.generate([[5, 6, 7]], params)[0].token_ids) == 4
    assert first.ask_to_end() == 0
