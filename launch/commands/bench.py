"""`allspan bench NAME MODEL`: one row of the table a benchmark; each runs on a cluster that is started for it, but for
those of `OTHERS`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from allspan.client.bench.benchmark import Benchmark
from allspan.client.bench.engine import experts as expert_bench
from allspan.client.bench.engine import kernels as kernel_bench
from allspan.client.bench.engine.adapter_loads import ADAPTER_LOADS
from allspan.client.bench.engine.adapters import ADAPTERS
from allspan.client.bench.engine.compare import COMPARE
from allspan.client.bench.engine.embeddings import EMBEDDINGS
from allspan.client.bench.engine.grammar import GRAMMAR
from allspan.client.bench.engine.kernel_tables import markdown, read_report
from allspan.client.bench.engine.latency import LATENCY
from allspan.client.bench.engine.ops import OPS
from allspan.client.bench.engine.perplexity import PERPLEXITY
from allspan.client.bench.engine.pipeline import PIPELINE
from allspan.client.bench.engine.prefix import PREFIX
from allspan.client.bench.engine.speculation import SPECULATION
from allspan.client.bench.engine.step import STEP
from allspan.client.bench.serving import routing as routing_bench
from allspan.client.bench.serving.overload import OVERLOAD
from allspan.client.bench.serving.serve import METRICS, SERVE
from allspan.client.bench.serving.soak import SOAK
from allspan.client.bench.serving.streaming import STREAMING
from allspan.launch.engine_flags import serve_options
from allspan.launch.models.find_model import resolve_model
from allspan.launch.models.hub import HubConfig
from allspan.launch.settings import add_cluster_options, add_model
from allspan.protos.config.flags import Parser, add_options, build, fail, nearest

BENCHMARKS: dict[str, Benchmark] = {
    row.name: row
    for row in (
        LATENCY,
        ADAPTERS,
        ADAPTER_LOADS,
        COMPARE,
        PERPLEXITY,
        PREFIX,
        SPECULATION,
        OPS,
        STEP,
        SERVE,
        STREAMING,
        OVERLOAD,
        SOAK,
        GRAMMAR,
        EMBEDDINGS,
        PIPELINE,
    )
}

KERNELS = "kernels"
"""The name of the benchmark that takes no model, starts no cluster, and runs where the kernels do."""

EXPERTS = "experts"
"""The name of the benchmark that times products with experts on the CPU."""

ROUTING = "routing"
"""The name of the benchmark that simulates the choice of a replica."""


def run(argv: Sequence[str]) -> int:
    names = ", ".join((*BENCHMARKS, *OTHERS))
    if not argv:
        fail("allspan bench", f"which benchmark? there is: {names}", 2)
    if argv[0] in ("-h", "--help"):
        abouts = {row.name: row.about for row in BENCHMARKS.values()} | {
            KERNELS: kernel_bench.ABOUT,
            EXPERTS: expert_bench.ABOUT,
            ROUTING: routing_bench.ABOUT,
        }
        width = max(map(len, abouts))
        print("usage: allspan bench NAME MODEL [flags]; NAME is one of\n")
        print("\n".join(f"  {name.ljust(width)}  {about}" for name, about in abouts.items()))
        return 0
    if argv[0] in OTHERS:
        return OTHERS[argv[0]](argv[1:])
    if argv[0] not in BENCHMARKS:
        known = nearest(argv[0], (*BENCHMARKS, *OTHERS))
        fail("allspan bench", f"unknown benchmark {argv[0]!r}{known}; there is: {names}", 2)
    return _run(BENCHMARKS[argv[0]], argv[1:])


def make_parser(benchmark: Benchmark) -> Parser:
    parser = Parser(f"allspan bench {benchmark.name}", f"{benchmark.about} {benchmark.cluster}")
    add_model(parser)
    add_options(parser, benchmark.config)
    parser.add_argument(
        "--json",
        action="store_true",
        help="Prints a JSON object with all figures, the settings and the machine as the last line.",
    )
    parser.add_argument("--quiet", action="store_true", help="Keeps the cluster's log off standard error.")
    add_cluster_options(parser)
    parser.add_config()
    return parser


def make_other_parser(name: str) -> Parser:
    """Returns the parser of a benchmark of `OTHERS`."""
    about, config = {
        KERNELS: (kernel_bench.ABOUT, kernel_bench.KernelBenchConfig),
        EXPERTS: (expert_bench.ABOUT, expert_bench.ExpertBenchConfig),
        ROUTING: (routing_bench.ABOUT, routing_bench.RoutingBenchConfig),
    }[name]
    parser = Parser(f"allspan bench {name}", about)
    add_options(parser, config)
    help_text = "Prints a JSON object with all figures, the settings and the machine as the last line."
    parser.add_argument("--json", action="store_true", help=help_text)
    return parser


def _run(benchmark: Benchmark, argv: Sequence[str]) -> int:
    namespace = make_parser(benchmark).parse(_with_one_goodput(argv))
    config: Any = build(benchmark.config, namespace)
    if getattr(config, "base_url", ""):  # a server that runs
        report = benchmark.run("", config, quiet=namespace.quiet)
    else:
        model = resolve_model(namespace.model, build(HubConfig, namespace))
        options = serve_options(namespace) | {"served_model_name": model.name, "no_restart": True}
        report = benchmark.run(str(model.path), config, quiet=namespace.quiet, **options)
    print(json.dumps(report) if namespace.json else benchmark.table(report), flush=True)
    return 0


def _with_one_goodput(argv: Sequence[str]) -> list[str]:
    """`--goodput ttft:200 tpot:50`, as vLLM's users write it, as one word with a comma."""
    words: list[str] = []
    for word in argv:
        if ":" in word and len(words) > 1 and words[-2] == "--goodput" and word.split(":")[0] in METRICS:
            words[-1] += f",{word}"
        else:
            words.append(word)
    return words


def _run_kernels(argv: Sequence[str]) -> int:
    config = build(kernel_bench.KernelBenchConfig, make_other_parser(KERNELS).parse(argv))
    if config.markdown:
        print(markdown(read_report(config.markdown)), end="")
        return 0
    report = kernel_bench.run(config, tell=lambda line: print(line, file=sys.stderr, flush=True))
    report["command"] = " ".join(["allspan", "bench", KERNELS, *argv])
    print(json.dumps(report) if "--json" in argv else kernel_bench.table(report), flush=True)
    wrong = any(found["wrong"] for found in report["summary"].values())
    return 1 if wrong or report["broken"] else 0


def _run_routing(argv: Sequence[str]) -> int:
    report = routing_bench.run(build(routing_bench.RoutingBenchConfig, make_other_parser(ROUTING).parse(argv)))
    print(json.dumps(report) if "--json" in argv else routing_bench.table(report), flush=True)
    return 0


def _run_experts(argv: Sequence[str]) -> int:
    config = build(expert_bench.ExpertBenchConfig, make_other_parser(EXPERTS).parse(argv))
    report = expert_bench.run(config, tell=lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(report) if "--json" in argv else expert_bench.table(report), flush=True)
    return 0


OTHERS: dict[str, Callable[[Sequence[str]], int]] = {
    KERNELS: _run_kernels,
    EXPERTS: _run_experts,
    ROUTING: _run_routing,
}
"""The benchmarks that take no model, by name."""
