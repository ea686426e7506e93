"""The router SMG as a process in front of a worker."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.waiting import wait_until

READY_S = 60.0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def smg(worker: str, log: Path) -> Iterator[str]:
    """Yields the router's base URL once it has the worker's model. `worker`: a gRPC target."""
    program = shutil.which("smg", path=Path(sys.executable).parent)
    if program is None:
        pytest.skip("smg, which the extra dev has, is not installed")
    port, metrics = free_port(), free_port()
    words = [program, "launch", "--host=127.0.0.1", f"--port={port}", f"--worker-urls=grpc://{worker}"]
    words += [f"--prometheus-port={metrics}", "--prometheus-host=127.0.0.1", "--policy=cache_aware"]
    words += ["--health-check-interval-secs=1", "--health-failure-threshold=1", "--health-success-threshold=1"]
    with log.open("wb") as file:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: _has_model(url), READY_S, f"a router with a model ({log})")
        yield url
    finally:
        process.kill()
        process.wait(10)


def _has_model(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:
            return b'"id"' in answer.read()
    except (OSError, urllib.error.URLError):
        return False
