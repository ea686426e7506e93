"""`allspan logs`: the log of a running cluster, from its run directory."""

from __future__ import annotations

import json
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import IO

from allspan.launch.commands.clusters.choice import HELP, choose
from allspan.protos.cluster.running import LOG_FILE, read_running, running_clusters
from allspan.protos.config.flags import Parser

POLL_S = 0.1
_SOURCE = re.compile(r"^\S+ [A-Z]+ \[(?:replica \d+, )?(?:rank (\d+)|[^\]]*)\] ")
_LAUNCHER = "allspan: "


def make_parser() -> Parser:
    parser = Parser("allspan logs", "Prints the log of a running cluster: its last MiB or two.")
    parser.add_argument("which", nargs="?", metavar="NAME", help=HELP)
    parser.add_argument("-f", "--follow", action="store_true", help="Goes on with new lines until the cluster ends.")
    parser.add_argument("--rank", type=int, metavar="N", help="Prints only the lines of this rank (of each replica).")
    parser.add_argument("-n", "--tail", type=int, metavar="N", help="Begins with the last N lines.")
    return parser


def run(argv: Sequence[str]) -> int:
    parser = make_parser()
    namespace = parser.parse(argv)
    for flag, value in (("--rank", namespace.rank), ("--tail", namespace.tail)):
        if value is not None and value < 0:
            parser.error(f"{flag} is {value}, must be at least 0")
    run_dir = choose(namespace.which, running_clusters()).run_dir
    wanted = RankFilter(namespace.rank)
    with closing(FollowedLog(run_dir / LOG_FILE)) as log:
        old = [line for line in log.whole() if wanted.takes(line)]
        _print(old if namespace.tail is None else deque(old, maxlen=namespace.tail))
        running = namespace.follow
        while running:
            running = read_running(run_dir) is not None
            _print(line for line in log.new() if wanted.takes(line))
            time.sleep(POLL_S if running else 0)
    return 0


def _print(lines: Iterable[str]) -> None:
    sys.stdout.writelines(lines)
    sys.stdout.flush()


class RankFilter:
    """Chooses the lines of one rank. A line that names no source, as in a traceback, belongs to the line before it."""

    def __init__(self, rank: int | None) -> None:
        self._rank = rank
        self._is_taken = rank is None

    def takes(self, line: str) -> bool:
        if self._rank is None:
            return True
        if line.startswith("{"):
            try:
                source = str(json.loads(line).get("source", ""))
            except (ValueError, AttributeError):
                return self._is_taken
            self._is_taken = source.rpartition("rank ")[2] == str(self._rank) and "rank" in source
        elif line.startswith(_LAUNCHER):
            self._is_taken = False
        elif found := _SOURCE.match(line):
            self._is_taken = found[1] == str(self._rank)
        return self._is_taken


class FollowedLog:
    """The lines of a log that is set aside (as serve.log.1) and begun again when it is long."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None
        self._part = ""

    def whole(self) -> list[str]:
        """Returns all lines so far."""
        lines = []
        with suppress(FileNotFoundError):  # it was never long
            lines = Path(f"{self._path}.1").read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        return [*lines, *self.new()]

    def new(self) -> list[str]:
        """Returns the lines written since the last call."""
        return list(self._lines())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _lines(self) -> Iterator[str]:
        if self._file is None and not self._open():
            return
        yield from self._rest()
        if self._is_replaced() and self._open():
            yield from self._rest()

    def _rest(self) -> Iterator[str]:
        assert self._file is not None
        text = self._part + self._file.read()
        *lines, self._part = text.split("\n")
        yield from (f"{line}\n" for line in lines)

    def _is_replaced(self) -> bool:
        try:
            return self._file is not None and self._path.stat().st_ino != self._inode
        except FileNotFoundError:
            return False

    def _open(self) -> bool:
        try:
            file = open(self._path, encoding="utf-8", errors="replace", newline="\n")  # noqa: SIM115 (it is followed)
        except FileNotFoundError:
            return False
        self.close()
        self._file = file
        self._inode = self._path.stat().st_ino
        return True
