"""`allspan serve MODEL`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from allspan.client.gateway.config import GROUPS
from allspan.launch.exit_codes import exit_code
from allspan.launch.logs import begin_log, copy_stderr
from allspan.launch.serve import failed_line, serve
from allspan.launch.settings import serve_parser, serve_settings
from allspan.protos.api.errors import AllspanError
from allspan.protos.config.installed import require_ranks

make_parser = serve_parser


def run(argv: Sequence[str]) -> int:
    parser = make_parser()
    defaults = {action.dest: action.default for action in reversed(parser._actions)}  # before a file changes them
    namespace = parser.parse(argv)
    settings = replace(serve_settings(namespace), given=given(namespace, defaults))
    copy = copy_stderr()
    begin_log(settings.log)
    try:
        require_ranks()
        return serve(settings, copy)
    except AllspanError as error:
        if settings.gateway is None:
            # Read by the program that started this one, which tells it to its user: no second line on standard error.
            print(failed_line(error.code, error.message), flush=True)
            return exit_code(error)
        raise


def given(namespace: argparse.Namespace, defaults: Mapping[str, object]) -> str:
    """Returns the settings that differ from their defaults, whether from a flag, a file or a variable; keys are
    hidden."""
    secret = {field.name for _, group in GROUPS.values() for field in fields(group) if not field.repr} | {"hf_token"}
    told = []
    for name, value in sorted(vars(namespace).items()):
        if name not in ("model", "config") and value != defaults.get(name):
            told.append(f"{name}={'***' if name in secret else repr(value)}")
    return ", ".join(told) or "all flags at their defaults"
