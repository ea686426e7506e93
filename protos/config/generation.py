"""The flags that set the sampling defaults of a served model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from allspan.protos.api.errors import ConfigError

AUTO = "auto"
NEUTRAL = ("neutral", "vllm")
"""The values of --generation-config that switch a model's defaults off; the second is vLLM's word for it."""


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """The source of the values that a request's missing sampling fields take."""

    generation_config: str = AUTO
    """Sets where the defaults of sampling fields come from: auto reads the model's generation_config.json or its GGUF
    metadata, and else takes the values that are known for its family; a folder's generation_config.json; neutral (or
    vllm) samples at temperature 1 without filters."""
    override_generation_config: str = ""
    """Sets some of these defaults, as a JSON object such as {"temperature": 0.5}. The fields of a request still win."""

    def __post_init__(self) -> None:
        self.overrides()

    def overrides(self) -> dict[str, Any]:
        """The fields of --override-generation-config; ConfigError when it is no JSON object."""
        try:
            values = json.loads(self.override_generation_config or "{}")
        except ValueError as error:
            raise ConfigError(f"--override-generation-config is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(
                f'--override-generation-config is {values!r}, must be a JSON object such as {{"temperature": 0.5}}'
            )
        return values


AUTOMATIC = GenerationConfig()
"""The model's own defaults, and nothing over them."""
