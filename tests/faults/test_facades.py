"""Several facades on one cluster: a rolling restart under load fails no request, and a facade's death breaks its own
streams only."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from pathlib import Path

import pytest

from allspan import ClientEngine, SamplingParams
from allspan.launch.gateway import sources
from allspan.protos.api.errors import ConfigError
from support.faults import SLOW_STEPS, make_fault
from support.serving import Served, run_allspan
from support.waiting import wait_until

Start = Callable[..., Served]

pytestmark = pytest.mark.timeout(240)

STREAMS = 32
PARAMS = SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True)


@contextmanager
def gateway(served: Served) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A gateway of its own process on the cluster, and its HTTP address."""
    words = [sys.executable, "-m", "allspan.launch.cli", "gateway", f"--attach={served.run_dir}"]
    process = subprocess.Popen([*words, "--port=0", "--grpc-port=0"], stderr=subprocess.PIPE, text=True)
    log: list[str] = []
    reader = threading.Thread(target=lambda: log.extend(process.stderr or ()), daemon=True)
    reader.start()
    try:
        wait_until(lambda: "Server is ready" in "".join(log) or process.poll() is not None, 60.0, "a gateway")
        found = re.search(r"HTTP (http://\S+)/v1", "".join(log))
        assert found, "".join(log)
        yield process, found[1]
    finally:
        process.kill()
        process.wait(10)
        reader.join(5)
        if process.stderr is not None:
            process.stderr.close()


class Load:
    """STREAMS threads that ask for one completion after another until `end`; `failures` and the number of answers."""

    def __init__(self, ask: Callable[[int], object], expected: list[object]) -> None:
        self.failures: list[object] = []
        self.answers = 0
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(ask, expected, i)) for i in range(STREAMS)]
        for thread in self._threads:
            thread.start()

    def _run(self, ask: Callable[[int], object], expected: list[object], index: int) -> None:
        while not self._ended.is_set():
            try:
                answer = ask(index)
            except Exception as error:  # every failure counts, whatever its class
                self.failures.append(error)
                return
            if answer != expected[index]:
                self.failures.append(answer)
            self.answers += 1

    def end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(60)


def post(http: str, body: dict[str, object]) -> urllib.request.Request:
    return urllib.request.Request(
        f"{http}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )


def rest(stream: HTTPResponse) -> str:
    """What still comes of an answer whose sender was killed."""
    try:
        return stream.read().decode()
    except (HTTPException, OSError):
        return ""


def epochs(served: Served) -> list[int]:
    folders = sorted(served.run_dir.glob("replica-*"))
    return [json.loads((folder / "cluster.json").read_text())["epoch"] for folder in folders]


def test_a_rolling_restart_fails_no_request_and_a_facades_death_only_its_own(start: Start, tmp_path: Path) -> None:
    env = make_fault(tmp_path / "slow", 0, SLOW_STEPS).env
    served = start("--no-gateway", "--ranks=1", "--data-parallel-size=3", "--max-num-seqs=32", env=env)
    prompts = [list(f"stream {number}".encode()) for number in range(STREAMS)]
    with ClientEngine(attach=served.run_dir) as engine, gateway(served) as (process, http):
        expected: list[object] = [done.token_ids for done in engine.generate(prompts, [PARAMS] * STREAMS)]
        load = Load(lambda index: engine.generate([prompts[index]], PARAMS)[0].token_ids, expected)
        body: dict[str, object] = {"prompt": "abc", "max_tokens": 150, "temperature": 0, "ignore_eos": True}
        try:
            with urllib.request.urlopen(post(http, body), timeout=60) as answer:
                text = json.loads(answer.read())["choices"][0]["text"]
            done = run_allspan("restart", str(served.run_dir), XDG_RUNTIME_DIR=str(served.runtime))
            assert done.returncode == 0, done.stderr + served.log
            assert epochs(served) == [2, 2, 2]
            with urllib.request.urlopen(post(http, body), timeout=60) as answer:
                assert json.loads(answer.read())["choices"][0]["text"] == text  # it has found the new ranks
            with urllib.request.urlopen(post(http, body | {"stream": True, "max_tokens": 5000}), timeout=60) as stream:
                stream.readline()
                os.kill(process.pid, signal.SIGKILL)
                assert "[DONE]" not in rest(stream)
            answered = load.answers
            wait_until(lambda: load.answers > answered + STREAMS, 60.0, "answers after the gateway's death")
        finally:
            load.end()
        assert not load.failures
    assert served.ask_to_end() == 0


def test_a_gateway_refuses_a_cluster_that_is_not_there(tmp_path: Path) -> None:
    done = run_allspan("gateway", f"--attach={tmp_path / 'none'}", "--port=0", "--grpc-port=0")
    assert done.returncode == 2
    assert "no cluster to attach to" in done.stderr


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "--attach is missing"),
        ([""], "--attach is empty"),
        ([","], "--attach is empty"),
        (["a:1", "/run/allspan/x"], "'/run/allspan/x' among several"),
    ],
)
def test_what_is_no_cluster_is_refused_before_anything_is_asked(given: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sources(given)


def test_addresses_are_grouped_by_replica() -> None:
    assert sources(["a:1, a:2", "b:1,b:2"]) == [["a:1", "a:2"], ["b:1", "b:2"]]
    assert sources(["a:1"]) == "a:1"
