"""The hosts of one cluster: their keepers' links, kept from world to world, and made anew for a host that was lost."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from allspan import __version__
from allspan.launch.console import say
from allspan.launch.hosts.host_list import Host, HostsConfig
from allspan.launch.hosts.link import HostLink, keeper_command
from allspan.launch.hosts.messages import Facts, HostError, HostLost, Message
from allspan.launch.hosts.placement import address_in_network
from allspan.launch.hosts.remote_shell import RemoteShell
from allspan.launch.placement.placement import Placement
from allspan.launch.supervision.run_dir import RunDir
from allspan.protos.api.errors import ConfigError, InternalError, Unavailable

CONNECT_TIMEOUT_S = 30.0
ASK_TIMEOUT_S = 10.0
RETURN_WAIT_S = 1.0
"""Seconds in which a host that was lost must answer to be used again, where the ranks may start without it."""


@dataclass
class _Connected:
    """The link to one host's keeper. `has_begun`: it has made the run directory there."""

    link: HostLink
    told: threading.Event = field(default_factory=threading.Event)
    """Set by its first message: its facts, or that it is lost."""
    lost: HostLost | None = None
    has_begun: bool = False


class Fleet:
    """Links to the keepers of all hosts. The first host is this one; its keeper needs no remote shell."""

    def __init__(self, hosts: tuple[Host, ...], config: HostsConfig, shell: RemoteShell) -> None:
        self.hosts = hosts
        self.used = hosts
        """The hosts of the present world."""
        self.config = config
        self.shell = shell
        self.can_shrink = False
        """A world may have fewer ranks than the first had."""
        self.place: Callable[[tuple[Host, ...]], Placement] | None = None
        """Lays the ranks over some of the hosts."""
        self.messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when there are messages."""
        self._connected: dict[str, _Connected] = {}
        self._files: dict[str, str] = {}

    @property
    def facts(self) -> dict[str, Facts]:
        """The facts of each host by its name in the host list."""
        return {name: each.link.facts for name, each in self._connected.items() if each.link.facts is not None}

    def connect(self, least: int = 0) -> None:
        """Starts a keeper on each host that has none, waits for their facts, and sets `used`. With `least`, that many
        hosts will do, this one among them. Raises Unavailable with the names of the hosts that do not answer,
        ConfigError for one that cannot be used."""
        may_miss = 0 < least < len(self.hosts)
        for host in self.hosts:
            if host.name not in self._connected or self._connected[host.name].lost:
                self._connect(host)
        deadline = time.monotonic() + (RETURN_WAIT_S if may_miss else CONNECT_TIMEOUT_S)
        missing = {host: why for host in self.hosts if (why := self._missing(host, deadline))}
        used = tuple(host for host in self.hosts if host not in missing)
        causes = "; ".join(missing.values())
        if missing and (not may_miss or len(used) < least or self.hosts[0] in missing):
            raise Unavailable(f"{causes} (remote shell: {self.shell.name})")
        for host in used:
            self._check(host.name, self.facts[host.name])
        if missing:
            names = ", ".join(f"{host.name}:{host.slots}" for host in used)
            say(f"the ranks start on the hosts left, {names}: {causes}; the next start tries all again")
        self.used = used

    def _missing(self, host: Host, deadline: float) -> str:
        """Returns why a host cannot be used; "" when it can."""
        each = self._connected[host.name]
        if not each.told.wait(max(0.0, deadline - time.monotonic())):
            return f"host {host.name} does not answer"
        return f"host {host.name} cannot be used: {each.lost.cause}" if each.lost is not None else ""

    def _connect(self, host: Host) -> None:
        command = tuple(keeper_command())
        words = command if host is self.hosts[0] else self.shell.on(host.name, command)
        name = host.name
        link = HostLink(name, words, lambda message: self._hear(name, message), self.config.host_timeout)
        self._connected[name] = _Connected(link)
        try:
            link.start()
        except InternalError as error:
            raise ConfigError(error.message) from error

    def _hear(self, name: str, message: Message) -> None:
        each = self._connected[name]
        if isinstance(message, HostLost):
            each.lost = message
        if isinstance(message, Facts | HostLost):
            each.told.set()
        self.messages.put(message)
        os.eventfd_write(self.event_fd, 1)

    def _check(self, name: str, facts: Facts) -> None:
        mine = self.facts[self.hosts[0].name]
        for what, theirs, ours in (("allspan", facts.version, __version__), ("Python", facts.python, mine.python)):
            if theirs != ours:
                raise ConfigError(f"host {name} has {what} {theirs}, this host {ours}; install the same on all hosts")
        if self.config.mpi_network:
            address_in_network(name, facts, self.config)

    def address(self, name: str) -> str:
        """Returns the host's own address in --mpi-network; on one host without it, loopback."""
        if not self.config.mpi_network:
            return "127.0.0.1"
        return address_in_network(name, self.facts[name], self.config).address

    def interface(self, name: str) -> str:
        """Returns the host's interface in --mpi-network, empty without it."""
        if not self.config.mpi_network:
            return ""
        return address_in_network(name, self.facts[name], self.config).interface

    def is_lost(self, message: HostLost) -> bool:
        """Returns whether the message is about the present link to a host in use, and not an earlier one."""
        is_used = any(host.name == message.host for host in self.used)
        return is_used and self._connected[message.host].lost is message

    def ship(self, files: Mapping[str, str]) -> None:
        """Notes files of the run directory that every other host gets: their paths in there, and their text."""
        self._files |= files

    def begin(self, run: RunDir, epoch: int, limits: Mapping[str, float]) -> None:
        """Has the new keepers make the run directory and its files. `limits`: the watchdog's seconds.
        Raises Unavailable with the host's name."""
        for name in (host.name for host in self.used):
            each = self._connected[name]
            if each.has_begun:
                continue
            is_own = name == self.hosts[0].name
            message = {"do": "begin", "run_dir": str(run.path), "shm": str(run.shm), "supervisor_epoch": epoch}
            message |= {"host_timeout": self.config.host_timeout, "adopt": is_own, **limits}
            try:
                each.link.ask(message, ASK_TIMEOUT_S)
                for path, text in {} if is_own else self._files.items():
                    each.link.ask({"do": "file", "path": path, "text": text, "mode": 0o600}, ASK_TIMEOUT_S)
            except InternalError as error:
                raise Unavailable(error.message) from error
            each.has_begun = True

    def write(self, name: str, path: Path, text: str) -> None:
        """Writes a file of the run directory on one host. Raises Unavailable."""
        message = {"do": "file", "path": path.name, "text": text, "mode": 0o600}
        try:
            self._connected[name].link.ask(message, ASK_TIMEOUT_S)
        except InternalError as error:
            raise Unavailable(error.message) from error

    def send(self, message: dict[str, object]) -> None:
        """Sends a message to every host that can be reached."""
        for each in self._connected.values():
            if each.lost is None:
                try:
                    each.link.send(dict(message))
                except InternalError as error:  # its link ends by its own silence
                    self.messages.put(HostError(each.link.name, error.message))

    def clear(self, epoch: int) -> list[str]:
        """Has every keeper end what is left of an epoch and remove its files; returns what went wrong."""
        wrong = []
        for each in self._connected.values():
            if each.lost is None and each.has_begun:
                try:
                    each.link.ask({"do": "clear", "epoch": epoch}, ASK_TIMEOUT_S)
                except InternalError as error:
                    wrong.append(error.message)
        return wrong

    def close(self) -> None:
        """Ends all keepers, which end what they started and remove their folders."""
        threads = [threading.Thread(target=each.link.close) for each in self._connected.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
