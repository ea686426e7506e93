"""The ranks of one host, known by the files that they and their starters write into the run directory."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allspan.launch.hosts import rank_shell
from allspan.launch.supervision.oom import OomWatch
from allspan.launch.supervision.watchdog import Watchdog
from allspan.protos.cluster.cluster_file import CLUSTER_FILE, RankInfo, error_file, read_rank

KNOWN = re.compile(r"(?P<kind>rank|start|exit)-(?P<rank>\d+)\.e(?P<epoch>\d+)(?P<end>\.json|\.error|)")
LAST_WORDS = 2048
"""Bytes of a rank's log that its exit message carries."""
FILE_WAIT_S = 0.25
"""Seconds that the starter of an ended rank has to write how it ended."""


@dataclass
class _Rank:
    pid: int
    pidfd: int
    signalled: int = 0
    """The last signal that the supervisor had sent to it."""
    ended_at: float | None = None
    """The monotonic time at which its end was seen."""
    told: bool = False


class HostRanks:
    """Tells the supervisor of this host's ranks by `tell`. Call `look` whenever a file has changed, and at least every
    quarter of a second."""

    def __init__(self, folder: Path, tell: Callable[[dict[str, Any]], None], limits_s: tuple[float, float]) -> None:
        """`limits_s`: the watchdog's limit, and that for reading weights."""
        self._folder = folder
        self._tell = tell
        self._limits_s = limits_s
        self._seen: dict[str, tuple[int, int]] = {}
        self._ranks: dict[tuple[int, int], _Rank] = {}
        self._infos: dict[tuple[int, int], RankInfo] = {}
        self._watchdogs: dict[int, Watchdog] = {}
        self._lost: set[int] = set()
        self._oom = OomWatch()

    def look(self) -> None:
        """Reads new and changed files, and tells of ranks that ended."""
        changed = [name for name in self._changed() if name == CLUSTER_FILE or KNOWN.fullmatch(name)]
        for name in sorted(changed, key=lambda name: ("exit-" in name, "start-" not in name)):
            match = KNOWN.fullmatch(name)
            if match is None or match["end"] == ".error":
                with suppress(OSError):
                    text = (self._folder / name).read_text(encoding="utf-8", errors="replace")
                    self._tell({"is": "file", "path": name, "text": text})
                continue
            key = int(match["epoch"]), int(match["rank"])
            if match["kind"] == "rank":
                self._take_info(key)
            elif match["kind"] == "start":
                with suppress(OSError, ValueError):
                    self._take_start(key, json.loads((self._folder / name).read_text())["pid"])
            else:
                with suppress(OSError, ValueError):
                    self._tell_exit(key, json.loads((self._folder / name).read_text()))
        self._look_for_ends()

    def watch(self) -> None:
        """Checks the ranks' heartbeats: call it every watchdog.LOOK_S."""
        for epoch in {epoch for epoch, _ in self._infos} - self._lost:
            alive = [
                info
                for key, info in self._infos.items()
                if key[0] == epoch and key in self._ranks and self._ranks[key].ended_at is None
            ]
            for info in alive:
                self._oom.note(info.pid)
            watchdog = self._watchdogs.setdefault(epoch, Watchdog(self._folder, epoch, *self._limits_s))
            if alive and (lost := watchdog.look(alive)) is not None:
                self._lost.add(epoch)
                pid = self._infos[epoch, lost.rank].pid
                self._tell({"is": "quiet", "epoch": epoch, "rank": lost.rank, "pid": pid, "words": lost.words})

    def signal(self, number: int) -> None:
        """Sends a signal to each rank that runs."""
        for rank in self._ranks.values():
            with suppress(ProcessLookupError):
                rank.signalled = number if number in rank_shell.ENDING else rank.signalled
                signal.pidfd_send_signal(rank.pidfd, number)

    def pidfds(self) -> list[int]:
        """Returns what is readable once a rank has ended whose end is not yet known."""
        return [rank.pidfd for rank in self._ranks.values() if rank.ended_at is None]

    def forget(self, epoch: int) -> None:
        """Drops the ranks of an ended world."""
        for key in [key for key in self._ranks if key[0] == epoch]:
            os.close(self._ranks.pop(key).pidfd)
            self._infos.pop(key, None)
        self._watchdogs.pop(epoch, None)

    def _changed(self) -> list[str]:
        """Returns the names of the folder's files that are new or were replaced since the last call."""
        found = []
        with suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            for entry in entries:
                with suppress(OSError):
                    state = entry.stat(follow_symlinks=False)
                    stamp = state.st_ino, state.st_mtime_ns
                    if self._seen.get(entry.name) != stamp:
                        self._seen[entry.name] = stamp
                        found.append(entry.name)
        return found

    def _take_info(self, key: tuple[int, int]) -> None:
        with suppress(OSError, ValueError, TypeError):
            if (info := read_rank(self._folder, key[1], key[0])) is not None:
                self._infos[key] = info
                self._take_start(key, info.pid)
                self._tell_rank(key, info.pid, info.address)

    def _take_start(self, key: tuple[int, int], pid: int) -> None:
        if key not in self._ranks:
            with suppress(ProcessLookupError):  # it has ended, and its exit file says so
                self._ranks[key] = _Rank(pid, os.pidfd_open(pid))
                self._oom.note(pid)
                self._tell_rank(key, pid)

    def _tell_rank(self, key: tuple[int, int], pid: int, address: str = "") -> None:
        self._tell({"is": "rank", "epoch": key[0], "rank": key[1], "pid": pid, "address": address})

    def _look_for_ends(self) -> None:
        now = time.monotonic()
        for key, rank in self._ranks.items():
            if rank.ended_at is None and _is_readable(rank.pidfd):
                rank.ended_at = now
            if not rank.told and rank.ended_at is not None and now - rank.ended_at > FILE_WAIT_S:
                # Its starter ended with it: whoever killed that one is the cause.
                death = {"pid": rank.pid, "followed": True, "ended": rank.ended_at, "at": time.time()}
                self._tell_exit(key, death)

    def _tell_exit(self, key: tuple[int, int], death: dict[str, Any]) -> None:
        rank = self._ranks.get(key)
        if rank is not None:
            if rank.told:
                return
            rank.told, rank.ended_at = True, rank.ended_at or time.monotonic()
            death["ended_by"] = death.get("ended_by", 0) or rank.signalled
        epoch, number = key
        exit_file = str(self._folder / f"exit-{number}.e{epoch}")
        message = {"is": "exit", "epoch": epoch, "rank": number, **death}
        message["report"] = _text(error_file(self._folder, number, epoch), 1 << 16)
        message["words"] = _text(Path(rank_shell.sibling(exit_file, "log")), LAST_WORDS)
        if death.get("signal") == signal.SIGKILL:
            message["why"] = self._oom.suspicion(int(death["pid"]))
        self._tell(message)


def _is_readable(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


def _text(path: Path, limit: int) -> str:
    """Returns the end of a file, "" when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - limit))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""
