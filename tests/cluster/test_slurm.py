"""The jobs of deploy/slurm on a real Slurm of two nodes, each a host of its own namespaces."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.network_hosts import network_hosts
from support.slurm import Slurm, slurm_cluster
from support.waiting import wait_until

JOBS = Path(__file__).resolve().parents[2] / "deploy" / "slurm"
ASK = """
import json, sys, urllib.request
body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True}
request = urllib.request.Request(sys.argv[1] + "/v1/completions", json.dumps(body).encode(),
                                 {"Content-Type": "application/json"})
print(urllib.request.urlopen(request, timeout=30).read().decode())
"""

pytestmark = [pytest.mark.nightly, pytest.mark.alone, pytest.mark.timeout(300)]


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    with network_hosts(2) as hosts, slurm_cluster(hosts, tmp_path) as cluster:
        yield cluster


def variables(slurm: Slurm, tiny: Path, folder: Path) -> dict[str, str]:
    config = {"cache": {"kv_cache_bytes": 30_000_000}, "scheduler": {"max_num_seqs": 4}}
    address = slurm.hosts[0].address
    return {
        "MODEL": str(tiny),
        "VENV": sys.prefix,
        "MPI_NETWORK": f"{address.rpartition('.')[0]}.0/24",
        "WIRE": str(folder / "wire"),
        "WORKER_CONFIG": json.dumps(config),
        "SHUTDOWN_TIMEOUT": "5",
        "HOME": str(folder),
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }


def answer(slurm: Slurm, host: int = 0) -> str:
    """Eight tokens of the server on that node, asked there."""
    run = slurm.hosts[host].run([sys.executable, "-c", ASK, "http://127.0.0.1:8000"], check=False)
    if run.returncode:
        return ""
    (choice,) = json.loads(run.stdout)["choices"]
    return str(choice["text"])


def is_over(slurm: Slurm, job: str) -> bool:
    return job not in slurm.run(["squeue", "-h", "-o", "%i"])


@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
def test_one_model_on_two_nodes_answers_and_ends_in_order(
    launcher: str, slurm: Slurm, tiny: Path, tmp_path: Path
) -> None:
    more = variables(slurm, tiny, tmp_path) | {"LAUNCHER": launcher}
    if launcher == "srun" and "pmix" not in slurm.run(["srun", "--mpi=list"]):
        pytest.skip("this Slurm has no PMIx plugin")
    log = tmp_path / "job.log"
    log.touch()
    flags = ["--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--parsable", f"--output={log}"]
    job = slurm.run(["sbatch", *flags, str(JOBS / "model.sbatch")], **more).strip()
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: slurm.run(["scancel", job]))
        wait_until(lambda: "Server is ready" in log.read_text() or is_over(slurm, job), 120, "the job's server")
        assert answer(slurm), log.read_text()
        slurm.run(["scancel", "--batch", "--signal=TERM", job])
        wait_until(lambda: is_over(slurm, job), 40, "the job's end")
    said = log.read_text()
    assert "Traceback" not in said, said
    for host in slurm.hosts:
        left = [process.command for process in host.processes() if "allspan.worker" in process.command]
        assert not left


def test_tasks_without_pmix_are_refused_by_each_rank(slurm: Slurm, tiny: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "allspan.worker", "--model", str(tiny), "--run-dir", f"/tmp/allspan-{os.getuid()}/x"]
    run = slurm.hosts[0].run(["srun", "--mpi=none", "-N2", "-n2", *words], 60, check=False, env=dict(slurm.environment))
    assert run.returncode == 1
    assert run.stderr.count("srun --mpi=pmix") == 2, run.stderr


def test_replicas_serve_on_each_node(slurm: Slurm, tiny: Path, tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.touch()
    flags = ["--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--parsable", f"--output={log}"]
    sizes = ["--max-num-seqs=4", "--kv-cache-bytes=30000000", "--threads=1", "--ranks=1", "--bind=none"]
    words = ["sbatch", *flags, str(JOBS / "replicas.sbatch"), *sizes]
    job = slurm.run(words, **variables(slurm, tiny, tmp_path)).strip()
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: slurm.run(["scancel", job]))
        wait_until(lambda: log.read_text().count("Server is ready") == 2 or is_over(slurm, job), 120, "both servers")
        first, second = answer(slurm, 0), answer(slurm, 1)
        assert first, log.read_text()
        assert first == second
        slurm.run(["scancel", "--signal=TERM", job])
        wait_until(lambda: is_over(slurm, job), 40, "the job's end")
    assert "Traceback" not in log.read_text()
