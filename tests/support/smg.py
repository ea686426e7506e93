"""The router SMG as a process in front of a worker."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from support.waiting import wait_until

READY_S = 60.0


def free_port(behind: int = 0) -> int:
    """A port that nobody listens at, nor at so many behind it."""
    for _ in range(100):
        with ExitStack() as held, suppress(OSError):
            first = 0
            for number in range(1 + behind):
                sock = held.enter_context(socket.socket())
                sock.bind(("127.0.0.1", first + number))
                first = first or int(sock.getsockname()[1])
            return first
    raise AssertionError(f"no {1 + behind} free ports in a row")


@contextmanager
def smg(worker: str, log: Path, metrics: int = 0) -> Iterator[str]:
    """Yields the router's base URL once it answers for the worker's model, whose tokenizer it fetches after it has
    listed it. `worker`: a gRPC target; `metrics`: the port of its own metrics."""
    program = shutil.which("smg", path=Path(sys.executable).parent)
    if program is None:
        pytest.skip("smg, which the extra dev has, is not installed")
    port, metrics = free_port(), metrics or free_port()
    words = [program, "launch", "--host=127.0.0.1", f"--port={port}", f"--worker-urls=grpc://{worker}"]
    words += [f"--prometheus-port={metrics}", "--prometheus-host=127.0.0.1", "--policy=cache_aware"]
    words += ["--health-check-interval-secs=1", "--health-failure-threshold=1", "--health-success-threshold=1"]
    with log.open("wb") as file:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: _answers(url), READY_S, f"a router that answers ({log})")
        yield url
    finally:
        process.kill()
        process.wait(10)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:
            models = json.load(answer)["data"]
        messages = [{"role": "user", "content": "ready?"}]
        body = json.dumps({"model": models[0]["id"], "messages": messages, "max_tokens": 1}).encode()
        request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            return bool(answer.status == 200)
    except (OSError, LookupError, ValueError):
        return False
