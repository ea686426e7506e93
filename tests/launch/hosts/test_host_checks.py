"""What `allspan doctor --hosts` and `allspan plan --hosts` find; the remote shell runs on this host."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allspan.launch.commands import doctor, plan
from allspan.launch.hosts.checks.check_hosts import Answer, ask, check_answer
from allspan.launch.hosts.checks.link_cost import LinkConfig, LinkCost, link_cost
from allspan.launch.hosts.host_list import HostsConfig
from allspan.launch.hosts.messages import Address, Facts
from allspan.launch.install.doctor import Finding
from support.byte_model import save_byte_model

FACTS = Facts("a", "0.1.0", "3.11.7", 0.0, 1, 8 << 30, addresses=(Address("eth0", "10.1.0.1", 16, 1500),))
FIRST = Answer("a", 0.1, FACTS, "Open MPI 5.0.11")
CONFIG = HostsConfig(("a", "b"), mpi_network="10.1.0.0/16")


def check(answer: Answer) -> list[Finding]:
    return check_answer(answer, FIRST, CONFIG, "ssh")


def other(**changes: Any) -> Answer:
    return replace(FIRST, host="b", facts=replace(FACTS, **changes))


@pytest.fixture
def shell(tmp_path: Path) -> str:
    """Host c cannot be reached; host d has another Python."""
    path = tmp_path / "rsh"
    path.write_text(
        '#!/bin/sh\necho Welcome\n[ "$1" = c ] && { echo "no route to c" >&2; exit 255; }\n'
        """[ "$1" = d ] && { sh -c "$2" | sed 's/"python": "[^"]*"/"python": "2.7.18"/'; exit; }\nexec sh -c "$2"\n"""
    )
    path.chmod(0o755)
    return str(path)


def test_doctor_tells_of_each_host(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "check_all", lambda ports: [])
    flags = [f"--remote-shell={shell}", "--mpi-network=127.0.0.0/8", "--json"]
    code = doctor.run(["--hosts=a,b,c,d", *flags])
    found = json.loads(capsys.readouterr().out)
    bad = [finding for finding in found if finding["status"] == "fail"]
    assert code == 1
    assert len([finding for finding in found if finding["name"] == "host b"]) == 5
    assert [finding["name"] for finding in bad] == ["host c", "host d"]
    assert "no route to c" in bad[0]["text"]
    assert "Python is 2.7.18" in bad[1]["text"]
    assert all(finding["fix"] for finding in bad)
    assert doctor.run(["--hosts=a,b", *flags]) == 0


def test_hosts_alike_pass() -> None:
    assert {finding.status for finding in check(other())} == {"ok"}


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        (other(version="0.0.9"), "fail", "allspan is 0.0.9, on a 0.1.0"),
        (replace(other(), mpi="Open MPI 4.1.4"), "fail", "MPI is Open MPI 4.1.4"),
        (replace(other(), mpi="", problem="no mpirun"), "fail", "no mpirun"),
        (replace(other(), ahead_s=3600.0), "fail", "3600 s ahead"),
        (replace(other(), ahead_s=-40.0), "warn", "40 s behind"),
        (other(addresses=()), "fail", "no address in --mpi-network"),
        (other(addresses=FACTS.addresses * 2), "fail", "2 addresses"),
        (other(addresses=(replace(FACTS.addresses[0], mtu=9000),)), "warn", "MTU 9000; on a 1500"),
        (other(memory=1 << 30), "warn", "1.0 GiB available"),
    ],
)
def test_a_difference_is_told_with_its_fix(answer: Answer, status: str, words: str) -> None:
    [finding] = [finding for finding in check(answer) if finding.status != "ok"]
    assert (finding.status, finding.name) == (status, "host b")
    assert words in finding.text
    assert finding.fix


def test_a_host_that_hangs_is_given_up_with_all_that_was_started() -> None:
    began = time.monotonic()
    assert "did not answer" in ask("b", ["sh", "-c", "sleep 20; true"], timeout_s=0.3).problem
    assert time.monotonic() - began < 5


def cost(weights: int, latency_us: float = 25.0) -> LinkCost:
    """Two hosts of 150 GB/s, the shape of Llama-3-8B."""
    plan = {"hosts": ["a", "b"], "nodes": [0, 0], "threads": [32, 32], "gpus": []}
    plan |= {"ranks": [{"token_bytes": weights // 2}] * 2, "model": {"num_layers": 32, "hidden_size": 4096}}
    found = link_cost(plan, LinkConfig(link_latency_us=latency_us))
    assert found is not None
    return found


def test_tensor_parallel_pays_over_the_link_only_for_large_models() -> None:
    large, small = cost(16 * 10**9), cost(10**8)
    message_s = 25e-6 + 4096 * 4 * 8 / 10e9
    assert large.tensor_s == pytest.approx(16e9 / 300e9 + 64 * message_s)
    assert large.pipeline_s == pytest.approx(16e9 / 150e9 + message_s)
    assert (large.tensor_pays, small.tensor_pays) == (True, False)
    assert not cost(16 * 10**9, latency_us=2000).tensor_pays
    assert "--pipeline-parallel-size 2" in small.lines()[-1]


def test_plan_tells_the_memory_of_each_host(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_byte_model(tmp_path / "model")
    flags = ["--oversubscribe", f"--remote-shell={shell}", "--mpi-network=127.0.0.0/8", "--kv-cache-bytes=1000000"]
    assert plan.run([str(model), "--hosts=a,b", *flags]) == 0
    text = capsys.readouterr().out
    assert "host b" in text
    assert "what pays: pipeline parallel" in text
    assert "a link of 25 us and 10 Gbit/s" in text
