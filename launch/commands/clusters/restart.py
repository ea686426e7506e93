"""`allspan restart`: gives a running cluster new ranks, one replica after another, and waits until all are ready."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

from allspan.launch.commands.clusters.choice import HELP, choose
from allspan.launch.console import say
from allspan.protos.api.errors import Unavailable
from allspan.protos.cluster.running import RunningCluster, read_running, running_clusters
from allspan.protos.config.flags import Parser

POLL_S = 0.1


def make_parser() -> Parser:
    parser = Parser(
        "allspan restart",
        "Restarts the ranks of a running cluster, one replica after another, with the model's files as they are now. "
        "Running requests get the cluster's --shutdown-timeout to finish, and then go on in another replica.",
    )
    parser.add_argument("which", nargs="?", metavar="NAME", help=HELP)
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="X",
        help="Waits at most this many seconds for the new ranks; exit code 1 if they are not ready by then (default: "
        "600).",
    )
    return parser


def run(argv: Sequence[str]) -> int:
    parser = make_parser()
    namespace = parser.parse(argv)
    if not 0 < namespace.timeout < 86400:
        parser.error(f"--timeout is {namespace.timeout:g}, must be above 0 and below 86400 seconds")
    cluster = choose(namespace.which, running_clusters())
    unready = [str(index) for index, replica in enumerate(cluster.replicas) if replica.state != "ready"]
    if unready:
        raise Unavailable(
            f"{cluster.record.name} (pid {cluster.record.pid}) is {cluster.state}: a restart would leave too few "
            f"replicas; wait until replica {', '.join(unready)} is ready"
        )
    _ask(cluster)
    deadline = time.monotonic() + namespace.timeout
    while not _is_renewed(cluster):
        if time.monotonic() > deadline:
            say(f"{cluster.record.name} (pid {cluster.record.pid}) is not ready again within {namespace.timeout:g} s")
            return 1
        time.sleep(POLL_S)
    say(f"{cluster.record.name} (pid {cluster.record.pid}) has been restarted")
    return 0


def _ask(cluster: RunningCluster) -> None:
    handle = os.pidfd_open(cluster.record.pid)
    try:
        if read_running(cluster.run_dir) is None:  # the number may be another process's by now
            raise Unavailable(f"{cluster.record.name} has ended")
        signal.pidfd_send_signal(handle, signal.SIGUSR2)
    finally:
        os.close(handle)


def _is_renewed(before: RunningCluster) -> bool:
    """Returns whether every replica is ready in a later epoch. Raises Unavailable when the cluster has ended."""
    now = read_running(before.run_dir)
    if now is None:
        if not before.run_dir.exists():
            raise Unavailable(f"{before.record.name} has ended")
        return False  # its files are being written
    pairs = zip(before.replicas, now.replicas, strict=False)
    return all(later.state == "ready" and later.epoch > earlier.epoch for earlier, later in pairs)
