"""Sums between processes, each with a GPU; where there are fewer GPUs than ranks, they share them."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import mpirun

SCRIPT = str(Path(mpirun.__file__).with_name("gpu_checks.py"))

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("check", ["sums", "graph"])
def test_ranks_sum_in_memory_they_open_to_each_other(check: str, ranks: int, tmp_path: Path) -> None:
    run = mpirun.mpirun(ranks, [SCRIPT, check], tmp_path, timeout=300)
    assert run.returncode == 0, run.stdout
    assert "ok ipc" in run.stdout


def test_a_gpu_whose_peer_never_comes_gives_up_and_the_world_ends(tmp_path: Path) -> None:
    run = mpirun.mpirun(2, [SCRIPT, "late"], tmp_path, timeout=120)
    assert "late ok" in run.stdout, run.stdout
    assert run.returncode != 0
