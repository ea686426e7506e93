"""`allspan bench latency MODEL`: time to first token, prefill and decode speed of one batch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from allspan.client.bench.latency import LatencyConfig, run_latency
from allspan.launch.console import size
from allspan.launch.models import resolve_model
from allspan.launch.session import serve_options
from allspan.launch.settings import add_cluster_options, add_model
from allspan.protos.flags import Parser, add_options, build, fail, nearest

KINDS = ("latency",)


def run(argv: Sequence[str]) -> int:
    if argv and argv[0] not in (*KINDS, "-h", "--help"):
        fail(
            "allspan bench", f"unknown benchmark {argv[0]!r}{nearest(argv[0], KINDS)}; there is: {', '.join(KINDS)}", 2
        )
    parser = Parser("allspan bench latency", "Measures one batch of equal requests on a cluster started for it.")
    add_model(parser)
    add_options(parser, LatencyConfig)
    parser.add_argument("--json", action="store_true", help="The last line is a JSON object with all of it.")
    parser.add_argument("--quiet", action="store_true", help="Keep the cluster's log off standard error.")
    add_cluster_options(parser)
    parser.add_config()
    if not argv:
        parser.error(f"which benchmark? there is: {', '.join(KINDS)}")
    namespace = parser.parse(argv[1:] if argv[0] in KINDS else argv)
    config = build(LatencyConfig, namespace)
    model = resolve_model(namespace.model)
    options = serve_options(namespace) | {"served_model_name": model.name, "no_restart": True}
    report = run_latency(str(model.path), config, quiet=namespace.quiet, **options)
    if namespace.json:
        print(json.dumps(report), flush=True)
    else:
        print(table(report))
    return 0


def table(report: dict[str, Any]) -> str:
    return "\n".join(
        [
            f"prefill            {report['prefill_tokens_per_s']:10.1f} tokens/s",
            f"decode             {report['decode_tokens_per_s']:10.1f} tokens/s",
            f"time to first      {report['ttft_s'] * 1000:10.1f} ms",
            f"host work a step   {report['host_s_per_step'] * 1e6:10.0f} us",
            f"load               {report['load_s']:10.1f} s",
            f"peak memory        {', '.join(size(value) for value in report['peak_rss_bytes'])} (rank by rank)",
        ]
    )
