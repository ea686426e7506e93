"""CUDA kernels: every test here runs with the kernels emulated on the CPU, and on a GPU where there is one."""

from __future__ import annotations

import pytest

from allspan.kernels.cuda import modules
from support.emulator.driver import EmulatorDriver


@pytest.fixture(scope="session")
def emulator(request: pytest.FixtureRequest) -> EmulatorDriver:
    """What it compiled stays with pytest's cache, for the next session."""
    cache: pytest.Cache = request.config.cache
    return EmulatorDriver(cache.mkdir("emulated"))


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, emulator: EmulatorDriver) -> str:
    """Where tensors go."""
    if request.param == "cuda":
        return "cuda"
    monkeypatch.setattr(modules, "driver", lambda: emulator)
    return "cpu"
