"""`allspan warm`: compiles the CUDA kernels into the cache, so that no first use has to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from allspan.launch.console import say, size
from allspan.launch.install.compile_kernels import warm
from allspan.protos.config.flags import Parser
from allspan.protos.config.installed import require_ranks


def make_parser() -> Parser:
    parser = Parser("allspan warm", "Compiles the CUDA kernels into $ALLSPAN_HOME/kernels (default ~/.cache/allspan).")
    parser.add_argument(
        "--arch",
        default="",
        metavar="NAMES",
        help="Compiles for these architectures, such as sm_80,sm_90a, without a GPU (default: those of the GPUs here).",
    )
    parser.add_argument("--json", action="store_true", help="Prints one JSON object.")
    return parser


def run(argv: Sequence[str]) -> int:
    namespace = make_parser().parse(argv)
    require_ranks()
    done = warm([name for name in namespace.arch.split(",") if name])
    if namespace.json:
        print(json.dumps(asdict(done), default=str))
        return 0
    for one in done.architectures:
        say(
            f"{one.architecture}: compiled {one.compiled} sources in {one.seconds:.1f} s by {done.compiler}, "
            f"{one.found} were there; {size(one.num_bytes)} in {done.folder}"
        )
    return 0
