"""Who binds ranks to the memory of their node."""

from __future__ import annotations

import pytest

from allspan.launch.placement.binding import lay_out
from allspan.launch.placement.placement import PlacementConfig
from allspan.launch.placement.topology import Node, Topology
from allspan.launch.supervision import mpi

ONE = Topology((Node(0, ((0,), (1,))),))
TWO = Topology((Node(0, ((0,), (1,))), Node(3, ((2,), (3,)))))
MISSING = (None, "numactl is not installed")
THERE = ("/usr/bin/numactl", "")


@pytest.mark.parametrize(
    ("topology", "found", "bind", "words"),
    [
        (ONE, MISSING, "auto", "on one node"),
        (TWO, THERE, "auto", "bound by /usr/bin/numactl"),
        (TWO, MISSING, "auto", "bound by each rank itself (numactl is not installed)"),
        (TWO, MISSING, "none", "not bound (--bind none)"),
    ],
)
def test_it_is_said_who_binds_the_memory(
    topology: Topology,
    found: tuple[str | None, str],
    bind: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mpi, "find_numactl", lambda nodes: found)
    bound = lay_out(PlacementConfig(bind=bind), topology=topology)
    assert bound.memory == words
    assert bound.numactl == (found[0] if bind == "auto" else None)


def test_without_numactl_threads_are_pinned_although_cores_are_left_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "find_numactl", lambda nodes: MISSING)
    assert [rank.cpus for rank in lay_out(PlacementConfig(threads=1), topology=TWO).placement.ranks] == [(0,), (2,)]
    monkeypatch.setattr(mpi, "find_numactl", lambda nodes: THERE)
    assert [rank.cpus for rank in lay_out(PlacementConfig(threads=1), topology=TWO).placement.ranks] == [(), ()]
