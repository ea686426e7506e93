"""A cluster of two fake ranks with a tokenizer, and an engine attached to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from allspan import ClientEngine
from support.byte_tokenizer import write_byte_tokenizer
from support.fake_worker import FakeCluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[FakeCluster]:
    run_dir = tmp_path / "r"
    run_dir.mkdir()
    model = write_byte_tokenizer(tmp_path / "model")
    with FakeCluster(run_dir, size=2, model_path=str(model)) as made:
        yield made


@pytest.fixture
def engine(cluster: FakeCluster) -> Iterator[ClientEngine]:
    with ClientEngine(attach=cluster.run_dir) as made:
        yield made
