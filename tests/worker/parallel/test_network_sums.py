"""Sums between hosts that are namespaces with a network between them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from allspan.launch.supervision.mpi import identify
from allspan.worker.parallel.window import load_native
from support import all_reduce_times, mpi_checks
from support.mpirun import find_mpirun, mpi_environment
from support.network_hosts import network_hosts

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(load_native() is None, reason="the compiled kernels are not installed"),
]


def over_hosts(ranks_a_host: int, words: list[str], folder: Path) -> str:
    with network_hosts(2) as hosts:
        places = ",".join(f"{host.name}:{ranks_a_host}" for host in hosts)
        mpi = identify(find_mpirun())
        is_new = mpi.version >= (5,)
        daemon, agent, memory = ("--prtemca", "plm_ssh_agent", "sm") if is_new else ("--mca", "plm_rsh_agent", "vader")
        options = [daemon, agent, str(hosts.remote_shell), daemon, "oob_tcp_if_include"]
        options += [hosts.network, "--mca", "btl_tcp_if_include", hosts.network, "--mca", "pml", "ob1"]
        options += ["--mca", "btl", f"tcp,self,{memory}", "--mca", "mpi_yield_when_idle", "1", "--bind-to", "none"]
        options += ["-x", "PYTHONPATH", "--map-by", f"ppr:{ranks_a_host}:node:oversubscribe", "--host", places]
        mpirun = [mpi.path, *options, "-n", str(2 * ranks_a_host), sys.executable]
        inherited = {name: each for name, each in mpi_environment(folder).items() if "dir" not in name}
        return hosts[0].run([*mpirun, *words], timeout=110, env=inherited).stdout


@pytest.mark.parametrize("ranks_a_host", [1, 2])
def test_hosts_of_a_network_sum_as_one_host_does(ranks_a_host: int, tmp_path: Path) -> None:
    assert over_hosts(ranks_a_host, [mpi_checks.__file__, "sums", "auto"], tmp_path).strip() == "ok hosts"


def test_a_short_sum_between_hosts_is_no_slower_than_mpis_own(tmp_path: Path) -> None:
    times = json.loads(over_hosts(1, [all_reduce_times.__file__, "2304"], tmp_path))["us"]
    assert times["hosts"][0] <= 1.5 * times["mpi"][0], times
