"""A description of this host, which its keeper sends to the supervisor first."""

from __future__ import annotations

import fcntl
import os
import platform
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from allspan import __version__
from allspan.launch.hosts.messages import Address, Facts
from allspan.launch.placement.gpus import find_gpus
from allspan.launch.placement.topology import read_topology
from allspan.protos.cluster.available_memory import available_bytes

SIOCGIFADDR, SIOCGIFNETMASK, SIOCGIFMTU = 0x8915, 0x891B, 0x8921


def read_facts() -> Facts:
    """Returns what a supervisor must know of this host to place ranks on it. Takes up to 10 s where a GPU's driver
    hangs."""
    return Facts(
        host=socket.gethostname(),
        version=__version__,
        python=platform.python_version(),
        time=time.time(),
        pid=os.getpid(),
        memory=available_bytes(),
        topology=asdict(read_topology()),
        gpus=tuple(asdict(gpu) for gpu in find_gpus()),
        addresses=(*_ipv4(), *_ipv6()),
    )


def _ipv4() -> Iterator[Address]:
    """Yields the first IPv4 address of each interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):  # it has none
                address, mask = (fcntl.ioctl(probe, number, request)[20:24] for number in (SIOCGIFADDR, SIOCGIFNETMASK))
                yield Address(name, socket.inet_ntoa(address), int.from_bytes(mask).bit_count(), _mtu(probe, request))


def _ipv6() -> Iterator[Address]:
    try:
        rows = [line.split() for line in Path("/proc/self/net/if_inet6").read_text().splitlines()]
    except OSError:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for digits, _, prefix, _, _, name in rows:
            address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
            yield Address(name, address, int(prefix, 16), _mtu(probe, struct.pack("256s", name.encode()[:15])))


def _mtu(probe: socket.socket, request: bytes) -> int:
    return int(struct.unpack("i", fcntl.ioctl(probe, SIOCGIFMTU, request)[16:20])[0])
