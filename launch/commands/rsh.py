"""`allspan rsh HOST COMMAND…`: runs a command on a host that has an agent, as ssh does."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from allspan.launch.hosts.agent.endpoint import LIMITS, AgentConfig, from_environment
from allspan.protos.api.errors import ConfigError
from allspan.protos.config.flags import Parser, add_options, build


def make_parser() -> Parser:
    parser = Parser(
        "allspan rsh",
        "Runs COMMAND in a shell on HOST, where `allspan agent` runs, as ssh does: words are joined by blanks; "
        "standard input, output and error are passed on; the exit status is the command's, 128 + the signal that "
        "ended it, or 255 when the agent cannot be reached or is silent.",
    )
    add_options(parser, AgentConfig, skip=("agent_peer_name",), limits=LIMITS)
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="Sets a variable for the command; repeatable."
    )
    parser.add_argument("host", metavar="HOST", help="Names the host, as its certificate does.")
    parser.add_argument("command", metavar="COMMAND", nargs="*", help="The command, for /bin/sh -c.")
    parser.set_defaults(**from_environment("agent_peer_name"))
    return parser


def run(argv: Sequence[str]) -> NoReturn:
    flags, command = _split(argv)
    namespace = make_parser().parse(flags)
    env = dict(_pair(text) for text in namespace.env)
    if not command:
        raise ConfigError(f"give a command to run on {namespace.host}, as in: allspan rsh {namespace.host} hostname")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what went wrong is told by this program, in one line
    from allspan.launch.hosts.agent.client import LOST, Streams, execute

    def say(text: str) -> None:
        print(f"allspan rsh: {text}", file=sys.stderr, flush=True)

    try:
        status = execute(namespace.host, " ".join(command), env, build(AgentConfig, namespace), Streams(0, 1, 2, say))
    except ConfigError as error:
        say(error.message)
        status = LOST
    # A thread waits in a read of standard input, others in grpc. The interpreter stops them wherever they are, and then
    # waits for ever for a lock of grpc that one of them held.
    os._exit(status)


def _split(argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Returns the flags with HOST, and COMMAND, whose words are another program's, whatever they look like."""
    at = 0
    while at < len(argv) and argv[at].startswith("-") and argv[at] not in ("-h", "--help"):
        at += 1 if "=" in argv[at] else 2
    if at < len(argv) and argv[at] in ("-h", "--help"):
        return argv, ()
    return argv[: at + 1], argv[at + 1 :]


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign):
        raise ConfigError(f"--env is {text!r}, must be NAME=VALUE")
    return name, value
