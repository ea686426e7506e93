"""Tasks that Slurm starts without MPI between them are refused, not served as worlds of one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from allspan.protos.api.errors import ConfigError
from allspan.protos.config.settings import ParallelConfig
from allspan.worker.parallel import world
from allspan.worker.parallel.world import join_world

LAUNCHERS = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "PMIX_RANK", "SLURM_NTASKS")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


def test_several_tasks_without_pmix_are_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "4")
    with pytest.raises(ConfigError, match=r"Slurm started 4 \(SLURM_NTASKS\) ranks.*srun --mpi=pmix"):
        join_world(ParallelConfig())


@pytest.mark.parametrize(
    "variables",
    [
        {"PMIX_RANK": "1", "SLURM_NTASKS": "3"},  # srun --mpi=pmix with an MPI of another PMIx
        {"PMI_RANK": "0", "PMI_SIZE": "3", "SLURM_NTASKS": "3"},  # srun --mpi=pmi2, which Open MPI 5 does not speak
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "3"},  # mpirun of another MPI than mpi4py's
    ],
)
def test_a_launcher_that_mpi_does_not_know_is_refused(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    alone = SimpleNamespace(COMM_WORLD=SimpleNamespace(rank=0, size=1))
    monkeypatch.setattr(world, "_start_mpi", lambda: alone)
    with pytest.raises(ConfigError, match="started 3 ranks, but MPI joins none of them"):
        join_world(ParallelConfig())


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_NTASKS": "1"},
        {"SLURM_NTASKS": "4", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},  # mpirun -n 1 in a job of four
    ],
)
def test_one_task_is_a_world_of_its_own(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert join_world(ParallelConfig()).kind == "local"
