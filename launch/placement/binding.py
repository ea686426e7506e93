"""Lays the ranks over this machine, and finds what binds them to the memory of their node."""

from __future__ import annotations

from dataclasses import dataclass

from allspan.launch.placement.gpus import find_gpus
from allspan.launch.placement.placement import Placement, PlacementConfig, place, place_on_gpus
from allspan.launch.placement.topology import Topology, read_topology
from allspan.launch.supervision import mpi


@dataclass(frozen=True)
class Bound:
    """A placement with its memory binding. `numactl` is set where that command binds the ranks; `memory` describes the
    binding for the log."""

    placement: Placement
    numactl: str | None
    memory: str


def lay_out(config: PlacementConfig, device: str = "cpu", topology: Topology | None = None) -> Bound:
    """Returns the placement of the ranks; with "cuda" each rank has a GPU. Raises ConfigError as `place` and
    `place_on_gpus` do."""
    topology = topology or read_topology()
    numactl, why_not = None, ""
    if config.bind != "none":
        numactl, why_not = mpi.find_numactl([node.index for node in topology.nodes])
    if device == "cuda":
        placement = place_on_gpus(topology, config, find_gpus(), can_bind=numactl is not None)
    else:
        placement = place(topology, config, can_bind=numactl is not None)
    return Bound(placement, numactl, _memory(topology, config, numactl, why_not))


def _memory(topology: Topology, config: PlacementConfig, numactl: str | None, why_not: str) -> str:
    if len(topology.nodes) == 1:
        return "on one node"
    if config.bind == "none":
        return "not bound (--bind none)"
    if numactl is not None:
        return f"bound by {numactl}"
    return f"bound by each rank itself ({why_not})"
