"""The mpirun command line, its environment, and what mpirun says about the dead."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from allspan.launch.placement.gpus import Gpu
from allspan.launch.placement.placement import Placement, RankPlace
from allspan.launch.supervision import mpi
from allspan.launch.supervision.mpi import (
    MPICH,
    OPEN_MPI,
    Mpirun,
    command,
    environment,
    find_mpirun,
    find_numactl,
    identify,
    outside_slurm,
)
from allspan.launch.supervision.mpi_notices import NoticeFilter, RankDeath, find_death, find_lost_daemon
from allspan.protos.api.errors import ConfigError

OPEN_MPI_5 = Mpirun("/opt/bin/mpirun", OPEN_MPI, (5, 0, 11))
OPEN_MPI_4 = Mpirun("/opt/bin/mpirun", OPEN_MPI, (4, 1, 4))
MPICH_4 = Mpirun("/opt/bin/mpiexec", MPICH, (4, 2))
PLACEMENT = Placement((RankPlace(0, 3, 8), RankPlace(1, 1, 8)))
CONFIGS = [Path("/run/worker-0.e1.json"), Path("/run/worker-1.e1.json")]


def tool(folder: Path, name: str, script: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_one_app_context_a_rank_bound_to_its_node() -> None:
    words = command(OPEN_MPI_5, PLACEMENT, CONFIGS, "/usr/bin/numactl", "python")
    assert " ".join(words) == (
        "/opt/bin/mpirun --bind-to none"
        " -n 1 /usr/bin/numactl --cpunodebind=3 --membind=3 python -m allspan.worker /run/worker-0.e1.json"
        " : -n 1 /usr/bin/numactl --cpunodebind=1 --membind=1 python -m allspan.worker /run/worker-1.e1.json"
    )


def test_without_numactl_or_without_a_node_ranks_are_not_bound() -> None:
    assert "--membind" not in " ".join(command(OPEN_MPI_5, PLACEMENT, CONFIGS, None))
    unbound = Placement((RankPlace(0, None, 8), RankPlace(1, None, 8)))
    assert "numactl" not in " ".join(command(OPEN_MPI_5, unbound, CONFIGS, "/usr/bin/numactl"))


def test_mpich_takes_no_flag_of_open_mpi() -> None:
    assert "--bind-to" not in command(MPICH_4, PLACEMENT, CONFIGS, None)
    assert not [name for name in environment(MPICH_4, Path("/shm"), PLACEMENT, {}) if name.startswith("OMPI")]


def test_every_file_of_the_world_goes_into_one_folder() -> None:
    five = environment(OPEN_MPI_5, Path("/shm/x"), PLACEMENT, {})
    names = {name for name, value in five.items() if value == "/shm/x"}
    assert names >= {"TMPDIR", "OMPI_MCA_btl_sm_backing_directory", "OMPI_MCA_osc_sm_backing_store"}
    assert names >= {"PRTE_MCA_prte_tmpdir_base", "PMIX_MCA_ptl_base_session_tmpdir"}
    four = environment(OPEN_MPI_4, Path("/shm/x"), PLACEMENT, {})
    assert four["OMPI_MCA_btl_vader_backing_directory"] == four["OMPI_MCA_orte_tmpdir_base"] == "/shm/x"


def test_messages_go_through_shared_memory_alone() -> None:
    five = environment(OPEN_MPI_5, Path("/shm"), PLACEMENT, {})
    four = environment(OPEN_MPI_4, Path("/shm"), PLACEMENT, {})
    assert (five["OMPI_MCA_btl"], four["OMPI_MCA_btl"], five["OMPI_MCA_pml"]) == ("self,sm", "self,vader", "ob1")


def test_what_the_user_preloads_stays_preloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "loopback_library", lambda: "/lib/_loopback.so")
    made = environment(OPEN_MPI_5, Path("/shm"), PLACEMENT, {"LD_PRELOAD": "/lib/tcmalloc.so"})
    assert made["LD_PRELOAD"] == "/lib/_loopback.so /lib/tcmalloc.so"


def test_root_is_allowed_only_when_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert environment(OPEN_MPI_5, Path("/shm"), PLACEMENT, {})["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "OMPI_ALLOW_RUN_AS_ROOT" not in environment(OPEN_MPI_5, Path("/shm"), PLACEMENT, {})


def test_an_mpirun_around_us_does_not_leak_in() -> None:
    made = environment(
        OPEN_MPI_5, Path("/shm"), PLACEMENT, {"OMPI_COMM_WORLD_RANK": "3", "PMIX_RANK": "3", "HOME": "/h"}
    )
    assert "OMPI_COMM_WORLD_RANK" not in made
    assert "PMIX_RANK" not in made
    assert made["HOME"] == "/h"


def test_an_mpirun_of_this_host_alone_knows_nothing_of_slurms_job() -> None:
    assert outside_slurm({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "HOME": "/h"}) == {"HOME": "/h"}


def test_only_oversubscribed_ranks_yield() -> None:
    crowded = Placement(PLACEMENT.ranks, oversubscribed=True)
    assert environment(OPEN_MPI_5, Path("/shm"), crowded, {})["OMPI_MCA_mpi_yield_when_idle"] == "1"
    assert "OMPI_MCA_mpi_yield_when_idle" not in environment(OPEN_MPI_5, Path("/shm"), PLACEMENT, {})


@pytest.mark.parametrize(
    ("output", "kind", "version"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to …", OPEN_MPI, (5, 0, 11)),
        ("mpirun (Open MPI) 4.1.4", OPEN_MPI, (4, 1, 4)),
        ("HYDRA build details:\n    Version:                                 4.2.1\n", MPICH, (4, 2, 1)),
    ],
)
def test_launchers_are_told_apart(tmp_path: Path, output: str, kind: str, version: tuple[int, ...]) -> None:
    path = tool(tmp_path, "mpirun", f"cat <<'END'\n{output}\nEND")
    assert identify(str(path)) == Mpirun(str(path), kind, version)


@pytest.mark.parametrize("output", ["mpirun (Open MPI) 4.0.5", "Version: 3.4", "Intel(R) MPI"])
def test_old_and_foreign_launchers_are_refused(tmp_path: Path, output: str) -> None:
    with pytest.raises(ConfigError, match="mpirun"):
        identify(str(tool(tmp_path, "mpirun", f"echo '{output}'")))


def test_the_launcher_named_by_the_user_comes_first(tmp_path: Path) -> None:
    path = tool(tmp_path, "mine", "echo 'mpirun (Open MPI) 5.0.1'")
    assert find_mpirun({"ALLSPAN_MPIRUN": str(path), "PATH": ""}).path == str(path)
    with pytest.raises(ConfigError, match="nonesuch"):
        find_mpirun({"ALLSPAN_MPIRUN": str(tmp_path / "nonesuch"), "PATH": ""})


def test_numactl_that_may_not_bind_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    path = tool(
        tmp_path, "numactl", '[ "$1" = --cpunodebind=0 ] || { echo "set_mempolicy: not permitted" >&2; exit 1; }'
    )
    assert find_numactl([0]) == (str(path), "")
    found, why = find_numactl([0, 3])
    assert found is None
    assert "NUMA node 3" in why
    assert "not permitted" in why
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert find_numactl([0]) == (None, "numactl is not installed")


def test_the_dead_rank_is_read_from_either_launcher() -> None:
    text = "-----\nprterun noticed that process rank 1 with PID 42 on node\nbox exited on\nsignal 9 (Killed).\n----"
    assert find_death(text) == RankDeath(1, 42, "box", 9)
    mpich = (
        "====\n=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   PID 42 RUNNING AT box\n=   EXIT CODE: 9\n"
        "=   CLEANING UP\n====\nYOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)"
    )
    assert find_death(mpich) == RankDeath(-1, 42, "box", 9)
    assert find_death("all is well") is None


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_notices_and_exit_reports_are_kept_from_the_terminal_and_bars_pass(step: int) -> None:
    rule = b"-" * 74 + b"\n"
    data = (
        b"one\n" + rule + b"mpirun noticed\nthat\n" + rule + b"allspan.worker: rank 1: bad\n50%\r99%\rtwo\n- item\nlast"
    )
    notices = NoticeFilter()
    shown = b"".join(notices.pass_on(data[i : i + step]) for i in range(0, len(data), step))
    assert shown == b"one\n50%\r99%\rtwo\n- item\n"
    assert notices.rest() == b"last\n"
    assert notices.rest() == b""


def test_a_piece_of_a_line_waits_for_its_end_and_a_state_of_a_bar_does_not() -> None:
    notices = NoticeFilter()
    pieces = [notices.pass_on(data) for data in (b"INFO [ra", b"nk 1] here\nINFO", b" [rank 0]", b"\n50%\r")]
    assert pieces == [b"", b"INFO [rank 1] here\n", b"", b"INFO [rank 0]\n50%\r"]


def test_a_rank_with_a_gpu_sees_no_other() -> None:
    gpus = [Gpu(0, "H200", 0, "GPU-a"), Gpu(1, "H200", 0)]
    placed = Placement(tuple(RankPlace(rank, None, 1, gpu=gpu) for rank, gpu in enumerate(gpus)))
    words = " ".join(command(OPEN_MPI_5, placed, CONFIGS, None, "python"))
    assert "-n 1 env CUDA_VISIBLE_DEVICES=GPU-a python -m allspan.worker /run/worker-0.e1.json" in words
    assert "-n 1 env CUDA_VISIBLE_DEVICES=1 python -m allspan.worker /run/worker-1.e1.json" in words


def test_a_daemon_that_open_mpi_has_lost_is_named_by_its_host() -> None:
    rule = "-" * 60
    notice = f"""{rule}
PRTE has lost communication with a remote daemon.

  HNP daemon   : [prterun-hosta-9@0,0] on node hosta
  Remote daemon: [prterun-hosta-9@0,1] on node hostb

This is usually due to either a failure of the TCP network
{rule}
"""
    assert find_lost_daemon(notice) == "hostb"
    never_heard = f"""{rule}
A daemon failed to report back after being spawned. In some cases, the daemon was
able to execute, but was unable to complete a TCP connection back to prterun:

  Local host:    hosta
  Remote host:   hostc
  Daemon exit status: 1

check that any firewall (e.g., iptables) has been disabled and
try again.
{rule}
"""
    assert find_lost_daemon(never_heard) == "hostc"
    assert find_lost_daemon("rank 0: hello") == ""
