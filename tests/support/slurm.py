"""A Slurm cluster on the hosts of network_hosts: slurmctld on the first, a slurmd on each, one munged for all."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.network_hosts import Host
from support.waiting import wait_until

SBIN = "/usr/sbin"
TOOLS = ("slurmctld", "slurmd", "munged", "sbatch", "salloc", "srun", "scontrol")

_CONF = """ClusterName=test
SlurmctldHost={first}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
TmpFS={folder}/tmp.%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/d.%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/d.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
KillWait=3
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Slurm:
    """`environment` names the cluster to Slurm's commands, which run on the first host."""

    hosts: Sequence[Host]
    folder: Path
    environment: Mapping[str, str]

    def run(self, words: Sequence[str], timeout: float = 60.0, **more: str) -> str:
        return self.hosts[0].run(words, timeout, env={**self.environment, **more}).stdout


@contextmanager
def slurm_cluster(hosts: Sequence[Host], folder: Path) -> Iterator[Slurm]:
    """Skips the test where Slurm is not installed."""
    path = f"{os.environ['PATH']}:{SBIN}"
    if missing := [tool for tool in TOOLS if shutil.which(tool, path=path) is None]:
        pytest.skip(f"not installed: {', '.join(missing)} (Debian: slurmctld slurmd slurm-client munge)")
    folder.chmod(0o755)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(64))
    key.chmod(0o400)
    cpus = os.cpu_count() or 1
    lines = []
    for host in hosts:
        for kind in ("spool", "tmp"):
            (folder / f"{kind}.{host.name}").mkdir()
        lines.append(f"NodeName={host.name} NodeAddr={host.address} CPUs={cpus} RealMemory=1000 State=UNKNOWN")
    conf = folder / "slurm.conf"
    words = {"first": hosts[0].name, "address": hosts[0].address, "folder": folder, "nodes": "\n".join(lines)}
    conf.write_text(_CONF.format(**words))
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
    environment = {**os.environ, "PATH": path, "SLURM_CONF": str(conf)}
    munged = ["munged", "-F", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"]
    files = [f"--{name}-file={folder}/munged.{name}" for name in ("log", "pid", "seed")]
    with ExitStack() as stack:
        for host, command in [
            (hosts[0], [*munged, *files]),
            (hosts[0], ["slurmctld", "-D"]),
            *((host, ["slurmd", "-D", "-N", host.name]) for host in hosts),
        ]:
            stack.enter_context(_daemon(host, command, environment, folder / f"{command[0]}.{host.name}.out"))
            if command[0] == "munged":
                wait_until((folder / "munge.socket").exists, 10, "munged")
        slurm = Slurm(hosts, folder, environment)
        idle = f"{len(hosts)} idle"
        wait_until(lambda: idle in slurm.run(["sinfo", "-h", "-o", "%D %t"]), 30, "Slurm's nodes")
        yield slurm


@contextmanager
def _daemon(host: Host, words: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[None]:
    with log.open("wb") as out, host.popen(words, stdout=out, stderr=subprocess.STDOUT, env=environment) as process:
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
