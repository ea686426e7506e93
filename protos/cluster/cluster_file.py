"""The files of a run directory (mode 0700), by which a facade finds a cluster and learns what became of it.

cluster.json         the cluster as a whole; written by the leader when all ranks are ready, and by the supervisor
rank-K.eE.json       one a rank and epoch, as soon as its process runs
rank-K.eE.error      the exit report of a rank that failed by itself
rK.eE.sock           its unix socket
beat-K.eE            its heartbeat: see `allspan.protos.cluster.heartbeat`
replica-N/           of a cluster of several worlds: the run directory of each
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from allspan.protos.api.adapters import AdapterModule
from allspan.protos.api.errors import ConfigError
from allspan.protos.cluster.tls import NO_TLS, TlsFiles

CLUSTER_FILE = "cluster.json"


@dataclass(frozen=True)
class RankInfo:
    """The address and process of one rank. `address` is a gRPC target ("unix:/…" or "host:port"), empty before it
    listens."""

    rank: int
    pid: int
    host: str
    address: str = ""


@dataclass(frozen=True)
class ClusterInfo:
    """`state`: "starting", "ready", "down" (`cause` says why; a new epoch may follow) or "stopped" (for good)."""

    epoch: int
    state: str
    model: str
    model_path: str
    max_model_len: int = 0
    vocab_size: int = 0
    eos_token_ids: tuple[int, ...] = ()
    cause: str = ""
    supervisor_pid: int = 0
    ranks: tuple[RankInfo, ...] = field(default_factory=tuple)
    will_restart: bool = False
    """In state "down", whether the supervisor starts another epoch."""
    watchdog_timeout: float = 30.0
    """Seconds of silence after which the supervisor takes a rank for lost."""
    tls: TlsFiles = NO_TLS
    """The TLS files with which clients on this host reach ranks that listen over TCP."""
    replicas: tuple[str, ...] = ()
    """The subfolders of a cluster of several worlds, each a run directory of its own. Such a cluster's own `ranks` are
    empty, and it is "ready" once every replica has been."""
    adapters: tuple[AdapterModule, ...] = ()
    """The LoRA adapters of a cluster that is ready: those that it was started with, or that it has now where a client
    gives this."""
    lora_dir: str = ""
    """The folder below which adapters may be loaded over HTTP and gRPC; "": none may."""

    @property
    def adapter_names(self) -> tuple[str, ...]:
        return tuple(adapter.name for adapter in self.adapters)

    @staticmethod
    def from_json(text: str) -> ClusterInfo:
        values: dict[str, Any] = json.loads(text)
        values["ranks"] = tuple(RankInfo(**rank) for rank in values["ranks"])
        values["eos_token_ids"] = tuple(values["eos_token_ids"])
        values["tls"] = TlsFiles(**values.get("tls", {}))
        values["replicas"] = tuple(values.get("replicas", ()))
        values["adapters"] = tuple(AdapterModule(**adapter) for adapter in values.get("adapters", ()))
        return ClusterInfo(**values)


def write_atomically(path: Path, text: str) -> None:
    """A reader sees the old text or the new, never half of it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_cluster(run_dir: Path, info: ClusterInfo) -> None:
    write_atomically(run_dir / CLUSTER_FILE, json.dumps(asdict(info), indent=1))


def read_cluster(run_dir: Path) -> ClusterInfo:
    """Raises ConfigError when there is no (valid) cluster file."""
    path = run_dir / CLUSTER_FILE
    try:
        return ClusterInfo.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"no cluster to attach to: {path}: {error}") from error


def rank_file(run_dir: Path, rank: int, epoch: int) -> Path:
    return run_dir / f"rank-{rank}.e{epoch}.json"


def error_file(run_dir: Path, rank: int, epoch: int) -> Path:
    return run_dir / f"rank-{rank}.e{epoch}.error"


def socket_path(run_dir: Path, rank: int, epoch: int) -> Path:
    return run_dir / f"r{rank}.e{epoch}.sock"


def heartbeat_file(run_dir: Path, rank: int, epoch: int) -> Path:
    return run_dir / f"beat-{rank}.e{epoch}"


def replica_dir(run_dir: Path, index: int) -> Path:
    return run_dir / f"replica-{index}"


def write_rank(run_dir: Path, info: RankInfo, epoch: int) -> None:
    write_atomically(rank_file(run_dir, info.rank, epoch), json.dumps(asdict(info)))


def read_rank(run_dir: Path, rank: int, epoch: int) -> RankInfo | None:
    """Returns a rank's information; None while the rank has not written its file."""
    try:
        return RankInfo(**json.loads(rank_file(run_dir, rank, epoch).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
