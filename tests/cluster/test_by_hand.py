"""Ranks that launch/mpirun.sh starts, and a program that attaches to them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from allspan import ClientEngine, SamplingParams
from allspan.protos.api.errors import ConfigError
from allspan.protos.cluster.cluster_file import read_cluster
from support.mpirun import find_mpirun, mpi_environment
from support.serving import runtime_folder
from support.waiting import wait_until

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "mpirun.sh"


@pytest.mark.timeout(180)
def test_a_program_attaches_to_ranks_started_by_hand(tiny: Path) -> None:
    find_mpirun()
    with runtime_folder() as folder, (folder / "log").open("w+") as log:
        run_dir = folder / "r"
        tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = mpi_environment(folder) | {"PATH": tools, "RUN_DIR": str(run_dir)}
        sizes = ["--max-num-seqs", "4", "--kv-cache-bytes", "30000000", "--threads", "1"]
        process = subprocess.Popen([str(SCRIPT), str(tiny), "2", *sizes], env=environment, stdout=log, stderr=log)

        def is_ready() -> bool:
            assert process.poll() is None, (folder / "log").read_text()
            try:
                return read_cluster(run_dir).state == "ready"
            except ConfigError:
                return False

        try:
            wait_until(is_ready, 120, "the ranks")
            with ClientEngine(attach=run_dir) as engine:
                params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
                assert len(engine.generate([[1, 2, 3]], params)[0].token_ids) == 5
                for rank in engine.cluster.ranks:
                    os.kill(rank.pid, signal.SIGTERM)
            assert process.wait(30) == 0, (folder / "log").read_text()
        finally:
            process.kill()
            process.wait(10)
        said = (folder / "log").read_text()
    assert "rank 1 of 2" in said
    assert "rror" not in said, said


def test_without_a_model_it_says_how_it_is_used() -> None:
    done = subprocess.run([str(SCRIPT)], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert "mpirun.sh MODEL [RANKS" in done.stderr
    assert "ClientEngine(attach=" in done.stderr
