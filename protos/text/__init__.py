"""Text on the client's side: tokenizers, chat templates, incremental detokenising, stop strings, generation defaults.

Needs only `tokenizers`, `jinja2` and `numpy`, never torch; transformers only for a folder without a tokenizer.json.
Lazy: a rank, which asks for generation defaults alone, loads none of them but numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from allspan.protos.text.defaults import SamplingDefaults, default_params, sampling_defaults
    from allspan.protos.text.model_defaults import GenerationDefaults, generation_defaults
    from allspan.protos.text.stream.detokenizer import Detokenizer
    from allspan.protos.text.stream.stop import StopStrings
    from allspan.protos.text.tokenizers.loading import load_tokenizer
    from allspan.protos.text.tokenizers.tokenizer import Tokenizer

__all__ = [
    "Detokenizer",
    "GenerationDefaults",
    "SamplingDefaults",
    "StopStrings",
    "Tokenizer",
    "default_params",
    "generation_defaults",
    "load_tokenizer",
    "sampling_defaults",
]

_HOMES = {
    "Detokenizer": "stream.detokenizer",
    "GenerationDefaults": "model_defaults",
    "SamplingDefaults": "defaults",
    "StopStrings": "stream.stop",
    "Tokenizer": "tokenizers.tokenizer",
    "default_params": "defaults",
    "generation_defaults": "model_defaults",
    "load_tokenizer": "tokenizers.loading",
    "sampling_defaults": "defaults",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
