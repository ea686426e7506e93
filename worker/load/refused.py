"""Model types that are known and not supported: what each would need."""

from __future__ import annotations

_GEMMA4 = "two head sizes, values without a projection of their own, and layers that share a cache"
_PROJECTION_NORM = "norms of queries and keys over all heads of all ranks"
_ENCODER = "attention in both directions, learned positions and segments: take an embedding model made of a decoder"

MISSING = {
    **dict.fromkeys(("bert", "nomic-bert", "roberta", "xlm-roberta", "distilbert", "mpnet", "modernbert"), _ENCODER),
    "gemma3n": "embeddings for each layer, layers that share a cache, and AltUp",
    "gemma3n_text": "embeddings for each layer, layers that share a cache, and AltUp",
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "gemma-embedding": "attention in both directions",
    "olmo2": _PROJECTION_NORM,
    "olmo3": _PROJECTION_NORM,
    "cohere": "an attention block and an MLP block side by side",
    "cohere2": "an attention block and an MLP block side by side",
    "command-r": "an attention block and an MLP block side by side",
    "hunyuan_v1_dense": "norms of queries and keys after the rotary embedding",
    "hunyuan-dense": "norms of queries and keys after the rotary embedding",
}
"""A model type of config.json or an architecture of GGUF → what its computation has and no block here has."""


def why_refused(name: object) -> str:
    """Returns what a message says of a known model type before it lists the supported ones; else an empty text."""
    missing = MISSING.get(name) if isinstance(name, str) else None
    return f": it needs {missing}" if missing else ""
