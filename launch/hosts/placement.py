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
    if config.ranks not in (0, total):
        raise ConfigError(f"--ranks is {config.ranks}, --hosts gives {total}; leave --ranks out, or change one of them")
    if config.bind not in ("auto", "none"):
        raise ConfigError(f"--bind is {config.bind!r}, must be auto or none with --hosts")
    places: list[RankPlace] = []
    oversubscribed = False
    for host in hosts:
        try:
            mine = _on_host(facts[host.name], replace(config, ranks=host.slots), device)
        except ConfigError as error:
            raise ConfigError(f"host {host.name}: {error.message}") from error
        oversubscribed |= mine.oversubscribed
        places += [replace(entry, rank=len(places) + i, host=host.name) for i, entry in enumerate(mine.ranks)]
    return Placement(tuple(places), oversubscribed)


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
