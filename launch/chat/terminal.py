"""Input of a conversation: lines from a terminal with editing and a history, or from a pipe."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from allspan.protos.api.errors import ConfigError
from allspan.protos.config.home import home

HISTORY_LINES = 1000
_QUOTES = '"""'


class Terminal:
    """Reads messages; use it as a context manager, so that the history is kept."""

    def __init__(self, keep_history: bool = True) -> None:
        """`keep_history`: reads earlier lines from a file that only this user may read, and keeps new ones there."""
        self._is_terminal = sys.stdin.isatty()
        self._history = _history_file() if keep_history and self._is_terminal else None

    def __enter__(self) -> Terminal:
        if self._is_terminal:
            import readline

            readline.set_history_length(HISTORY_LINES)
            if self._history is not None:
                with suppress(OSError):  # there is none yet
                    readline.read_history_file(self._history)
        return self

    def __exit__(self, *error: object) -> None:
        if self._history is None:
            return
        import readline

        with suppress(OSError):  # a history that cannot be kept is no reason to fail
            self._history.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self._history, os.O_WRONLY | os.O_CREAT, 0o600))
            readline.write_history_file(self._history)

    def message(self) -> str | None:
        """Returns the next message; None at the end of the input. Ctrl-C drops what was typed of it."""
        while True:
            try:
                return self._message()
            except EOFError:
                if self._is_terminal:
                    print(file=sys.stderr)
                return None
            except KeyboardInterrupt:
                if not self._is_terminal:
                    raise
                print(file=sys.stderr)

    def _message(self) -> str:
        line = self._line("> ")
        if line.lstrip().startswith(_QUOTES):
            return self._quoted(line.lstrip().removeprefix(_QUOTES))
        while line.endswith("\\"):
            line = f"{line[:-1]}\n{self._line('… ')}"
        return line

    def _quoted(self, line: str) -> str:
        lines = []
        while not line.rstrip().endswith(_QUOTES):
            lines.append(line)
            line = self._line("… ")
        return "\n".join([*lines, line.rstrip().removesuffix(_QUOTES)]).strip("\n")

    def _line(self, prompt: str) -> str:
        return input(prompt if self._is_terminal else "")


def _history_file() -> Path | None:
    try:
        return home() / "chat_history"
    except ConfigError:
        return None
