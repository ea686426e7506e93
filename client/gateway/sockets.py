"""Binds all ports before a model loads, so that a busy one fails at once and not after minutes."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
from dataclasses import dataclass
from pathlib import Path

from allspan.client.gateway.auth.tls import Tls
from allspan.client.gateway.config import GatewayConfig
from allspan.client.gateway.kv_events.publisher import check_endpoints
from allspan.protos.api.errors import ConfigError
from allspan.protos.cluster.tls import is_loopback

RESERVED_FILES = 256
"""Number of the process's open files that are not for connections of clients."""

_LISTEN = "0A"  # state column of /proc/net/tcp


@dataclass(frozen=True)
class Sockets:
    """The bound HTTP socket, and one that holds the gRPC port until the gRPC server takes it over."""

    http: socket.socket
    grpc: socket.socket
    http_address: str
    """The HTTP address as a URL without a path."""
    grpc_address: str
    """The gRPC address as a target."""
    worker: socket.socket | None = None
    """Holds --worker-port, where it is given, like `grpc`."""

    @property
    def worker_address(self) -> str:
        """The address of --worker-port as a target, "" without one."""
        return _address(self.worker) if self.worker is not None else ""

    def close(self) -> None:
        """Frees the ports. Idempotent."""
        for held in self._held:
            held.close()

    @property
    def _held(self) -> list[socket.socket]:
        return [self.http, self.grpc, *([] if self.worker is None else [self.worker])]


def bind(config: GatewayConfig) -> Sockets:
    """Binds the ports; ConfigError names the port, its flag and, where it can be found out, the process that holds
    it. So does a limit of open files that is too low."""
    _check_open_files(config)
    check_endpoints(config.kv_events, config.security.insecure)
    tls = Tls.of(config.security)
    if tls is None and not config.security.insecure and not is_loopback(config.host):
        raise ConfigError(
            f"--host is {config.host!r}, must be a loopback address (127.0.0.1, ::1, localhost), because without TLS "
            "others on the network can read keys and prompts; give --ssl-certfile and --ssl-keyfile, or --insecure"
        )
    wanted = {"--port": config.port, "--grpc-port": config.grpc_port}
    if config.worker_port is not None:
        wanted["--worker-port"] = config.worker_port
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(_take(config.host, port, flag)) for flag, port in wanted.items()]
        stack.pop_all()
    http, grpc, worker = taken[0], taken[1], taken[2] if len(taken) > 2 else None
    scheme = "http" if tls is None else "https"
    return Sockets(http, grpc, f"{scheme}://{_address(http)}", _address(grpc), worker)


def needed_files(config: GatewayConfig) -> int:
    """Returns the number of files that the gateway's process must be allowed to open."""
    fronts = 1 if config.worker_port is None else 2
    return config.limits.max_connections + fronts * config.grpc.grpc_max_connections + RESERVED_FILES


def _check_open_files(config: GatewayConfig) -> None:
    needed, (_, most) = needed_files(config), resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY or most >= needed:
        return
    http, grpc = config.limits.max_connections, config.grpc.grpc_max_connections
    most_connections, connections = most - RESERVED_FILES, needed - RESERVED_FILES
    fewer = most_connections * http // connections, most_connections * grpc // connections
    way = f", or give --max-connections {fewer[0]} --grpc-max-connections {fewer[1]}" if min(fewer) > 0 else ""
    raise ConfigError(
        f"--max-connections {http} and --grpc-max-connections {grpc} need {needed} open files, {RESERVED_FILES} "
        f"of them for all else, but this process may open {most}; raise the limit (`ulimit -n {needed}`, in a systemd "
        f"unit LimitNOFILE={needed}){way}"
    )


def _address(sock: socket.socket) -> str:
    """HOST:PORT of a bound socket, brackets around an IPv6 host."""
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def hand_over(sockets: Sockets) -> None:
    """Sets the sockets' options for reuse, right before the servers listen."""
    # Connections inherit this: those that linger after the end must not keep the next gateway from its port.
    sockets.http.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # The gRPC library insists on binding by itself, beside this socket.
    sockets.grpc.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if sockets.worker is not None:
        sockets.worker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


def _take(host: str, port: int, flag: str) -> socket.socket:
    if not 0 <= port <= 65535:
        raise ConfigError(f"{flag} is {port}, must be from 0 (any free port) to 65535")
    try:
        choices = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host is {host!r}, which is no address of this machine: {error}") from error
    family, kind, protocol, _, address = choices[0]
    sock = socket.socket(family, kind, protocol)
    try:
        # On while binding: connections of an earlier gateway that linger must not count. Off afterwards: on Linux two
        # sockets that both have it on, neither listening yet, could bind the same port.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        sock.close()
        raise ConfigError(_refusal(host, port, flag, error)) from error
    return sock


def _refusal(host: str, port: int, flag: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        owner = port_owner(port)
        by = f" by {owner}" if owner else ""
        return f"port {port} ({flag}) on {host} is in use{by}; choose another with {flag}, 0 takes any free one"
    if error.errno == errno.EACCES:
        return f"port {port} ({flag}) needs rights that this user has not; choose one above 1023 with {flag}"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host is {host!r}, which is no address of this machine"
    return f"cannot listen on {host} port {port} ({flag}): {error.strerror}"


def port_owner(port: int) -> str:
    """ "process PID (NAME)" that listens on a TCP port of this machine, or "" where that cannot be found out."""
    inodes = _listening_inodes(port)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(_link(entry) in inodes for entry in (process / "fd").iterdir()):
                return f"process {process.name} ({(process / 'comm').read_text().strip()})"
        except OSError:  # gone in the meantime, or another user's
            continue
    return ""


def _link(entry: Path) -> str:
    try:
        return os.readlink(entry)
    except FileNotFoundError:  # closed in the meantime
        return ""


def _listening_inodes(port: int) -> set[str]:
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for columns in map(str.split, lines):
            if columns[3] == _LISTEN and int(columns[1].rsplit(":", 1)[1], 16) == port:
                found.add(f"socket:[{columns[9]}]")
    return found
