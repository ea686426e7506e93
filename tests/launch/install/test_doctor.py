"""What `allspan doctor` finds, beside what the cluster tests see of it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from allspan.launch.install import doctor
from allspan.protos.cluster.cluster_file import ClusterInfo
from allspan.protos.cluster.running import RunningCluster, RunRecord


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock.getsockname()[1]


def test_a_port_that_allspan_serves_at_is_no_fault(monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    record = RunRecord(7, "tiny", "/models/tiny", 1, started_at=0.0, booted_s=0.0, http=f"http://127.0.0.1:{taken}")
    info = cast(ClusterInfo, None)  # a port has nothing to do with the state
    monkeypatch.setattr(doctor, "running_clusters", lambda: [RunningCluster(Path("/run"), record, info, ())])
    found = doctor.check_port(taken)
    assert (found.status, found.text) == ("ok", f"{taken} is where allspan serves tiny (pid 7); `allspan ps` lists it")


def test_a_port_that_another_program_has_is_a_warning_that_names_it(
    monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    monkeypatch.setattr(doctor, "running_clusters", list)
    found = doctor.check_port(taken)
    assert found.status == "warn"
    assert f"{taken} cannot be taken" in found.text
    assert "by process" in found.text
    assert "--port" in found.fix
