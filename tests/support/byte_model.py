"""A tiny random model as a folder that a cluster can serve: bytes are tokens, 255 ends an output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.byte_tokenizer import write_byte_tokenizer
from support.tiny_models import save_tiny


def save_byte_model(folder: Path, name: str = "llama", **overrides: Any) -> Path:
    """Of `CONFIGS[name]` (see `support.tiny_models`)."""
    save_tiny(folder, name, **({"vocab_size": 256, "eos_token_id": 255} | overrides))
    config = (folder / "config.json").read_text()
    write_byte_tokenizer(folder)  # writes a config.json of its own
    (folder / "config.json").write_text(config)
    return folder


def page_bytes(folder: Path, ranks: int, page_size: int, dtype: str) -> int:
    """Bytes of a page in every cache group, of the rank that holds most KV heads."""
    from allspan.protos.config.settings import CacheConfig, ModelConfig
    from allspan.worker.load.loader import prepare

    cache = CacheConfig(page_size=page_size, kv_cache_dtype=dtype)
    model = ModelConfig(path=str(folder), name="tiny")
    groups = [prepare(model, cache, rank, ranks).cache_groups for rank in range(ranks)]
    return max(sum(group.spec.bytes_per_page for group in of_rank) for of_rank in groups)
