"""mpirun's own messages among the ranks' output: parsed for the cause of a rank's failure, and hidden from the user's
terminal."""

from __future__ import annotations

import re
from dataclasses import dataclass

_OPEN_MPI = re.compile(
    r"process rank (?P<rank>\d+) with PID (?P<pid>\d+) on node (?P<host>\S+) exited on signal (?P<signal>\d+)"
)
_MPICH = re.compile(
    r"PID (?P<pid>\d+) RUNNING AT (?P<host>\S+)[\s=]+EXIT CODE: (?P<code>\d+).*?\(signal (?P<signal>\d+)\)"
)
_LOST_DAEMON = re.compile(r"lost communication with a remote daemon.*? Remote daemon: \S+ on node (?P<host>\S+)")
_SILENT_DAEMON = re.compile(r"daemon failed to report back after being spawned.*? Remote host: (?P<host>\S+)")
_ERROR_LINE = re.compile(rb"allspan\.worker: rank \d+: ")
_ENDS = re.compile(rb"(?<=[\r\n])")
_RULE = re.compile(rb"\s*(-{40,}|={40,})\s*")


@dataclass(frozen=True)
class RankDeath:
    """The first rank that died by a signal. MPICH gives no rank: -1 there."""

    rank: int
    pid: int
    host: str
    signal: int


def find_death(output: str) -> RankDeath | None:
    """Parses mpirun's message about a failed rank (its lines break anywhere); None when there is none."""
    text = " ".join(output.split())
    if match := _OPEN_MPI.search(text):
        return RankDeath(int(match["rank"]), int(match["pid"]), match["host"], int(match["signal"]))
    if match := _MPICH.search(text):
        return RankDeath(-1, int(match["pid"]), match["host"], int(match["signal"]))
    return None


def find_lost_daemon(output: str) -> str:
    """Returns the host whose daemon Open MPI says it has lost or never heard of; "" when it says no such thing."""
    text = " ".join(output.split())
    match = _LOST_DAEMON.search(text) or _SILENT_DAEMON.search(text)
    return match["host"] if match else ""


class NoticeFilter:
    """Drops mpirun's notices, which stand between two rules of dashes (or equals signs), and the ranks' final error
    lines, which the supervisor reports itself; passes everything else on, in whole lines or states of a progress bar.

    mpirun passes on pieces of any length; a piece of a line would meet the lines that other processes write meanwhile.
    """

    def __init__(self) -> None:
        self._held = b""
        self._inside = False

    def pass_on(self, data: bytes) -> bytes:
        """Returns the part of `data` (and of earlier data held back) that is to be shown."""
        # Open MPI 5 ends some notices with a zero byte.
        *whole, self._held = _ENDS.split(self._held + data.replace(b"\0", b""))
        return b"".join(line for line in whole if self._is_shown(line))

    def rest(self) -> bytes:
        """Returns the last line, which nothing ended, if it is to be shown; for the end of the data."""
        line, self._held = self._held, b""
        return line + b"\n" if line and self._is_shown(line) else b""

    def _is_shown(self, line: bytes) -> bool:
        if _RULE.fullmatch(line):
            self._inside = not self._inside
            return False
        return not self._inside and not _ERROR_LINE.match(line)
