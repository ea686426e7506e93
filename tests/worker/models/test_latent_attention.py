"""Families with latent attention against transformers, on any number of ranks, in chunks and formats of the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from allspan.protos.config.settings import CacheConfig
from allspan.worker.load.registry import find_model
from allspan.worker.models.spec_json import spec_json, spec_of
from support.latent_models import IDS, MODELS, save_latent
from support.tiny_models import logits_on_ranks, prompt, reference_logits, relative_error


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers_on_any_number_of_ranks(name: str, tmp_path: Path) -> None:
    expected = reference_logits(save_latent(tmp_path, name), IDS)
    assert relative_error(logits_on_ranks(tmp_path, 1, [IDS])[0], expected) < 1e-4
    for ranks, chunk in ((1, 70), (2, 33), (3, 70), (4, 1024)):
        found = logits_on_ranks(tmp_path, ranks, [IDS], chunk=chunk, backend="cpu")[0]
        assert relative_error(found, expected) < 1e-4, f"{ranks} ranks, chunks of {chunk}"
    spec = find_model(str(tmp_path)).spec
    assert spec_of(spec_json(spec)) == spec


def test_the_bias_of_a_choice_changes_the_experts(tmp_path: Path) -> None:
    """Else the models above would show nothing of it."""
    model = save_latent(tmp_path, "v3")
    expected = reference_logits(model, IDS)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.mul_(0.0 if "correction_bias" in name else 1.0)
    assert relative_error(reference_logits(model, IDS), expected) > 0.1
    model.save_pretrained(tmp_path)
    assert relative_error(logits_on_ranks(tmp_path, 1, [IDS], backend="cpu")[0], expected) > 0.1


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "int8", "uint4", "fp8"])
def test_a_prompt_in_chunks_and_among_others_gets_the_same_bits(dtype: Any, tmp_path: Path) -> None:
    """Chunks that end within a page, at its end and behind it."""
    save_latent(tmp_path, "v2 lite", max_position_embeddings=256)
    ids = prompt(200, 97)
    others = [prompt(19, 97), ids, prompt(1, 97)]
    pages = CacheConfig(page_size=64, kv_cache_dtype=dtype)
    alone = logits_on_ranks(tmp_path, 1, [ids], chunk=4096, backend="cpu", cache=pages)[0]
    for chunk in (1, 63, 64, 65, 170):
        found = logits_on_ranks(tmp_path, 1, [ids], chunk=chunk, backend="cpu", cache=pages)[0]
        assert torch.equal(found, alone), chunk
    assert torch.equal(logits_on_ranks(tmp_path, 1, others, backend="cpu", cache=pages)[1], alone)


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 0.02), ("int8", 0.07), ("uint4", 0.4), ("fp8", 0.15)])
def test_latents_in_fewer_bits_give_nearly_the_same_logits(dtype: Any, most: float, tmp_path: Path) -> None:
    """Nearly on the whole: where a choice of experts changes, single logits are others."""
    expected = reference_logits(save_latent(tmp_path, "v2 lite"), IDS)
    pages = CacheConfig(page_size=16, kv_cache_dtype=dtype)
    for backend in ("reference", "cpu"):
        found = logits_on_ranks(tmp_path, 2, [IDS], chunk=33, cache=pages, backend=backend)[0]
        assert float((found - expected).norm() / expected.norm()) < most
