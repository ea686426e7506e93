"""`allspan gateway`: HTTP and gRPC for a cluster that another `allspan serve` has started."""

from __future__ import annotations

from collections.abc import Sequence

from allspan.client.gateway.config import GROUPS, GatewayConfig
from allspan.launch.gateway import AttachConfig, run_gateway
from allspan.launch.logs import LogConfig, begin_log
from allspan.launch.settings import ResumeConfig, add_flags, gateway_config
from allspan.protos.config.flags import Parser, build


def make_parser() -> Parser:
    parser = Parser(
        "allspan gateway",
        "Serves HTTP and gRPC for a cluster that `allspan serve --no-gateway` (or another gateway's cluster) runs. Any "
        "number of gateways may serve one cluster.",
    )
    parser.add_argument(
        "--attach",
        action="append",
        default=[],
        metavar="WHERE",
        help="Names the cluster: its run directory or an address at which it serves on this host; or the ranks' "
        "addresses, HOST:PORT of rank 0 first, separated by commas. Give the flag once for each replica.",
    )
    add_flags(parser, AttachConfig)
    gateway = parser.group("gateway", "where HTTP and gRPC are served")
    add_flags(gateway, GatewayConfig, skip=tuple(GROUPS))
    for name, (title, group) in GROUPS.items():
        add_flags(parser.group(name, title), group)
    add_flags(parser.group("failures", "when ranks die or do not answer"), ResumeConfig)
    add_flags(parser.group("logging", "lines on standard error"), LogConfig)
    parser.add_config()
    return parser


def run(argv: Sequence[str]) -> int:
    namespace = make_parser().parse(argv)
    begin_log(build(LogConfig, namespace))
    return run_gateway(
        namespace.attach, build(AttachConfig, namespace), gateway_config(namespace), build(ResumeConfig, namespace)
    )
