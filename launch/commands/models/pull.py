"""`allspan pull NAME`: fetches a model and prints its path."""

from __future__ import annotations

from collections.abc import Sequence

from allspan.launch.console import say
from allspan.launch.models.checkpoint_files import check_files, check_tokenizer
from allspan.launch.models.find_model import resolve_model
from allspan.launch.models.hub import HubConfig
from allspan.launch.settings import add_model
from allspan.protos.config.flags import Parser, build


def make_parser() -> Parser:
    parser = Parser("allspan pull", "Fetches a model into $ALLSPAN_HOME (default ~/.cache/allspan).")
    add_model(parser, grouped=False)
    parser.add_argument(
        "--print-path", action="store_true", help="Prints the path of the folder or file as the last line."
    )
    return parser


def run(argv: Sequence[str]) -> int:
    namespace = make_parser().parse(argv)
    found = resolve_model(namespace.model, build(HubConfig, namespace))
    check_files(found.path)
    check_tokenizer(found.path)
    if namespace.print_path:
        print(found.path)
    else:
        say(f"{found.name}: {found.path}")
    return 0
