"""`allspan stop`: ends running clusters, and waits until they have ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress

from allspan.launch.commands.clusters.choice import HELP, choose
from allspan.launch.console import say
from allspan.launch.supervision.world import is_readable
from allspan.protos.cluster.running import RunningCluster, read_running, running_clusters
from allspan.protos.config.flags import Parser

KILL_AFTER_S = 5.0
"""Seconds that a launcher has to end everything at once before it is killed, and its reaper cleans up."""


def make_parser() -> Parser:
    parser = Parser("allspan stop", "Stops a running cluster: its running requests may finish within its own limit.")
    parser.add_argument("which", nargs="?", metavar="NAME", help=f"{HELP} The word `all` stops every cluster.")
    parser.add_argument(
        "--now", action="store_true", help="Ends it at once; running requests fail with the reason that it stopped."
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="X",
        help="Waits at most this many seconds for the end; exit code 1 if it has not come by then (default: 60).",
    )
    return parser


def run(argv: Sequence[str]) -> int:
    parser = make_parser()
    namespace = parser.parse(argv)
    if not 0 < namespace.timeout < 86400:
        parser.error(f"--timeout is {namespace.timeout:g}, must be above 0 and below 86400 seconds")
    clusters = running_clusters()
    if namespace.which == "all":
        chosen = clusters
        if not chosen:
            say("no cluster of this user is running")
    else:
        chosen = [choose(namespace.which, clusters)]
    handles = [(cluster, handle) for cluster in chosen if (handle := _ask(cluster, namespace.now)) is not None]
    deadline = time.monotonic() + namespace.timeout
    left = [cluster for cluster, handle in handles if not _ended(cluster, handle, deadline, namespace.now)]
    for cluster in left:
        say(
            f"{cluster.record.name} (pid {cluster.record.pid}) has not ended within {namespace.timeout:g} s; "
            f"allspan stop --now {cluster.record.pid} ends it at once"
        )
    return 1 if left else 0


def _ask(cluster: RunningCluster, now: bool) -> int | None:
    """Sends the launcher the signal to end, or both signals for an end at once; returns a descriptor of its process,
    None when it has ended meanwhile."""
    try:
        handle = os.pidfd_open(cluster.record.pid)
    except ProcessLookupError:
        return None
    if read_running(cluster.run_dir) is None:  # the number may be another process's by now
        os.close(handle)
        return None
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        if now:
            signal.pidfd_send_signal(handle, signal.SIGINT)  # the launcher takes a second signal for "at once"
    return handle


def _ended(cluster: RunningCluster, handle: int, deadline: float, now: bool) -> bool:
    """Waits for a launcher's end. One that is to end at once and does not (it is stopped, or hangs) is killed."""
    try:
        left = max(0.0, deadline - time.monotonic())
        over = is_readable([handle], min(KILL_AFTER_S, left) if now else left)
        if not over and now:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            over = is_readable([handle], KILL_AFTER_S)
        if over:
            until = time.monotonic() + KILL_AFTER_S  # a reaper may still be removing what a killed launcher left
            while now and cluster.run_dir.exists() and time.monotonic() < until:
                time.sleep(0.05)
            say(f"{cluster.record.name} (pid {cluster.record.pid}) has stopped")
        return over
    finally:
        os.close(handle)
