"""The mpirun command of a world over several hosts: one app context a rank, in the order of ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from allspan.launch.placement.gpus import VISIBLE
from allspan.launch.placement.placement import RankPlace
from allspan.launch.supervision.mpi import OPEN_MPI, Mpirun
from allspan.protos.api.errors import ConfigError

RANK_SHELL = Path(__file__).with_name("rank_shell.py")
KEEPALIVE = {"oob_tcp_keepalive_time": "1", "oob_tcp_keepalive_intvl": "1", "oob_tcp_keepalive_probes": "3"}
"""A daemon's dead connection is found after some 4 seconds: a backstop, keepers find it before."""
PASSED_ON = ("ALLSPAN_", "MPI4PY_", "NCCL_", "UCX_", "HF_")
"""Variables with these beginnings reach the ranks of every host, which a remote shell leaves out."""


@dataclass(frozen=True)
class RankCommand:
    """One rank: where it runs, its config file and the file of its exit status, both on its own host."""

    place: RankPlace
    config: Path
    exit_file: Path
    interface: str = ""
    """The host's interface in the private network."""


@dataclass(frozen=True)
class Job:
    """The parts of a command that all ranks share. `slots`: ranks of each host."""

    launch_agent: Path
    network: str
    run_dir: Path
    shm: Path
    slots: Mapping[str, int]


def check_mpirun(mpirun: Mpirun) -> None:
    """Raises ConfigError when it cannot start ranks on other hosts."""
    if mpirun.kind != OPEN_MPI:
        raise ConfigError(f"--hosts needs Open MPI, mpirun is {mpirun}; ALLSPAN_MPIRUN names another")


def command(
    mpirun: Mpirun, job: Job, ranks: Sequence[RankCommand], environ: Mapping[str, str] = os.environ
) -> list[str]:
    """The command line that starts one world. Daemons take their parameters from it, not from the environment."""
    words = [mpirun.path, "--bind-to", "none"]
    daemons, option = _daemons(mpirun, job)
    for name, value in daemons.items():
        words += [option, name, value]
    words += ["--mca", "btl_tcp_if_include", job.network]
    for rank in ranks:
        if rank.place.rank:
            words.append(":")
        env = _environment(mpirun, rank, job, environ)
        host = f"{rank.place.host}:{job.slots[rank.place.host]}"
        words += ["-n", "1", "--host", host, "--wdir", str(job.run_dir)]
        words += ["env", *(f"{name}={value}" for name, value in env.items())]
        words += [sys.executable, "-S", "-E", str(RANK_SHELL), str(rank.exit_file)]
        words += [sys.executable, "-m", "allspan.worker", str(rank.config)]
    return words


def _daemons(mpirun: Mpirun, job: Job) -> tuple[dict[str, str], str]:
    common = {"oob_tcp_if_include": job.network, **KEEPALIVE}
    agent, folder = str(job.launch_agent), str(job.shm)
    if mpirun.version >= (5,):
        # Each daemon is started from here: the other hosts need no way to each other's.
        names = {"plm": "ssh", "plm_ssh_agent": agent, "plm_ssh_no_tree_spawn": "1", "prte_tmpdir_base": folder}
        return names | common, "--prtemca"
    # Else its daemons leave the remote shell, which then ends: an agent or srun kills what a command has left.
    common["orte_leave_session_attached"] = "1"
    # Else the remote shell gets a host's name without its domain, by which a pod cannot be found.
    common["orte_keep_fqdn_hostnames"] = "1"
    # Its daemons want the agent's first word on their own hosts, too, though they never run it.
    agent = f"/bin/sh {agent}"
    names = {"plm": "rsh", "plm_rsh_agent": agent, "plm_rsh_no_tree_spawn": "1", "orte_tmpdir_base": folder}
    return names | common, "--mca"


def _environment(mpirun: Mpirun, rank: RankCommand, job: Job, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of one rank, as words of its command."""
    env = {name: value for name, value in environ.items() if name.startswith(PASSED_ON)}
    env |= {"TMPDIR": str(job.shm), "OMP_NUM_THREADS": str(rank.place.threads), "PYTHONUNBUFFERED": "1"}
    if path := python_path(environ):
        env["PYTHONPATH"] = path
    if libraries := environ.get("LD_LIBRARY_PATH"):
        # It takes the place of the one that Open MPI makes for its own libraries.
        env["LD_LIBRARY_PATH"] = f"{libraries}{os.pathsep}{Path(mpirun.path).parents[1] / 'lib'}"
    if rank.interface:
        env.setdefault("NCCL_SOCKET_IFNAME", f"={rank.interface}")
    if rank.place.gpu is not None:
        env[VISIBLE] = rank.place.gpu.visible
    return env


def python_path(environ: Mapping[str, str] = os.environ) -> str:
    """Returns PYTHONPATH with absolute folders: programs on other hosts run in another folder."""
    folders = environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(os.path.abspath(folder) for folder in folders if folder)
