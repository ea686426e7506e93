"""The jobs of deploy/slurm on a real Slurm of two nodes, each a host of its own namespaces."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.network_hosts import Host, network_hosts
from support.slurm import Slurm, slurm_cluster
from support.waiting import wait_until

JOBS = Path(__file__).resolve().parents[2] / "deploy" / "slurm"
SIZES = ("--max-num-seqs=4", "--kv-cache-bytes=30000000", "--threads=1")
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


def worker_pids(host: Host) -> list[int]:
    """Ranks, without the processes that started them."""
    return [p.pid for p in host.processes() if "-m allspan.worker" in p.command and "rank_shell" not in p.command]


def test_a_models_ranks_start_again_inside_the_job_also_on_the_nodes_left(
    slurm: Slurm, tiny: Path, tmp_path: Path
) -> None:
    first, second = slurm.hosts
    log = tmp_path / "job.log"
    log.touch()
    flags = ["--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--parsable", f"--output={log}"]
    words = ["sbatch", *flags, str(JOBS / "model.sbatch"), *SIZES]
    job = slurm.run(words, **variables(slurm, tiny, tmp_path)).strip()

    def comes(said: str) -> None:
        wait_until(lambda: said in log.read_text() or is_over(slurm, job), 60, said)
        assert said in log.read_text()

    with contextlib.ExitStack() as stack:
        stack.callback(lambda: slurm.run(["scancel", job]))
        comes("Server is ready")
        expected = answer(slurm)
        assert expected, log.read_text()
        (pid,) = worker_pids(second)
        os.kill(pid, signal.SIGKILL)
        comes(f"on {second.name}) was killed by signal 9 (SIGKILL)")
        comes("is ready again (epoch 2)")
        assert answer(slurm) == expected
        second.power_off()  # its slurmd, too
        comes(f"host {second.name} was lost: nothing was heard of it for 3 s")
        comes("is ready again (epoch 3)")
        assert answer(slurm) == expected
        slurm.run(["scancel", "--batch", "--signal=TERM", job])
        wait_until(lambda: is_over(slurm, job), 40, "the job's end")
    assert "Traceback" not in log.read_text()
    assert not worker_pids(first)


def test_salloc_on_a_host_that_is_not_the_first_node_serves_on_the_first(
    slurm: Slurm, tiny: Path, tmp_path: Path
) -> None:
    first, second = slurm.hosts
    log = tmp_path / "salloc.log"
    words = ["salloc", "--nodes=2", "--ntasks-per-node=1", "bash", str(JOBS / "model.sbatch"), *SIZES]
    env = {**slurm.environment, **variables(slurm, tiny, tmp_path)}
    with log.open("wb") as out, second.popen(words, stdout=out, stderr=out, env=env) as salloc:
        try:
            wait_until(lambda: "Server is ready" in log.read_text() or salloc.poll() is not None, 60, "the server")
            assert answer(slurm, 0), log.read_text()
            assert len(worker_pids(first)) == len(worker_pids(second)) == 1
            slurm.run(["scancel", "--state=RUNNING"])
            salloc.wait(40)
        finally:
            salloc.kill()
    wait_until(lambda: not worker_pids(first) and not worker_pids(second), 20, "the end of the ranks")


def test_one_model_started_by_srun_and_pmix_answers_and_ends_in_order(slurm: Slurm, tiny: Path, tmp_path: Path) -> None:
    if "pmix" not in slurm.run(["srun", "--mpi=list"]):
        pytest.skip("this Slurm has no PMIx plugin")
    log = tmp_path / "job.log"
    log.touch()
    flags = ["--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--parsable", f"--output={log}"]
    job = slurm.run(["sbatch", *flags, str(JOBS / "model-pmix.sbatch")], **variables(slurm, tiny, tmp_path)).strip()
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: slurm.run(["scancel", job]))
        wait_until(lambda: "Server is ready" in log.read_text() or is_over(slurm, job), 120, "the job's server")
        assert answer(slurm), log.read_text()
        slurm.run(["scancel", "--batch", "--signal=TERM", job])
        wait_until(lambda: is_over(slurm, job), 40, "the job's end")
    said = log.read_text()
    assert "Traceback" not in said, said
    assert not any(worker_pids(host) for host in slurm.hosts)


def test_tasks_without_pmix_are_refused_by_each_rank(slurm: Slurm, tiny: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "allspan.worker", "--model", str(tiny), "--run-dir", f"/tmp/allspan-{os.getuid()}/x"]
    run = slurm.hosts[0].run(["srun", "--mpi=none", "-N2", "-n2", *words], 60, check=False, env=dict(slurm.environment))
    assert run.returncode == 1
    assert run.stderr.count("srun --mpi=pmix") == 2, run.stderr


def test_replicas_serve_on_each_node(slurm: Slurm, tiny: Path, tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.touch()
    flags = ["--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--parsable", f"--output={log}"]
    words = ["sbatch", *flags, str(JOBS / "replicas.sbatch"), *SIZES, "--ranks=1", "--bind=none"]
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
