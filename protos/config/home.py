"""The folder of this user's models: $ALLSPAN_HOME, by default ~/.cache/allspan."""

from __future__ import annotations

import os
from pathlib import Path

from allspan.protos.api.errors import ConfigError


def home() -> Path:
    """Returns that folder. Raises ConfigError when this user has no home directory (a container's made-up user id)."""
    try:
        return Path(os.environ.get("ALLSPAN_HOME") or "~/.cache/allspan").expanduser()
    except RuntimeError as error:
        raise ConfigError("this user has no home folder to keep models in; set ALLSPAN_HOME to a folder") from error


def models_dir() -> Path:
    """Holds one file or folder a pulled model, under its name ("ORG/NAME" as two levels)."""
    return home() / "models"
