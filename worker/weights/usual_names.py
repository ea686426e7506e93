"""Names of tensors in Hugging Face's folders, whose beginning tells which class has saved them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_USUAL = "model."
_EMBEDDING = "embed_tokens.weight"
_HEADS = {"language_model.lm_head.": "lm_head.", "model.lm_head.": "lm_head."}
_NESTED = ("language_model.model.", "model.language_model.")
"""Beginnings of the text's tensors in models of images and text."""
_BARE = ("layers.", "norm.", "embed_tokens.")
"""Beginnings of tensors that a model without its head has saved."""


def usual_names(names: Iterable[str]) -> Mapping[str, str]:
    """Each name → the one that a model of text with a head would have saved the tensor under. Which beginning names
    have is told by the embedding's; names without one that is known stay."""
    found = list(names)
    known = set(found)
    if _USUAL + _EMBEDDING in known:
        return {name: name for name in found}
    prefix = next((prefix for prefix in _NESTED if prefix + _EMBEDDING in known), "")
    if not prefix and _EMBEDDING not in known:
        return {name: name for name in found}
    starts = {prefix: _USUAL} if prefix else {start: _USUAL + start for start in _BARE}
    starts = starts | _HEADS

    def usual(name: str) -> str:
        return next((new + name[len(old) :] for old, new in starts.items() if name.startswith(old)), name)

    return {name: usual(name) for name in found}
