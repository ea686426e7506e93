"""`allspan doctor`: checks this machine; each line is ok, warn or fail, the last two with the fix."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from allspan.launch.hosts.checks.check_hosts import check_hosts
from allspan.launch.hosts.host_list import HostsConfig
from allspan.launch.install.doctor import check_all
from allspan.launch.settings import add_flags
from allspan.protos.config.flags import Parser, build


def make_parser() -> Parser:
    parser = Parser(
        "allspan doctor", "Checks this machine and names the fix for what is missing; exit code 1 on a fail."
    )
    parser.add_argument("--json", action="store_true", help="Prints one JSON list of the findings.")
    parser.add_argument(
        "--port", type=int, default=8000, metavar="N", help="Checks whether this HTTP port is free (default: 8000)."
    )
    parser.add_argument(
        "--grpc-port",
        type=int,
        default=50051,
        metavar="N",
        help="Checks whether this gRPC port is free (default: 50051).",
    )
    add_flags(parser.group("hosts", "checks each of these hosts, too"), HostsConfig, skip=("host_timeout",))
    return parser


def run(argv: Sequence[str]) -> int:
    namespace = make_parser().parse(argv)
    findings = check_hosts(build(HostsConfig, namespace, host_timeout=HostsConfig.host_timeout))
    findings = check_all((namespace.port, namespace.grpc_port)) + findings
    if namespace.json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        for finding in findings:
            fix = f"; fix: {finding.fix}" if finding.fix else ""
            print(f"{finding.status:<4}  {finding.name:<9}  {finding.text}{fix}")
    return 1 if any(finding.status == "fail" for finding in findings) else 0
