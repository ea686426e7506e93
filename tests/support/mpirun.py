"""Runs a Python file on several ranks under a real mpirun, with every MPI file in a folder of the test's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def find_mpirun() -> str:
    """The mpirun that belongs to this Python, else the system's; skips the test when there is none."""
    found = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
    if found is None:
        pytest.skip("mpirun is not installed")
    return found


def mpi_environment(folder: Path) -> dict[str, str]:
    names = (
        "OMPI_MCA_osc_sm_backing_store",
        "OMPI_MCA_btl_sm_backing_directory",
        "OMPI_MCA_btl_vader_backing_directory",
        "OMPI_MCA_orte_tmpdir_base",
        "PRTE_MCA_prte_tmpdir_base",
        "PMIX_MCA_ptl_base_session_tmpdir",
        "TMPDIR",
    )
    inherited = {
        key: value for key, value in os.environ.items() if not key.startswith(("OMPI_COMM", "PMIX_", "PMI_", "PRTE_"))
    }
    return (
        inherited
        | dict.fromkeys(names, str(folder))
        | {
            "PYTHONPATH": os.pathsep.join(
                [str(Path(__file__).parents[1]), *inherited.get("PYTHONPATH", "").split(os.pathsep)]
            ),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMP_NUM_THREADS": "1",
        }
    )


def mpirun(ranks: int, arguments: list[str], folder: Path, timeout: float = 90.0) -> subprocess.CompletedProcess[str]:
    """Runs `python *arguments` on so many ranks and waits for them; standard error is in `stdout`."""
    command = [find_mpirun(), "--bind-to", "none", "--oversubscribe", "-n", str(ranks), sys.executable, *arguments]
    return subprocess.run(
        command,
        env=mpi_environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )


def set_visible_gpu() -> None:
    """Gives this rank one of the GPUs, in turn; to be called before torch looks for them."""
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = given.split(",") if given else [str(i) for i in range(len(list(Path("/proc/driver/nvidia/gpus").glob("*"))))]
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[rank % len(gpus)]
