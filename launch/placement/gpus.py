"""The NVIDIA GPUs that ranks can be placed on, found without torch: by nvidia-smi, else in the driver's /proc files."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from allspan.protos.api.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Gpu:
    """`node`: the NUMA node it hangs on, None when unknown.
    `memory_bytes`: of all of it; 0 when unknown."""

    index: int
    name: str
    memory_bytes: int
    uuid: str = ""
    node: int | None = None

    @property
    def visible(self) -> str:
        """The value of CUDA_VISIBLE_DEVICES for a rank, which leaves it this GPU alone."""
        return self.uuid or str(self.index)


def find_gpus(
    timeout_s: float = 10.0, sys_root: Path = Path("/sys"), proc_root: Path = Path("/proc")
) -> tuple[Gpu, ...]:
    """Returns all GPUs of this machine in the order of their bus; none when there is no driver, or it fails."""
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        query = [tool, "--query-gpu=index,name,memory.total,uuid,pci.bus_id", "--format=csv,noheader,nounits"]
        try:
            run = subprocess.run(query, capture_output=True, text=True, timeout=timeout_s, check=True)
            rows = list(csv.reader(run.stdout.splitlines(), skipinitialspace=True))
            return tuple(
                Gpu(int(index), name, int(mib) << 20 if mib.isdigit() else 0, uuid, _node(sys_root, bus))
                for index, name, mib, uuid, bus in rows
            )
        except (OSError, ValueError, subprocess.SubprocessError):
            pass  # the driver may still tell
    folders = sorted((proc_root / "driver/nvidia/gpus").glob("*"))
    return tuple(_from_proc(index, folder, sys_root) for index, folder in enumerate(folders))


def visible_gpus(gpus: tuple[Gpu, ...], environ: Mapping[str, str] = os.environ) -> tuple[Gpu, ...]:
    """Returns the ones of `gpus` that CUDA_VISIBLE_DEVICES leaves, in its order. As CUDA does, the list ends at the
    first that is not there; parts of a GPU (MIG) are taken at their word. Numbers are those of nvidia-smi."""
    if VISIBLE not in environ:
        return gpus
    found: list[Gpu] = []
    for word in (part.strip() for part in environ[VISIBLE].split(",")):
        named = [
            gpu for gpu in gpus if word == str(gpu.index) or (word.startswith("GPU-") and gpu.uuid.startswith(word))
        ]
        if word.startswith("MIG-"):
            named = [Gpu(len(found), "MIG", 0, word)]
        if len(named) != 1:
            break
        found += named
    return tuple(found)


def gpus_for(
    count: int,
    flags: str,
    gpus: tuple[Gpu, ...],
    environ: Mapping[str, str] = os.environ,
    are_shared: bool = False,
) -> tuple[Gpu, ...]:
    """Returns the first `count` visible GPUs; where there are fewer and they may be shared, these in turn. `flags`
    names the flags that need so many, for the error. Raises ConfigError with the numbers."""
    seen = visible_gpus(gpus, environ)
    if len(seen) >= count:
        return seen[:count]
    if seen and are_shared:
        return tuple(seen[i % len(seen)] for i in range(count))
    hidden = f" ({VISIBLE} is {environ[VISIBLE]!r}, the machine has {len(gpus)})" if VISIBLE in environ else ""
    if not seen:
        raise ConfigError(
            f"device is cuda, but no NVIDIA GPU is found here{hidden}; use --device cpu, or see allspan doctor"
        )
    raise ConfigError(
        f"{flags}, a GPU each, and there {'are' if len(seen) > 1 else 'is'} {len(seen)}{hidden}; lower --ranks or "
        "--data-parallel-size, make more GPUs visible, or pass --oversubscribe to have ranks share them"
    )


def _node(sys_root: Path, bus: str) -> int | None:
    """Returns the NUMA node of a PCI address, which nvidia-smi writes with a longer domain than /sys."""
    domain, _, rest = bus.strip().lower().partition(":")
    try:
        node = int((sys_root / "bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _from_proc(index: int, folder: Path, sys_root: Path) -> Gpu:
    try:
        facts = dict(re.findall(r"^([^:]+):\s*(.*)$", (folder / "information").read_text(), re.MULTILINE))
    except OSError:
        facts = {}
    uuid = facts.get("GPU UUID", "")
    return Gpu(index, facts.get("Model", "GPU"), 0, "" if "?" in uuid else uuid, _node(sys_root, folder.name))
