"""Lays ranks over several hosts, each by its own NUMA nodes, cores and GPUs."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from allspan.launch.hosts.host_list import Host, HostsConfig
from allspan.launch.hosts.messages import Address, Facts
from allspan.launch.placement.gpus import Gpu
from allspan.launch.placement.placement import Placement, PlacementConfig, RankPlace, place, place_on_gpus
from allspan.launch.placement.topology import Node, Topology
from allspan.protos.api.errors import ConfigError
from allspan.protos.api.wording import counted


def place_over_hosts(
    hosts: Sequence[Host], facts: Mapping[str, Facts], config: PlacementConfig, device: str
) -> Placement:
    """Returns the places of all ranks, in the order of the hosts. `facts`: what each host's keeper tells of it.
    Raises ConfigError with the host's name."""
    total = sum(host.slots for host in hosts)
    if config.data_parallel_size > 1:
        raise ConfigError(
            f"--data-parallel-size is {config.data_parallel_size}, must be 1 with --hosts: run one `allspan serve` for "
            "each group of hosts, with a router in front"
        )
    if config.ranks and config.world_size != total:
        flags, numbers = "--ranks", str(config.ranks)
        if config.stages > 1:
            flags, numbers = f"--pipeline-parallel-size x {flags}", f"{config.stages} x {numbers}"
        raise ConfigError(f"{flags} is {numbers}, --hosts gives {total}; leave --ranks out, or change one of them")
    if config.stages > 1:
        check_stages(hosts, config.stages)
    if config.bind not in ("auto", "none"):
        raise ConfigError(f"--bind is {config.bind!r}, must be auto or none with --hosts")
    places: list[RankPlace] = []
    oversubscribed = False
    for host in hosts:
        try:
            mine = _on_host(facts[host.name], replace(config, ranks=host.slots, stages=1), device)
        except ConfigError as error:
            raise ConfigError(f"host {host.name}: {error.message}") from error
        oversubscribed |= mine.oversubscribed
        places += [replace(entry, rank=len(places) + i, host=host.name) for i, entry in enumerate(mine.ranks)]
    return Placement(tuple(places), oversubscribed)


def check_stages(hosts: Sequence[Host], stages: int) -> None:
    """Checks that each stage of a pipeline has equally many ranks, those of one host or of whole hosts: ranks follow
    one another in the order of --hosts, and sums within a stage shall cross as few hosts as they can."""
    total = sum(host.slots for host in hosts)
    given = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
    if total % stages:
        raise ConfigError(
            f"--pipeline-parallel-size is {stages}, which does not divide the {counted(total, 'rank')} of --hosts "
            f"({given}); give each stage equally many"
        )
    width, first = total // stages, 0
    for host in hosts:
        end = first + host.slots
        stage = first // width
        if end > (stage + 1) * width and (first % width or end % width):
            raise ConfigError(
                f"--pipeline-parallel-size is {stages}: stages of {counted(width, 'rank')} each, in the order of "
                f"--hosts ({given}), but stage {stage} has some of host {host.name}'s ranks and ranks of another host; "
                "change --pipeline-parallel-size, or let each host have whole stages, or each stage whole hosts"
            )
        first = end


def _on_host(facts: Facts, config: PlacementConfig, device: str) -> Placement:
    """Ranks bind their memory themselves: whether numactl may is not known of another host."""
    topology = read_topology(facts.topology)
    if device == "cuda":
        return place_on_gpus(topology, config, tuple(Gpu(**gpu) for gpu in facts.gpus), can_bind=False)
    return place(topology, config, can_bind=False)


def read_topology(values: Mapping[str, Any]) -> Topology:
    """Makes a Topology of its form in JSON."""
    nodes = tuple(
        Node(node["index"], tuple(tuple(core) for core in node["cores"]), node["memory_available"])
        for node in values["nodes"]
    )
    return Topology(nodes, values["cpu_limit"])


def address_in_network(host: str, facts: Facts, config: HostsConfig) -> Address:
    """Returns the host's one address in --mpi-network. Raises ConfigError when it has none or several."""
    network = config.network
    found = [entry for entry in facts.addresses if ipaddress.ip_address(entry.address.partition("%")[0]) in network]
    if len(found) == 1:
        return found[0]
    has = ", ".join(f"{entry.address} ({entry.interface})" for entry in facts.addresses) or "none"
    count = "no address" if not found else f"{len(found)} addresses"
    raise ConfigError(f"host {host} has {count} in --mpi-network {network}, must have one; its addresses: {has}")
