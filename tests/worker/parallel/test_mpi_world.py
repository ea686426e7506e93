"""Collectives and plan channels between real processes that mpirun starts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from allspan.worker.parallel.window import load_native
from support import mpi_checks
from support.mpirun import mpirun

SCRIPT = str(Path(mpi_checks.__file__))


def needs(kind: str) -> None:
    if kind == "window" and load_native() is None:
        pytest.skip("the compiled kernels are not installed")


MORE = [("window", 3), ("window", 4), ("mpi", 2), ("mpi", 4)]


@pytest.mark.parametrize(
    ("kind", "ranks"), [("auto", 2), ("mpi", 3), *(pytest.param(*each, marks=pytest.mark.nightly) for each in MORE)]
)
def test_sums_rows_and_plans_arrive_on_every_rank_and_idle_followers_sleep(
    kind: str, ranks: int, tmp_path: Path
) -> None:
    """On one host, auto takes the window."""
    taken = "window" if kind == "auto" else kind
    needs(taken)
    run = mpirun(ranks, [SCRIPT, "all", kind], tmp_path)
    assert run.returncode == 0, run.stdout
    assert run.stdout.strip() == f"ok {taken}"


@pytest.mark.parametrize(
    ("check", "hosts"),
    [
        ("all", "1,1"),
        ("sums", "2,2"),
        *(pytest.param("all", each, marks=pytest.mark.nightly) for each in ("2,1", "1,2", "1,1,1", "2,2", "3,1,2")),
    ],
)
def test_ranks_of_several_hosts_sum_in_one_tree_whatever_the_batch(check: str, hosts: str, tmp_path: Path) -> None:
    """Groups of ranks stand for hosts. Two ranks make the same bits on one host and on two, as do four on two."""
    needs("window")
    run = mpirun(sum(map(int, hosts.split(","))), [SCRIPT, check, "auto", "--hosts", hosts], tmp_path)
    assert run.returncode == 0, run.stdout
    assert run.stdout.strip() == "ok hosts"


@pytest.mark.nightly
def test_a_follower_that_expects_a_plan_does_not_sleep_long(tmp_path: Path) -> None:
    run = mpirun(2, [SCRIPT, "expected", "mpi"], tmp_path)
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize("kind", ["window", "hosts", pytest.param("mpi", marks=pytest.mark.nightly)])
def test_a_peer_that_does_not_come_is_named_and_the_world_ends(kind: str, tmp_path: Path) -> None:
    needs("window" if kind == "hosts" else kind)
    started = time.monotonic()
    run = mpirun(2, [SCRIPT, "late", *(["auto", "--hosts", "1,1"] if kind == "hosts" else [kind])], tmp_path)
    assert "late ok" in run.stdout, run.stdout
    assert run.returncode != 0
    assert time.monotonic() - started < 60


def test_auto_falls_back_to_mpi_and_says_so_once(tmp_path: Path) -> None:
    run = mpirun(2, [SCRIPT, "rows", "auto", "--without-kernels"], tmp_path)
    assert run.returncode == 0, run.stdout
    assert "ok mpi" in run.stdout
    assert run.stdout.count("the compiled kernels are not installed") == 1


def test_a_window_that_cannot_be_had_is_refused(tmp_path: Path) -> None:
    run = mpirun(2, [SCRIPT, "join", "window", "--without-kernels"], tmp_path)
    assert run.returncode != 0
    assert 'collectives is "window", but the compiled kernels are not installed' in run.stdout
