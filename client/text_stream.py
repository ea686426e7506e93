"""`TextStream` lies in `protos`, beside the tokenizers: `Engine` uses it too."""

from allspan.protos.text.stream import TextDelta, TextStream

__all__ = ["TextDelta", "TextStream"]
