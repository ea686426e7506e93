"""The JSON files of a model's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from allspan.protos.api.errors import CheckpointError


def read_json_object(file: Path) -> dict[str, Any]:
    """Raises CheckpointError, naming the file, when it cannot be read or holds something else."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} holds {type(values).__name__}, must be a JSON object")
    return values
