"""`allspan ps`: the running clusters of this user."""

from __future__ import annotations

import json
from collections.abc import Sequence

from allspan.launch.console import duration, table
from allspan.protos.cluster.running import RunningCluster, running_clusters
from allspan.protos.config.flags import Parser

HEADINGS = ("NAME", "PID", "STATE", "RANKS", "UPTIME", "HTTP", "GRPC", "RUN DIRECTORY")


def make_parser() -> Parser:
    parser = Parser("allspan ps", "Lists the running clusters of this user, wherever their run directories are.")
    parser.add_argument("--json", action="store_true", help="Prints one JSON list, with the processes of the ranks.")
    return parser


def run(argv: Sequence[str]) -> int:
    namespace = make_parser().parse(argv)
    clusters = running_clusters()
    if namespace.json:
        print(json.dumps([cluster.as_json() for cluster in clusters]))
    else:
        print(table([HEADINGS, *map(row, clusters)]))
    return 0


def row(cluster: RunningCluster) -> tuple[str, ...]:
    record = cluster.record
    here = sum(len(replica.ranks) for replica in cluster.replicas if replica.state == "ready")
    ranks = str(record.num_ranks) if here in (0, record.num_ranks) else f"{here}/{record.num_ranks}"
    return (
        record.name,
        str(record.pid),
        cluster.state,
        ranks,
        duration(cluster.uptime_s),
        record.http or "-",
        record.grpc or "-",
        str(cluster.run_dir),
    )
