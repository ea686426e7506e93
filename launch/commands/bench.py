"""`allspan bench NAME MODEL`: one row of the table a benchmark; each runs on a cluster that is started for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from allspan.client.bench.benchmark import Benchmark
from allspan.client.bench.compare import COMPARE
from allspan.client.bench.latency import LATENCY
from allspan.client.bench.ops import OPS
from allspan.client.bench.overload import OVERLOAD
from allspan.client.bench.perplexity import PERPLEXITY
from allspan.client.bench.prefix import PREFIX
from allspan.client.bench.soak import SOAK
from allspan.client.bench.step import STEP
from allspan.launch.models import resolve_model
from allspan.launch.session import serve_options
from allspan.launch.settings import add_cluster_options, add_model
from allspan.protos.flags import Parser, add_options, build, fail, nearest

BENCHMARKS: dict[str, Benchmark] = {
    row.name: row for row in (LATENCY, COMPARE, PERPLEXITY, PREFIX, OPS, STEP, OVERLOAD, SOAK)
}


def run(argv: Sequence[str]) -> int:
    names = ", ".join(BENCHMARKS)
    if not argv:
        fail("allspan bench", f"which benchmark? there is: {names}", 2)
    if argv[0] in ("-h", "--help"):
        width = max(map(len, BENCHMARKS))
        print("usage: allspan bench NAME MODEL [flags]; NAME is one of\n")
        print("\n".join(f"  {row.name.ljust(width)}  {row.about}" for row in BENCHMARKS.values()))
        return 0
    if argv[0] not in BENCHMARKS:
        known = nearest(argv[0], tuple(BENCHMARKS))
        fail("allspan bench", f"unknown benchmark {argv[0]!r}{known}; there is: {names}", 2)
    return _run(BENCHMARKS[argv[0]], argv[1:])


def _run(benchmark: Benchmark, argv: Sequence[str]) -> int:
    parser = Parser(f"allspan bench {benchmark.name}", f"{benchmark.about} A cluster is started for it.")
    add_model(parser)
    add_options(parser, benchmark.config)
    parser.add_argument("--json", action="store_true", help="The last line is a JSON object with all of it.")
    parser.add_argument("--quiet", action="store_true", help="Keep the cluster's log off standard error.")
    add_cluster_options(parser)
    parser.add_config()
    namespace = parser.parse(argv)
    config: Any = build(benchmark.config, namespace)
    model = resolve_model(namespace.model)
    options = serve_options(namespace) | {"served_model_name": model.name, "no_restart": True}
    report = benchmark.run(str(model.path), config, quiet=namespace.quiet, **options)
    print(json.dumps(report) if namespace.json else benchmark.table(report), flush=True)
    return 0
