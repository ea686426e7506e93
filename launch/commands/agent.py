"""`allspan agent`: runs commands on this host for others that hold a certificate."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from allspan.launch.console import say
from allspan.launch.hosts.agent.endpoint import LIMITS, AgentConfig, from_environment, target
from allspan.protos.config.flags import Parser, add_options, build


def make_parser() -> Parser:
    parser = Parser(
        "allspan agent", "Runs commands on this host for `allspan rsh` of others: their way to start ranks here."
    )
    parser.add_argument(
        "--agent-host",
        default="127.0.0.1",
        metavar="TEXT",
        help="Listens on this address (0.0.0.0: all); off the loopback only with certificates (default: %(default)s).",
    )
    add_options(parser, AgentConfig, skip=("host_timeout",), limits=LIMITS)
    parser.set_defaults(**from_environment("host_timeout"))
    return parser


def run(argv: Sequence[str]) -> int:
    namespace = make_parser().parse(argv)
    from allspan.launch.hosts.agent.server import AgentServer, AgentService

    config = build(AgentConfig, namespace)
    server = AgentServer(AgentService(config, say), namespace.agent_host, config)
    try:
        kind = "with TLS" if config.tls.is_given else "without TLS: every user of this machine may run commands here"
        say(f"the agent listens on {target(namespace.agent_host, server.port)}, {kind}")
        signal.pause()
    finally:
        server.stop()
    return 0
