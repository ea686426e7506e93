"""Fixtures of tests of the CUDA kernels: each runs emulated on the CPU, and on a GPU where there is one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from allspan.kernels.cuda.jit import modules
from support.emulator.backend import add_device
from support.emulator.driver import EmulatorDriver

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
"""Streams that wait for each other (ranks of one GPU) must not share a queue."""


@pytest.fixture(scope="session")
def emulator() -> EmulatorDriver:
    return EmulatorDriver()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """What is computed beside a kernel is small; threads that wait for more of it take the processors away."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where tensors go."""
    if request.param == "cuda":
        return "cuda"
    emulator: EmulatorDriver = request.getfixturevalue("emulator")
    monkeypatch.setattr(modules, "driver", lambda: emulator)
    return "cpu"


@pytest.fixture
def on(device: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings of an engine on the CUDA kernels; emulated, its tensors lie on the CPU as they would on a GPU."""
    if device == "cuda":
        return {"device": "cuda"}
    return dict(add_device(monkeypatch))


@pytest.fixture
def small(device: str) -> dict[str, int]:
    """Options of `sampling_workspace`: where kernels are emulated, blocks so small that small vocabularies have several
    parts and more tokens than fit."""
    return {} if device == "cuda" else {"threads": 64, "capacity": 288}
