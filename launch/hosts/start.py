"""The start of a cluster over several hosts: connects to them, lays the ranks over them, shares certificates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from allspan.launch.hosts.fleet import Fleet
from allspan.launch.hosts.host_list import HostsConfig, check_network, read_hosts
from allspan.launch.hosts.placement import place_over_hosts
from allspan.launch.hosts.remote_shell import find_remote_shell
from allspan.launch.placement.binding import Bound, lay_out
from allspan.launch.placement.placement import PlacementConfig
from allspan.launch.supervision.rank_endpoints import FOLDER, WireConfig
from allspan.protos.cluster.tls import TlsFiles


@contextmanager
def laid_out(hosts: HostsConfig, placement: PlacementConfig, device: str) -> Iterator[tuple[Bound, Fleet | None]]:
    """Lays the ranks over the hosts that are given, else over this one (then without a fleet). The hosts' keepers end
    with this context. Raises ConfigError and Unavailable with the host's name."""
    listed = read_hosts(hosts)
    if not listed:
        yield lay_out(placement, device), None
        return
    check_network(hosts, listed)
    fleet = Fleet(listed, hosts, find_remote_shell(hosts))
    try:
        fleet.connect()
        placed = place_over_hosts(listed, fleet.facts, placement, device)
        fleet.can_shrink = placement.stages == 1
        fleet.place = lambda used: place_over_hosts(used, fleet.facts, replace(placement, ranks=0), device)
        yield Bound(placed, None, "bound by each rank itself"), fleet
    finally:
        fleet.close()


def prepare_wire(wire: WireConfig, fleet: Fleet, run_dir: Path) -> TlsFiles:
    """Makes or copies the certificates of the wire into the run directory, and has every host get them."""
    tls = replace(wire, rank_host=wire.rank_host or "0.0.0.0").prepare(run_dir)
    folder = run_dir / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    names = ("ca.pem", "rank.pem", "rank.key")
    for name, content in zip(names, tls.read(), strict=True):
        path = folder / name
        path.touch(mode=0o600)
        path.write_bytes(content)
        fleet.ship({f"{FOLDER}/{name}": content.decode()})
    ca, certificate, key = (str(folder / name) for name in names)
    return TlsFiles(ca, certificate, key, tls.server_name)
