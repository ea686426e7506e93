"""`allspan list`: the models of this machine."""

from __future__ import annotations

import json
from collections.abc import Sequence

from allspan.launch.console import say, size, table
from allspan.launch.models.local_models import local_models
from allspan.protos.config.flags import Parser
from allspan.protos.config.home import models_dir

HEADINGS = ("NAME", "SIZE", "FORMAT", "PATH")


def make_parser() -> Parser:
    parser = Parser(
        "allspan list", "Lists the models of this machine: those that were pulled, and those that were converted."
    )
    parser.add_argument("--json", action="store_true", help="Prints one JSON list.")
    return parser


def run(argv: Sequence[str]) -> int:
    namespace = make_parser().parse(argv)
    models = local_models()
    if namespace.json:
        print(json.dumps([model.as_json() for model in models]))
        return 0
    rows = [(model.name, size(model.num_bytes), model.format, str(model.path)) for model in models]
    print(table([HEADINGS, *rows]))
    if not models:
        say(f"there is no model in {models_dir()} yet; allspan pull fetches one")
    return 0
