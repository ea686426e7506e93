"""Clusters of real processes on the real default model."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from allspan import ClientEngine
from support.byte_model import save_byte_model
from support.default_model import default_model


@pytest.fixture(scope="session")
def model() -> Path:
    return default_model()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random and tiny, for what does not depend on what the tokens are."""
    return save_byte_model(tmp_path_factory.mktemp("tiny") / "tiny", max_position_embeddings=4096)


@pytest.fixture(scope="session")
def start_tiny(tiny: Path) -> Callable[..., ClientEngine]:
    """Starts a cluster of the tiny model, by default on two ranks."""
    return functools.partial(ClientEngine, tiny, ranks=2, threads=1, oversubscribe=True, startup_timeout=120.0)


@pytest.fixture(scope="session")
def start(model: Path) -> Callable[..., ClientEngine]:
    """Starts a cluster of the default model, decoded to float32; more threads than processors are allowed."""
    threads = max(1, (os.cpu_count() or 1) // 2)
    return functools.partial(
        ClientEngine,
        model,
        threads=threads,
        dtype="float32",
        quantization="none",
        oversubscribe=True,
        startup_timeout=120.0,
    )


@pytest.fixture(scope="package")
def pair(start: Callable[..., ClientEngine]) -> Iterator[ClientEngine]:
    """Two ranks, shared by the tests that do not harm them."""
    with start(ranks=2, max_model_len=2048) as engine:
        yield engine
