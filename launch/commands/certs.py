"""`allspan certs FOLDER`: an authority of one's own, and certificates for a server and its clients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from allspan.launch.console import say
from allspan.protos.config.flags import Parser


def make_parser() -> Parser:
    parser = Parser(
        "allspan certs",
        "Makes an authority (ca), and certificates for a server, a client and the agents of several hosts, in FOLDER.",
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="Names a new folder, or one without these files.")
    parser.add_argument(
        "--hosts",
        metavar="TEXT,…",
        default="localhost,127.0.0.1,::1",
        help="Issues the server's and the agents' certificates for these names and addresses (default: %(default)s).",
    )
    return parser


def run(argv: Sequence[str]) -> int:
    namespace = make_parser().parse(argv)
    from allspan.launch.certificates import make_certificates

    hosts = [host.strip() for host in namespace.hosts.split(",") if host.strip()]
    folder = namespace.folder
    make_certificates(folder, hosts)
    say(f"{folder}: the server certificate is for {', '.join(hosts)}; clients trust {folder / 'ca.pem'}")
    say(f"try: allspan serve --ssl-certfile {folder / 'server.pem'} --ssl-keyfile {folder / 'server.key'}")
    say("agents and allspan rsh take ca.pem, agent.pem and agent.key; who has agent.key runs commands on those hosts")
    return 0
