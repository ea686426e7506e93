"""The images' steps, executed in namespaces in place of a container daemon, and the containers that come of them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from support.default_model import NAME, default_model
from support.dockerfile import words
from support.image import PYTHON, Builder, Stage, container, python_base
from support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
SERVICE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["allspan"]
KEY = "a-key-of-this-test"
CALL = """
import json, sys, urllib.request
body = {"model": sys.argv[2], "prompt": "The capital of France is", "max_tokens": int(sys.argv[3]), "temperature": 0}
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + sys.argv[1]}
body["ignore_eos"] = True
call = urllib.request.Request("http://127.0.0.1:8000/v1/completions", json.dumps(body).encode(), headers)
print("sent", flush=True)
print(urllib.request.urlopen(call, timeout=100).read().decode())
"""
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("image-base")
    yield python_base(folder)
    shutil.rmtree(folder)


def build(base: Path, folder: Path, name: str, **arguments: str) -> Stage:
    """With this machine's package index, and the torch that the tests run with."""
    torch = f"torch=={importlib.metadata.version('torch')}"
    given = {"PYTHON": PYTHON, "TORCH_INDEX": ""} | arguments
    return Builder(ROOT, folder, base, given, torch).build(DEPLOY / "docker" / f"Dockerfile.{name}")


def fill_volume(stage: Stage) -> None:
    """A new volume begins as the image's folder, with its owner; the model is one that was pulled before."""
    kept = stage.folder / "volume"
    shutil.copytree(stage.folder / "upper/models", kept)
    file = default_model()
    (kept / "models").mkdir()
    shutil.copy(file, kept / "models")
    for path in (kept, *kept.rglob("*")):
        os.chown(path, 10001, 10001)


def test_the_cpu_image_is_built_serves_as_nobody_and_drains(base: Path, tmp_path: Path) -> None:
    stage = build(base, tmp_path, "cpu")
    assert not (stage.folder / "upper/src").exists(), "the build's files stay out of the image"
    fill_volume(stage)
    check = words(stage.settings["HEALTHCHECK"])
    log = tmp_path / "log"
    with container(stage, log, SERVICE["command"], ALLSPAN_API_KEY=KEY) as running:

        def healthy() -> bool:
            assert running.process.poll() is None, log.read_text()
            return running.exec(check).returncode == 0

        wait_until(healthy, timeout=180, what=f"the health check: {log}")
        who = running.exec(
            ["sh", "-c", "id -u; grep CapBnd /proc/1/status; touch /etc/x 2>&1; cat /proc/1/comm"]
        ).stdout
        assert who.splitlines()[0] == "10001"
        assert "0000000000000000" in who
        assert "Read-only" in who
        assert who.splitlines()[-1] == "tini"
        answer = running.exec(["python", "-c", CALL, KEY, NAME, "8"], timeout=120)
        assert answer.returncode == 0, answer.stderr + log.read_text()
        assert "Paris" in json.loads(answer.stdout.splitlines()[-1])["choices"][0]["text"]
        began = time.monotonic()
        running.signal()
        assert running.process.wait(timeout=int(SERVICE["stop_grace_period"].removesuffix("s"))) == 0, log.read_text()
        assert time.monotonic() - began < 30, "nothing was running"
