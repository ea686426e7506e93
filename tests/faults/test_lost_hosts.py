"""A host that is switched off: what ran there goes on at another replica, and nobody else notices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.network_hosts import Host, network_hosts
from support.timed_streams import body, longest_gap, tokens, words
from support.waiting import wait_until

pytestmark = pytest.mark.timeout(180)

PROGRAM = [sys.executable, "-m", "allspan.launch.cli"]
NUM_TOKENS = 6000
"""As many as still come when the host is switched off, on a fast machine, too."""


class Served:
    """An allspan program on one of the hosts; it is killed at the end."""

    def __init__(self, stack: ExitStack, host: Host, log: Path, *flags: str) -> None:
        self._log = log
        env = {**os.environ, "PYTHONPATH": os.path.abspath(os.environ.get("PYTHONPATH", "")), "XDG_RUNTIME_DIR": ""}
        with log.open("w") as out:
            self.process = host.popen([*PROGRAM, *flags], stdout=out, stderr=out, env=env)
        stack.callback(self._end)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def _end(self) -> None:
        print(self.log)  # shown when the test fails
        self.process.kill()
        self.process.wait(10)

    def wait_ready(self, said: str) -> None:
        wait_until(lambda: said in self.log or self.process.poll() is not None, 60, said)
        assert self.process.poll() is None, self.log


def rank_certificates(folder: Path) -> list[str]:
    return [
        f"--rank-ssl-{name}={folder / 'certs' / file}"
        for name, file in (("ca-certs", "ca.pem"), ("certfile", "server.pem"), ("keyfile", "server.key"))
    ]


def start_streams(host: Host, url: str, bodies: Sequence[dict[str, object]]) -> subprocess.Popen[str]:
    return host.popen(words(url, list(bodies)), stdout=subprocess.PIPE, text=True)


def test_streams_of_a_host_that_is_off_go_on_at_another_replica_within_two_seconds(model: Path, tmp_path: Path) -> None:
    """One `allspan serve` a host and a gateway in front; its connections to the lost host never end."""
    with network_hosts(2) as hosts, ExitStack() as stack:
        first, second = hosts
        first.run([*PROGRAM, "certs", str(tmp_path / "certs"), "--hosts", f"{first.address},{second.address}"])
        certs = rank_certificates(tmp_path)
        replicas = [
            Served(
                stack,
                host,
                tmp_path / f"{host.name}.log",
                *("serve", str(model), "--no-gateway", "--ranks=1", "--served-model-name=tiny", "--threads=1"),
                *(f"--rank-host={host.address}", "--rank-port=41000", "--kv-cache-bytes=100000000", *certs),
            )
            for host in hosts
        ]
        for replica in replicas:
            replica.wait_ready("ALLSPAN READY")
        attach = [f"--attach={host.address}:41000," for host in hosts]
        gateway = Served(
            stack, first, tmp_path / "gateway.log", "gateway", *attach, f"--tokenizer={model}", "--port=0",
            "--grpc-port=0", *certs,
        )  # fmt: skip
        gateway.wait_ready("Server is ready")
        url = gateway.log.partition("HTTP ")[2].split()[0].rstrip(",") + "/completions"

        kinds = ({"temperature": 0}, {"temperature": 1, "seed": 7})
        bodies = [body(NUM_TOKENS, **kinds[i % 2], cache_salt=f"{i}") for i in range(6)]
        reading = start_streams(first, url, bodies)
        time.sleep(1.2)
        off = time.monotonic()
        second.power_off()
        out, _ = reading.communicate(timeout=90)
        streams = [json.loads(line) for line in out.splitlines()]
        assert all(isinstance(stream, list) for stream in streams), streams
        gaps = [longest_gap(stream, off) for stream in streams]
        assert any(gap > 1.4 for gap in gaps), f"no stream ran on the lost host: {gaps}"
        assert any(gap < 0.7 for gap in gaps), f"no stream ran on the other host: {gaps}"
        assert max(gaps) < 2.0, gaps
        again = [json.loads(line) for line in first.run(words(url, bodies[:2]), timeout=60).stdout.splitlines()]
        for i, stream in enumerate(streams):
            assert len(tokens(stream)) == NUM_TOKENS
            assert tokens(stream) == tokens(again[i % 2])


def test_a_host_that_is_off_leaves_a_world_on_the_hosts_left_and_its_streams_go_on(model: Path, tmp_path: Path) -> None:
    with network_hosts(2) as hosts, ExitStack() as stack:
        first, second = hosts
        served = Served(
            stack,
            first,
            tmp_path / "serve.log",
            *("serve", str(model), f"--hosts={first.name},{second.name}", f"--mpi-network={hosts.network}"),
            *(f"--remote-shell={hosts.remote_shell}", "--threads=1", "--oversubscribe", "--served-model-name=tiny"),
            *("--port=0", "--grpc-port=0", "--kv-cache-bytes=100000000"),
        )
        served.wait_ready("Server is ready")
        url = served.log.partition("HTTP ")[2].split()[0].rstrip(",") + "/completions"
        reading = start_streams(first, url, [body(NUM_TOKENS, temperature=0)])
        time.sleep(1.0)
        off = time.monotonic()
        second.power_off()
        wait_until(lambda: "is ready again (epoch 2)" in served.log, 30, "a world on the hosts left")
        took = time.monotonic() - off
        (stream,) = [json.loads(line) for line in reading.communicate(timeout=60)[0].splitlines()]
        assert longest_gap(stream, off) > 0.5, "the stream had ended before"
        assert len(tokens(stream)) == NUM_TOKENS
        assert f"the ranks start on the hosts left, {first.name}:1: host {second.name} cannot be used" in served.log
        folder = served.log.partition("run directory ")[2].split()[0]
        info = json.loads(first.run(["cat", f"{folder}/cluster.json"]).stdout)
        assert [rank["host"] for rank in info["ranks"]] == [first.name]
        (again,) = first.run(words(url, [body(NUM_TOKENS, temperature=0)]), timeout=60).stdout.splitlines()
        assert tokens(stream) == tokens(json.loads(again))
        assert took < 15.0  # 5 s and the load
