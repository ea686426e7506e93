"""Text on the client's side: tokenizers, chat templates, incremental detokenising, stop strings, generation defaults.

Needs only `tokenizers`, `jinja2` and `numpy`: neither torch nor transformers.
"""

from allspan.protos.text.detokenizer import Detokenizer
from allspan.protos.text.generation import GenerationDefaults, generation_defaults
from allspan.protos.text.loading import load_tokenizer
from allspan.protos.text.stop import StopStrings
from allspan.protos.text.tokenizer import Tokenizer

__all__ = [
    "Detokenizer",
    "GenerationDefaults",
    "StopStrings",
    "Tokenizer",
    "generation_defaults",
    "load_tokenizer",
]
