"""Sliding windows: how many tokens each layer sees."""

from __future__ import annotations

from allspan.protos.model_files.json_values import shown
from allspan.worker.models.foreign.config import ForeignConfig

FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers, as `layer_types` names them."""


def read_layer_types(config: ForeignConfig) -> list[str] | None:
    """The kind of each layer, or None where the config does not say. Raises CheckpointError for other kinds."""
    kinds, count = config.get("layer_types"), config.size("num_hidden_layers")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != count:
        raise config.error(f"layer_types must be a list of num_hidden_layers ({count}) names, got {shown(kinds)}")
    if unknown := sorted({str(kind) for kind in kinds} - {FULL, SLIDING}):
        raise config.error(f"layer_types {shown(unknown[0])} is not supported (supported: {FULL}, {SLIDING})")
    return [str(kind) for kind in kinds]


def read_window(config: ForeignConfig) -> int:
    """`sliding_window` in tokens; 0 where it is null or missing. Raises CheckpointError for one without a token."""
    return 0 if config.get("sliding_window") is None else config.size("sliding_window")


def same_window(config: ForeignConfig, context: int, window: int) -> list[int]:
    """The same window for each layer, 0 where a layer sees the whole context anyway."""
    return [window if window < context else 0] * config.size("num_hidden_layers")


def read_windows(config: ForeignConfig, context: int, window: int, first: int = 0) -> list[int]:
    """The window of each layer, 0 where it sees all tokens, as it does with a window of the whole context.
    `layer_types`, where given, says which layers have the window; else all from layer `first` on."""
    windows, kinds = same_window(config, context, window), read_layer_types(config)
    if kinds is None:
        return [each if layer >= first else 0 for layer, each in enumerate(windows)]
    return [each if kind == SLIDING else 0 for each, kind in zip(windows, kinds, strict=True)]


def read_pattern(config: ForeignConfig, key: str) -> list[str]:
    """The kind of each layer by `layer_types`, or by the pattern under `key`, 6 where it is missing: every so many'th
    layer sees all tokens; or a list of whether each layer has the window."""
    kinds, count, pattern = read_layer_types(config), config.size("num_hidden_layers"), config.get(key)
    if kinds is not None:
        return kinds
    if isinstance(pattern, list):
        if len(pattern) != count or not all(isinstance(slides, bool) for slides in pattern):
            raise config.error(f"{key} must be a number, or have true or false for each layer, got {shown(pattern)}")
        return [SLIDING if slides else FULL for slides in pattern]
    every = config.size(key, 6)
    return [SLIDING if (layer + 1) % every else FULL for layer in range(count)]
