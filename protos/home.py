"""Where this user's models lie: $ALLSPAN_HOME, by default ~/.cache/allspan."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    return Path(os.environ.get("ALLSPAN_HOME") or "~/.cache/allspan").expanduser()


def models_dir() -> Path:
    """Holds one file or folder a pulled model, under its name ("ORG/NAME" as two levels)."""
    return home() / "models"
