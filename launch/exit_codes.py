"""The exit code of a command for each kind of error."""

from __future__ import annotations

from allspan.protos.api.errors import AllspanError, CheckpointError, ConfigError, InvalidRequest, ModelNotFound


def exit_code(error: AllspanError) -> int:
    """2: a flag, config key, field or model file is refused; 3: a model cannot be found; 1: anything else failed."""
    if isinstance(error, ConfigError | InvalidRequest | CheckpointError):
        return 2
    return 3 if isinstance(error, ModelNotFound) else 1
