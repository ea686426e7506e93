"""`allspan serve MODEL`."""

from __future__ import annotations

from collections.abc import Sequence

from allspan.launch.exit_codes import exit_code
from allspan.launch.serve import failed_line, serve
from allspan.launch.settings import serve_parser, serve_settings
from allspan.protos.errors import AllspanError

make_parser = serve_parser


def run(argv: Sequence[str]) -> int:
    settings = serve_settings(make_parser().parse(argv))
    try:
        return serve(settings)
    except AllspanError as error:
        if settings.gateway is None:
            # Read by the program that started this one, which tells it to its user: no second line on standard error.
            print(failed_line(error.code, error.message), flush=True)
            return exit_code(error)
        raise
