"""The kernels without Python: a driver in C++ checks every op of every instruction set against double precision, on
this CPU, on aarch64 CPUs that qemu-user plays, and on x86 CPUs that lack what this one has."""

from __future__ import annotations

import functools
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.artefacts import entry, files_below, key

ROOT = Path(__file__).parents[2]
SOURCES = (".cpp", ".h", ".inc", ".txt", ".cmake")
AARCH64 = ROOT / "cmake/aarch64-linux-gnu.cmake"

pytestmark = pytest.mark.timeout(600)  # the first test of each kind compiles


def need(*tools: str, other_cpu: bool = False) -> None:
    """`other_cpu`: the tools play a CPU that this machine is not."""
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"{'cpu: ' if other_cpu else ''}not installed: {', '.join(missing)}")


@functools.cache
def built(folder: str, *options: str) -> str:
    """The driver's path. Builds under build/, where only what has changed is compiled, and keeps the program."""
    there, source = ROOT / "build/op_check" / folder, ROOT / "tests/kernels/native"

    def build(target: Path) -> None:
        generator = ("-G", "Ninja") if shutil.which("ninja") else ()
        configure = ["cmake", "-S", source, "-B", there, *generator, "-DCMAKE_BUILD_TYPE=Release", *options]
        for command in (configure, ["cmake", "--build", there, "--parallel", "4"]):
            made = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
            assert made.returncode == 0, made.stdout + made.stderr
        shutil.copy(there / "op_check", target)

    made_of = [file for file in files_below(source, ROOT / "kernels/cpu", ROOT / "cmake") if file.suffix in SOURCES]
    version = subprocess.run(["c++", "--version"], capture_output=True, text=True, check=True).stdout
    return str(entry("op_check", f"{folder}-{key(version, options, *made_of)}", build))


def kernels_of_the_module() -> Path | None:
    """The static library that the Python module was linked from, where no source has changed since."""
    changed = max(file.stat().st_mtime for file in files_below(ROOT / "kernels/cpu") if file.suffix in SOURCES)
    libraries = ROOT.glob(f"build/cp{sys.version_info[0]}{sys.version_info[1]}-*/kernels/cpu/libkernels.a")
    return next((library for library in libraries if library.stat().st_mtime > changed), None)


def native() -> list[str]:
    need("cmake", "c++")
    library = kernels_of_the_module()
    return [built("linked", f"-DALLSPAN_KERNELS={library}") if library else built("native")]


def played(cpu: str) -> list[str]:
    """The command of the driver on an aarch64 CPU, by qemu's name for it."""
    need("cmake")
    need("aarch64-linux-gnu-g++", "qemu-aarch64", other_cpu=True)
    driver = built("aarch64", "--toolchain", str(AARCH64))
    return ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", "-cpu", cpu, driver]


def run(command: list[str]) -> str:
    """What the driver prints, once it has found nothing wrong."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout


def variants_in(report: str) -> str:
    found = re.match(r"variants: (.*)\n", report)
    assert found, report
    return found[1]


def digests(report: str) -> list[str]:
    found = re.findall(r"(?:integer products|sampled tokens): (\w{16})\n", report)
    assert len(found) == 2, report
    return found


def test_every_variant_that_runs_here_agrees_with_double_precision() -> None:
    report = run(native())
    assert variants_in(report).endswith("generic")
    assert re.search(r"checks: \d{3,}, failures: 0\n", report)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("cpu", "variants"),
    [
        ("cortex-a53", "neon generic"),
        ("neoverse-n1", "neon_dot neon generic"),
        ("a64fx", "sve512 neon generic"),
        ("max,sve-default-vector-length=32", "neon_bf16 sve256 neon_dot neon generic"),
        ("max,sve-default-vector-length=16", "neon_bf16 neon_dot neon generic"),
        ("max,sve=off", "neon_bf16 neon_dot neon generic"),
    ],
)
def test_aarch64_runs_what_a_cpu_has_and_nothing_else(cpu: str, variants: str) -> None:
    assert variants_in(run(played(cpu))) == variants


@pytest.mark.nightly
def test_integer_products_and_sampled_tokens_are_the_same_on_x86_and_aarch64() -> None:
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("cpu: this machine is no x86")
    assert digests(run(played("neoverse-n1"))) == digests(run(native()))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("cpu", "variants"),
    [
        ("qemu64", "generic"),
        ("SandyBridge", "generic"),
        ("Haswell", "avx2 generic"),
        ("Haswell,-fma", "generic"),
        # The CPU has AVX2, but the operating system saves no more than SSE's registers.
        ("Haswell,-xsave", "generic"),
    ],
)
def test_x86_runs_what_a_cpu_has_and_the_system_saves(cpu: str, variants: str) -> None:
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("cpu: this machine is no x86")
    need("qemu-x86_64", other_cpu=True)
    assert variants_in(run(["qemu-x86_64", "-cpu", cpu, *native()])) == variants


def test_a_variant_that_cannot_run_is_refused() -> None:
    refused = subprocess.run([*native(), "generic", "sve9"], capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2
    assert refused.stdout.endswith("sve9 cannot run here\n")
