"""Clusters of two ranks on a tiny random model with a tokenizer, and the folder that they run in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from support.byte_model import save_byte_model
from support.serving import Served, runtime_folder

Start = Callable[..., Served]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bytes are tokens; room for answers that last until something breaks."""
    return save_byte_model(tmp_path_factory.mktemp("tiny") / "model", max_position_embeddings=65536)


@pytest.fixture
def runtime() -> Iterator[Path]:
    with runtime_folder() as folder:
        yield folder


@pytest.fixture
def start(model: Path, runtime: Path) -> Iterator[Start]:
    """Starts `allspan serve MODEL --ranks 2` with more flags and waits until it is ready."""
    made: list[Served] = []

    def begin(*flags: str, wait: bool = True, env: Mapping[str, str] | None = None, wrap: Sequence[str] = ()) -> Served:
        common = ("--ranks=2", "--oversubscribe", "--max-num-seqs=4", "--kv-cache-bytes=100000000")
        made.append(Served(model, *common, *flags, runtime=runtime, env=env, wrap=wrap))
        return made[-1].wait_ready() if wait else made[-1]

    yield begin
    for served in made:
        served.kill()
        print(served.log)  # shown when the test fails
