"""The choice of a running cluster by what a user calls it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from allspan.protos.api.errors import ConfigError, Unavailable
from allspan.protos.cluster.running import RunningCluster, find_by_address

HELP = (
    "Names a running cluster: its model's name, the pid of its launcher, its run directory, or an address that it "
    "serves; may be left out where only one runs."
)


def choose(which: str | None, clusters: Sequence[RunningCluster]) -> RunningCluster:
    """Returns the one cluster meant. Raises Unavailable when none fits, ConfigError when several do."""
    if not clusters:
        raise Unavailable("no cluster of this user is running; allspan serve MODEL starts one")
    found = list(clusters) if which is None else [cluster for cluster in clusters if fits(which, cluster)]
    if not found:
        raise Unavailable(f"no running cluster is called {which!r}; running: {_listed(clusters)}")
    if len(found) > 1:
        meant = "which one?" if which is None else f"{which!r} names {len(found)} running clusters;"
        raise ConfigError(f"{meant} give the pid of one: {_listed(found)}")
    return found[0]


def fits(which: str, cluster: RunningCluster) -> bool:
    """Returns whether a user may mean this cluster by `which`. Names match without case and without their ORG/."""
    name, given = cluster.record.name.lower(), which.lower()
    if given in (name, name.rpartition("/")[2], str(cluster.record.pid), cluster.run_dir.name):
        return True
    if os.path.realpath(Path(which).expanduser()) == os.path.realpath(cluster.run_dir):
        return True
    return ":" in which and find_by_address(which, [cluster]) is not None


def _listed(clusters: Sequence[RunningCluster]) -> str:
    return ", ".join(f"{cluster.record.name} (pid {cluster.record.pid})" for cluster in clusters)
