"""The messages of a keeper, as its supervisor reads them. On the wire each is one JSON object on a line of its own."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

BEAT_S = 0.2
"""Seconds between two beats, in both directions."""


@dataclass(frozen=True)
class Address:
    """One address of a network interface, with the length of its network's prefix."""

    interface: str
    address: str
    prefix: int
    mtu: int = 0


@dataclass(frozen=True)
class Facts:
    """The description of a host that its keeper sends first. `topology` and `gpus` are as `placement` has them, in
    plain lists and dictionaries; `memory`: bytes available; `time`: seconds since 1970 by the host's clock."""

    host: str
    version: str
    python: str
    time: float
    pid: int
    memory: int
    topology: dict[str, Any] = field(default_factory=dict)
    gpus: tuple[dict[str, Any], ...] = ()
    addresses: tuple[Address, ...] = ()

    @staticmethod
    def from_json(values: dict[str, Any]) -> Facts:
        """Returns the facts; fields that this version does not know are left out. Raises TypeError, ValueError."""
        known = {item.name for item in fields(Facts)}
        kept = {name: value for name, value in values.items() if name in known}
        kept["addresses"] = tuple(Address(**address) for address in kept.get("addresses", ()))
        kept["gpus"] = tuple(kept.get("gpus", ()))
        return Facts(**kept)


@dataclass(frozen=True)
class RankStarted:
    """The process of a rank, told when it starts and again when its address is known."""

    host: str
    epoch: int
    rank: int
    pid: int
    address: str = ""


@dataclass(frozen=True)
class RankExit:
    """The end of a rank's process: by a signal, or with an exit code.

    `ended_by` is the signal that was passed on to the rank before (mpirun ends ranks so), 0 for none; `followed`: the
    rank died with its starter, or for want of its keeper. `report`: its exit report; `words`: the end of its log;
    `why`: what points to a lack of memory. `at`: seconds since 1970 by the host's clock; `moment`: on this process's
    monotonic clock, reckoned from the beats."""

    host: str
    epoch: int
    rank: int
    pid: int
    signal: int = 0
    code: int = 0
    ended_by: int = 0
    followed: bool = False
    report: str = ""
    words: str = ""
    why: str = ""
    at: float = 0.0
    moment: float = 0.0


@dataclass(frozen=True)
class RankQuiet:
    """A rank that was silent or stuck for too long by the watchdog of its host: `words` say which."""

    host: str
    epoch: int
    rank: int
    pid: int
    words: str


@dataclass(frozen=True)
class HostFile:
    """A file of the host's run directory, new or changed: its path in there, and its text."""

    host: str
    path: str
    text: str


@dataclass(frozen=True)
class HostDone:
    """The answer to a message that had an `id`; `error` is empty when it was done."""

    host: str
    id: int
    error: str = ""


@dataclass(frozen=True)
class HostError:
    """A failure of the keeper that belongs to no message."""

    host: str
    message: str


@dataclass(frozen=True)
class HostLost:
    """The end of the link to a host, once: its keeper ended, its remote shell failed, or it was silent too long."""

    host: str
    cause: str


Message = Facts | RankStarted | RankExit | RankQuiet | HostFile | HostDone | HostError | HostLost
_KINDS: dict[str, type[Any]] = {
    "rank": RankStarted,
    "exit": RankExit,
    "quiet": RankQuiet,
    "file": HostFile,
    "done": HostDone,
    "error": HostError,
}


def parse(host: str, values: dict[str, Any]) -> Message | None:
    """Returns a keeper's message, under the name that the supervisor has for the host; None for a kind that this
    version does not know. Raises TypeError or ValueError for fields that do not fit."""
    if values.get("is") == "facts":
        return Facts.from_json(values)
    kind = _KINDS.get(str(values.get("is")))
    if kind is None:
        return None
    names = {item.name for item in fields(kind)}
    message: Message = kind(**{name: value for name, value in values.items() if name in names} | {"host": host})
    return message
