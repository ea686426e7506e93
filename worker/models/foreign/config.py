"""A foreign config, read key by key: typed access that refuses a wrong value by name instead of guessing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allspan.protos.api.errors import CheckpointError
from allspan.protos.model_files.config_values import number_of, size_of, token_ids_of
from allspan.protos.model_files.json_values import shown


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

    def changed(self, values: Mapping[str, Any]) -> ForeignConfig:
        """The same config with these values instead."""
        return ForeignConfig({**self._values, **values}, self.source)

    def size(self, key: str, default: int | None = None, most: int | None = None) -> int:
        """A positive integer, up to `most`, or else the limit of its kind (`allspan.protos.model_files.limits`)."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        return size_of(key, value, self.source, most)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number, up to the limit of its kind."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        return number_of(key, value, self.source)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{key} must be true or false, got {shown(value)}")
        return value

    def text(self, key: str, default: str = "") -> str:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(f"{key} must be a string, got {shown(value)}")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id, a list of ids, or none."""
        return token_ids_of(key, self.get(key), self.source)

    def section(self, key: str) -> ForeignConfig | None:
        """A nested object under the same rules; None if absent or empty."""
        value = self.get(key)
        if not value:
            return None
        if not isinstance(value, Mapping):
            raise self.error(f"{key} must be an object, got {shown(value)}")
        return ForeignConfig(value, f"{self.source}: {key}")

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: {message}")
