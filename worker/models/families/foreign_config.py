"""A foreign config, read key by key: typed access that refuses a wrong value by name instead of guessing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from allspan.protos.api.errors import CheckpointError


class ForeignConfig:
    """Values under Hugging Face's names. `source` is the file that messages name. An explicit null counts as absent."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values = values
        self.source = source

    def has(self, key: str) -> bool:
        """Present, be it as null."""
        return key in self._values

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(f"{key} must be a positive integer, got {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.error(f"{key} must be a positive number, got {value!r}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{key} must be true or false, got {value!r}")
        return value

    def text(self, key: str, default: str = "") -> str:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(f"{key} must be a string, got {value!r}")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id, a list of ids, or none."""
        value = self.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise self.error(f"{key} must be a token id or a list of them, got {value!r}")
        return tuple(ids)

    def section(self, key: str) -> ForeignConfig | None:
        """A nested object under the same rules; None if absent or empty."""
        value = self.get(key)
        if not value:
            return None
        if not isinstance(value, Mapping):
            raise self.error(f"{key} must be an object, got {value!r}")
        return ForeignConfig(value, f"{self.source}: {key}")

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: {message}")
