"""Sources of a cluster's state for its clients: a run directory, or the addresses of the ranks alone."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from allspan.client.transport.base import STATUS, Connect
from allspan.protos import worker_pb2 as pb
from allspan.protos.api.errors import ConfigError, Unavailable
from allspan.protos.cluster.cluster_file import CLUSTER_FILE, ClusterInfo, RankInfo, read_cluster
from allspan.protos.cluster.running import find_by_address, running_clusters
from allspan.protos.cluster.tls import NO_TLS, TlsFiles
from allspan.protos.convert import adapter_from_wire

_SCHEMES = ("http://", "https://", "grpc://", "grpcs://")
_ADDRESS = re.compile(r"(unix:|unix-abstract:|ipv[46]:|dns:).+|[^/\s]+:\d+")


class ClusterSource(Protocol):
    """A source of the present state of a cluster."""

    async def read(self) -> ClusterInfo:
        """Returns the cluster's state. Raises ConfigError when nothing can be read, Unavailable or DeadlineExceeded
        when no rank answers."""
        ...


class RunDirectory:
    """Reads `cluster.json`, which the supervisor and the leader keep true."""

    def __init__(self, path: Path, tls: TlsFiles = NO_TLS) -> None:
        """Sets the directory; `tls` replaces the files that the cluster names."""
        self._path = path.parent if path.name == CLUSTER_FILE else path
        self._tls = tls

    async def read(self) -> ClusterInfo:
        info = read_cluster(self._path)
        return replace(info, tls=self._tls) if self._tls.is_given else info

    def below(self, folder: str) -> RunDirectory:
        """The run directory of one replica, by its name in `ClusterInfo.replicas`."""
        return RunDirectory(self._path / folder, self._tls)


class RankAddresses:
    """A cluster source that queries the ranks themselves; the leader's address comes first. A world that answers is
    "ready"."""

    def __init__(
        self, addresses: Sequence[str], connect: Connect, tls: TlsFiles = NO_TLS, timeout: float = 5.0
    ) -> None:
        if not addresses:
            raise ConfigError("attach is an empty list; give the address of every rank, the leader's first")
        self._addresses = tuple(f"unix:{address}" if address.startswith("/") else address for address in addresses)
        self._connect = connect
        self._tls = tls
        self._timeout = timeout

    async def read(self) -> ClusterInfo:
        statuses = await asyncio.gather(*(self._status(address) for address in self._addresses))
        for index, (status, address) in enumerate(zip(statuses, self._addresses, strict=True)):
            if status.rank != index:
                raise ConfigError(
                    f"attach[{index}] ({address}) is rank {status.rank}; give the addresses in order of rank, the "
                    "leader's first"
                )
        leader = statuses[0]
        if leader.world_size != len(statuses):
            raise ConfigError(
                f"attach has {len(statuses)} addresses, the world has {leader.world_size} ranks; give all"
            )
        return ClusterInfo(
            epoch=leader.epoch,
            state="ready",
            model=leader.model,
            model_path=leader.model_path,
            max_model_len=leader.max_model_len,
            vocab_size=leader.vocab_size,
            eos_token_ids=tuple(leader.eos_token_ids),
            tls=self._tls,
            adapters=tuple(map(adapter_from_wire, leader.adapters)),
            lora_dir=leader.lora_dir,
            ranks=tuple(
                RankInfo(status.rank, status.pid, status.host, address)
                for status, address in zip(statuses, self._addresses, strict=True)
            ),
        )

    async def _status(self, address: str) -> pb.WorkerStatus:
        transport = self._connect(address, self._tls)
        try:
            return await transport.unary(STATUS, pb.StatusRequest(), self._timeout)
        except Unavailable as error:
            raise Unavailable(f"no rank answers at {address}{self._how(address)}: {error.message}") from None
        finally:
            await transport.close()

    def _how(self, address: str) -> str:
        """Returns a hint for an error about TLS, which one end may use and the other not."""
        if address.startswith("unix"):
            return ""
        if not self._tls.is_given:
            return " (without TLS)"
        return f" (TLS with {self._tls.certfile}, which must be from the ranks' authority, as theirs from ours)"


Attach = str | Path | Sequence[str] | Sequence[Sequence[str]]


def sources_of(attach: Attach, connect: Connect, tls: TlsFiles = NO_TLS) -> list[ClusterSource]:
    """A run directory, its cluster.json, the URL or address of a server on this host, one address of a rank, a list of
    them, or such a list for each replica."""
    if isinstance(attach, Path):
        return [RunDirectory(attach, tls)]
    if isinstance(attach, str):
        is_address = _ADDRESS.fullmatch(attach) and not Path(attach).exists()
        if served := _served_at(attach):
            return [RunDirectory(served, tls)]
        return [RankAddresses([attach], connect, tls) if is_address else RunDirectory(Path(attach), tls)]
    if attach and not any(isinstance(entry, str) for entry in attach):
        return [RankAddresses(addresses, connect, tls) for addresses in attach]
    addresses = [entry for entry in attach if isinstance(entry, str)]
    if len(addresses) < len(attach):
        raise ConfigError("attach mixes addresses and lists; give one replica's addresses, or a list for each replica")
    return [RankAddresses(addresses, connect, tls)]


def _served_at(attach: str) -> Path | None:
    """Returns the run directory of this user's cluster that serves at a URL, or at HOST:PORT, of this host; None for
    anything else. ConfigError for a URL where none does."""
    is_url = attach.lower().startswith(_SCHEMES)
    if not is_url and (Path(attach).exists() or not re.fullmatch(r"[^/\s]+:\d+", attach)):
        return None
    cluster = find_by_address(attach, running_clusters())
    if cluster is None and is_url:
        raise ConfigError(
            f"attach is {attach!r}, where no cluster of this user on this host serves; `allspan ps` lists them. "
            "ClientEngine joins the ranks themselves: for a server elsewhere use the openai package or gRPC, or give "
            "the addresses of the ranks"
        )
    return None if cluster is None else cluster.run_dir
