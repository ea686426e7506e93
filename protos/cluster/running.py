"""The running clusters of this user, found by their run directories, and what each one's launcher recorded there.

serve.json           the launcher's process, and the addresses of its gateway once it serves
serve.log            the end of its log, 1 MiB at most; what came before is in serve.log.1
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from allspan.protos.api.errors import ConfigError
from allspan.protos.cluster.cluster_file import ClusterInfo, read_cluster, write_atomically
from allspan.protos.cluster.tls import is_loopback

RECORD_FILE = "serve.json"
LOG_FILE = "serve.log"
_LOCK_FILE = "lock"
_OWNER_FILE = "owner"
"""The file in a cluster's shared-memory folder that names its run directory."""
SHM = Path("/dev/shm")


@dataclass(frozen=True)
class RunRecord:
    """The record of one `allspan serve`: its process, its model, and the addresses at which it serves."""

    pid: int
    name: str
    model_path: str
    num_ranks: int
    started_at: float
    """Seconds since 1970."""
    booted_s: float
    """The start on the clock that no one sets (CLOCK_BOOTTIME)."""
    parent_pid: int = 0
    """The program that started the cluster for itself, if one did."""
    http: str = ""
    grpc: str = ""


@dataclass(frozen=True)
class RunningCluster:
    """A cluster whose launcher runs: its run directory, its record and its present state."""

    run_dir: Path
    record: RunRecord
    info: ClusterInfo
    replicas: tuple[ClusterInfo, ...]
    """The state of each replica; of a cluster of one world, its own."""

    @property
    def state(self) -> str:
        """Returns "starting", "ready", "down", "stopping", or how many of several replicas are ready."""
        states = [replica.state for replica in self.replicas]
        if len(set(states)) > 1 and "ready" in states:
            return f"{states.count('ready')} of {len(states)} replicas ready"
        return "stopping" if states[0] == "stopped" else states[0]

    @property
    def uptime_s(self) -> float:
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - self.record.booted_s)

    def as_json(self) -> dict[str, Any]:
        ranks = [
            {"replica": index, "rank": rank.rank, "pid": rank.pid, "host": rank.host, "address": rank.address}
            for index, replica in enumerate(self.replicas)
            for rank in replica.ranks
        ]
        started = datetime.fromtimestamp(self.record.started_at).astimezone().isoformat(timespec="seconds")
        return {
            "name": self.record.name,
            "model_path": self.record.model_path,
            "pid": self.record.pid,
            "parent_pid": self.record.parent_pid,
            "state": self.state,
            "run_dir": str(self.run_dir),
            "http": self.record.http,
            "grpc": self.record.grpc,
            "num_ranks": self.record.num_ranks,
            "ranks": ranks,
            "started": started,
            "uptime_s": round(self.uptime_s, 1),
        }


def write_record(run_dir: Path, record: RunRecord) -> None:
    write_atomically(run_dir / RECORD_FILE, json.dumps(asdict(record), indent=1))


def write_addresses(run_dir: Path, http: str, grpc: str) -> None:
    """Adds the gateway's addresses to the record, which is left alone where it cannot be read or written."""
    with suppress(OSError, ValueError, TypeError):
        record = RunRecord(**json.loads((run_dir / RECORD_FILE).read_text(encoding="utf-8")))
        write_record(run_dir, replace(record, http=http, grpc=grpc))


def running_clusters(environ: Mapping[str, str] = os.environ, shm: Path = SHM) -> list[RunningCluster]:
    """Returns this user's running clusters, the oldest first. Those in a --run-dir of their own are among them."""
    found = [cluster for path in sorted(_run_dirs(environ, shm)) if (cluster := read_running(path)) is not None]
    return sorted(found, key=lambda cluster: cluster.record.booted_s)


def read_running(run_dir: Path) -> RunningCluster | None:
    """Returns the cluster of a run directory; None when none runs there."""
    try:
        record = RunRecord(**json.loads((run_dir / RECORD_FILE).read_text(encoding="utf-8")))
        info = read_cluster(run_dir)
        if not _is_locked(run_dir / _LOCK_FILE):
            return None
        replicas = tuple(read_cluster(run_dir / name) for name in info.replicas) or (info,)
    except (OSError, ValueError, TypeError, ConfigError):  # it is starting, or ending
        return None
    return RunningCluster(run_dir, record, info, replicas)


def find_by_address(address: str, clusters: list[RunningCluster]) -> RunningCluster | None:
    """Returns the cluster that serves HTTP or gRPC at this address of this host ("http://127.0.0.1:8000",
    "grpc://localhost:50051", "127.0.0.1:50051"); None when there is none."""
    host, port = host_and_port(address)
    for cluster in clusters:
        for served in (cluster.record.http, cluster.record.grpc):
            served_host, served_port = host_and_port(served) if served else ("", None)
            if port is not None and port == served_port and (is_loopback(host) or host == served_host):
                return cluster
    return None


def host_and_port(address: str) -> tuple[str, int | None]:
    """Returns the parts of an address with or without a scheme; None for a port that is missing or no number."""
    parts = urlsplit(address if "://" in address else f"//{address}")
    try:
        return parts.hostname or "", parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        return parts.hostname or "", None


def _run_dirs(environ: Mapping[str, str], shm: Path) -> Iterator[Path]:
    """Yields what may be run directories: below the two folders for them, and where shared-memory folders point to."""
    seen = set()
    bases = [Path(environ["XDG_RUNTIME_DIR"]) / "allspan"] if environ.get("XDG_RUNTIME_DIR") else []
    for base in (*bases, Path(f"/tmp/allspan-{os.getuid()}")):
        if _is_own(base):
            seen |= {path for path in base.iterdir() if path.is_dir()}
    for folder in shm.glob(f"allspan-{os.getuid()}-*"):
        try:
            seen.add(Path((folder / _OWNER_FILE).read_text(encoding="utf-8").strip()))
        except OSError:
            continue  # it is being removed
    yield from (path for path in seen if path.is_absolute() and _is_own(path))


def _is_own(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.getuid()
    except OSError:
        return False


def _is_locked(path: Path) -> bool:
    """Returns whether a launcher holds the lock of its run directory, as it does until it ends."""
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(handle)
