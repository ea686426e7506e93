"""The `allspan` command. Each subcommand lies in launch/commands/ and is imported only when it runs.

Exit codes: 1 something failed; 2 a flag, config key or field is refused; 3 a model cannot be found or read; 130 Ctrl-C.
"""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from allspan import __version__
from allspan.launch.exit_codes import exit_code
from allspan.protos.api.errors import AllspanError
from allspan.protos.config.flags import fail, nearest
from allspan.protos.config.installed import install_command

COMMANDS = {
    "serve": "serve a model over HTTP (OpenAI's API) and gRPC",
    "chat": "talk to a model in this terminal",
    "generate": "continue one prompt",
    "pull": "fetch a model into the cache and print where it is",
    "convert": "pack, quantise and split a model's weights once, for quick starts",
    "warm": "compile the CUDA kernels ahead of their first use",
    "certs": "make TLS certificates of your own authority",
    "doctor": "check this machine and name the fix for what is missing",
    "plan": "print ranks, threads, memory and context, without loading",
    "bench": "measure speed, caches, quality and endurance: `allspan bench --help`",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; every error of the user's is one line on standard error."""
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # what is started from here must not import the user's ./random.py
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        print(f"allspan {__version__}")
        return 0
    name = words[0]
    if name not in COMMANDS:
        kind = "flag" if name.startswith("-") else "command"
        fail("allspan", f"unknown {kind} {name!r}{nearest(name, list(COMMANDS))}; allspan --help lists all", 2)
    return run_command(name, words[1:])


def run_command(name: str, argv: Sequence[str]) -> int:
    prog = f"allspan {name}"
    _prepare_streams()
    try:
        with _ended_by_sigterm():
            return int(importlib.import_module(f"allspan.launch.commands.{name}").run(argv))
    except AllspanError as error:
        fail(prog, error.message, exit_code(error))
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more at its end
        return 1
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("allspan"):
            raise
        fail(prog, f"the Python package {error.name!r} is missing; {install_command('server')}")
    except OSError as error:
        fail(prog, f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")


def _prepare_streams() -> None:
    """A terminal that cannot show a character gets a question mark; bytes that are no text are refused as a prompt."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM unwinds as Ctrl-C does, so that what was started (pip, a cluster) ends with its command."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: allspan COMMAND [MODEL] [flags]    (allspan COMMAND --help lists the flags)",
            "",
            *lines,
            "",
            "  --version  print the version",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
