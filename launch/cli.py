"""The `allspan` command. Each subcommand lies in launch/commands/ and is imported only when it runs.

Exit codes: 1 something failed; 2 a flag, config key, field or model file is refused; 3 a model cannot be found; 130
Ctrl-C; 141 nobody reads standard output any more, as in `allspan list | head -1`.
"""

from __future__ import annotations

import importlib
import io
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType, ModuleType

from allspan import __version__
from allspan.launch.exit_codes import exit_code
from allspan.protos.api.errors import AllspanError
from allspan.protos.config.flags import fail, nearest
from allspan.protos.config.installed import install_command
from allspan.protos.config.known_elsewhere import COMMANDS as ELSEWHERE

COMMANDS = {
    "serve": "serve a model over HTTP (OpenAI's API) and gRPC",
    "chat": "talk to a model in this terminal",
    "generate": "continue one prompt",
    "ps": "list the running clusters",
    "stop": "stop a running cluster",
    "restart": "give a running cluster new ranks, one replica after another",
    "gateway": "serve HTTP and gRPC for a cluster that runs elsewhere",
    "logs": "print or follow the log of a running cluster",
    "pull": "fetch a model into the cache and print where it is",
    "list": "list the models of this machine",
    "rm": "remove a pulled model",
    "convert": "pack, quantise and split a model's weights once, for quick starts",
    "warm": "compile the CUDA kernels ahead of their first use",
    "agent": "run commands on this host for others: ranks of worlds over several hosts",
    "rsh": "run a command on a host that has an agent, as ssh does",
    "certs": "make TLS certificates of your own authority",
    "doctor": "check this machine and name the fix for what is missing",
    "plan": "print ranks, threads, memory and context, without loading",
    "bench": "measure speed, caches, quality and endurance: `allspan bench --help`",
    "completion": "print a script that completes commands and flags in bash, zsh or fish",
}
_FOLDERS = {"clusters": ("ps", "stop", "restart", "logs"), "models": ("pull", "list", "rm", "convert")}
"""Commands that lie in a folder of launch/commands, by the folder."""
INTERRUPTED = 130
BROKEN_PIPE = 128 + signal.SIGPIPE
_HELP, _VERSION = ("-h", "--help", "help"), ("-v", "-V", "--version")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; every error of the user's is one line on standard error."""
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # what is started from here must not import the user's ./random.py
    words = list(sys.argv[1:] if argv is None else argv)
    prog = f"allspan {words[0]}" if words and words[0] in COMMANDS else "allspan"
    return _reported(prog, lambda: _dispatch(words))


def command_module(name: str) -> ModuleType:
    """Returns the module of a command: it has `run(argv) -> exit code` and, but for bench, `make_parser()`."""
    folder = next((f"{folder}." for folder, names in _FOLDERS.items() if name in names), "")
    return importlib.import_module(f"allspan.launch.commands.{folder}{name}")


def _dispatch(words: Sequence[str]) -> int:
    if not words or words[0] in _HELP:
        if len(words) > 1 and words[1] in COMMANDS:
            return _run_command(words[1], ["--help", *words[2:]])
        print(usage())
        return 0 if words else 2
    if words[0] in _VERSION:
        print(f"allspan {__version__}")
        return 0
    if words[0] not in COMMANDS:
        _refuse(words[0])
    return _run_command(words[0], words[1:])


def _refuse(name: str) -> None:
    """Ends the program with a line that names what was meant instead of the command `name`, as far as that is known."""
    kind = "flag" if name.startswith("-") else "command"
    if instead := ELSEWHERE.get(name.lower()):
        meant = f": use allspan {instead}"
    elif "/" in name or name.endswith(".gguf"):
        meant = f"; a model follows a command, as in: allspan serve {name}"
    else:
        meant = nearest(name, list(COMMANDS))
    fail("allspan", f"unknown {kind} {name!r}{meant}; allspan --help lists all", 2)


def _run_command(name: str, argv: Sequence[str]) -> int:
    _prepare_streams()
    with _ended_by_sigterm():
        return int(command_module(name).run(argv))


def _reported(prog: str, run: Callable[[], int]) -> int:
    """Runs a command and turns what ends it into one line and an exit code."""
    try:
        try:
            return run()
        finally:
            if sys.stdout is not None:  # it is when the program was started with a closed standard output
                sys.stdout.flush()
    except AllspanError as error:
        fail(prog, error.message, exit_code(error))
    except KeyboardInterrupt:
        _say_interrupted(prog)
        return INTERRUPTED
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("allspan"):
            raise
        fail(prog, f"the Python package {error.name!r} is missing; {install_command('server')}")
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _let_go_of_readers():
            return BROKEN_PIPE
        _let_go_of_readers()
        fail(prog, f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")


def _say_interrupted(prog: str) -> None:
    with suppress(OSError):
        print(f"{'' if not sys.stderr.isatty() else chr(10)}{prog}: interrupted", file=sys.stderr, flush=True)


def _let_go_of_readers() -> bool:
    """Returns whether standard output or standard error is a pipe that nobody reads any more. What is still buffered
    for an output that takes nothing goes nowhere: the interpreter flushes it once more at its end."""
    found = False
    for stream in (sys.stdout, sys.stderr):
        try:
            number = stream.fileno()
            poller = select.poll()
            poller.register(number, 0)
            broken = bool(poller.poll(0))
            stream.flush()
        except (AttributeError, ValueError):  # closed, or none at all
            continue
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        else:
            if broken:
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        found = found or broken
    return found


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
            "  -v, --version  print the version",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
