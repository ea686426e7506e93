"""The values of a foreign config, put in the usual places under the usual names before a family reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allspan.worker.models.foreign.family import Family

_OUTSIDE = ("bos_token_id", "eos_token_id", "dtype", "torch_dtype", "quantization_config", "compression_config")
"""Keys that may stand beside `text_config` alone."""


def nested(values: Mapping[str, Any], inner: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `text_config`, and those beside it that hold for the text, too. Whether embeddings are tied the
    whole model's config says first: the head is its part."""
    beside = {key: values[key] for key in _OUTSIDE if values.get(key) is not None and inner.get(key) is None}
    tied = values.get("tie_word_embeddings")
    return {**inner, **beside, **({} if tied is None else {"tie_word_embeddings": tied})}


def completed(family: Family, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with those of the family's other names under the usual ones, and its defaults; what is given under
    the usual name stays."""
    given = {usual: values[old] for old, usual in family.renamed.items() if values.get(old) is not None}
    return {**family.defaults, **values, **{usual: each for usual, each in given.items() if values.get(usual) is None}}
