"""Vectors, scores and tables chosen by prompts with the CUDA kernels, against transformers and vendors' formulas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from allspan import Engine, RequestOptions, SamplingParams
from allspan.protos.embeddings.rerank import QWEN3
from support.byte_tokenizer import write_byte_tokenizer
from support.family_rows import FAMILIES, save_family
from support.tiny_models import prompt
from support.vendor_models import save_vendor, vendor_logits

QWEN = {"hidden_size": 80, "kv_channels": 16, "intermediate_size": 176}
"""Heads and rows that kernels of GPUs can read."""
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "page_size": 16,
    "kv_cache_bytes": 4_000_000,
    "threads": 1,
}
POOLED = {"last": lambda rows: rows[-1], "mean": lambda rows: rows.mean(0), "cls": lambda rows: rows[0]}


def unit(vector: Any) -> Any:
    return vector / np.linalg.norm(vector)


def test_vectors_are_transformers(on: dict[str, Any], tmp_path: Path) -> None:
    """One prompt of two chunks, again from cached pages, among others."""
    model = save_family(tmp_path, FAMILIES["qwen3"]).float()
    prompts = [prompt(length, 97, length) for length in (1, 17, 100)]
    with torch.no_grad():
        rows = [model.model(torch.tensor([ids])).last_hidden_state[0].numpy() for ids in prompts]
    with Engine(tmp_path, dtype="bfloat16", **SETTINGS, **on) as engine:
        for pooling, pool in POOLED.items():
            found = engine.embed(prompts, options=RequestOptions(pooling=pooling))
            cosines = [float(unit(pool(own)) @ one) for own, one in zip(rows, found, strict=True)]
            print(json.dumps({"pooling": pooling, "cosines": cosines}))
            assert min(cosines) > 0.999


def test_scores_are_transformers(on: dict[str, Any], tmp_path: Path) -> None:
    sizes = {"vocab_size": 256, "max_position_embeddings": 512}
    row = FAMILIES["qwen3"]
    model = save_family(tmp_path, type(row)("qwen3", row.config | sizes)).float()
    config = (tmp_path / "config.json").read_text()
    write_byte_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(config.replace("{", '{"classifier_from_token": ["n", "y"], ', 1))
    with Engine(tmp_path, dtype="bfloat16", **SETTINGS, **on) as engine:
        found = engine.score("what", ["a document", "another"])
        for score, document in zip(found, ("a document", "another"), strict=True):
            ids = engine.tokenizer.encode(QWEN3.prompt("what", document), add_special_tokens=False)
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, -1].double()
            expected = torch.softmax(logits[[ord("n"), ord("y")]], 0)[1].item()
            print(json.dumps({"score": float(score), "expected": expected}))
            assert abs(score - expected) < 0.02


@pytest.mark.nightly
@pytest.mark.parametrize("weights", [{}, {"quantization": "int8"}])
def test_each_prompt_of_a_batch_has_the_table_of_its_length(
    weights: dict[str, str], on: dict[str, Any], tmp_path: Path
) -> None:
    """Qwen 1 beyond its original 40 tokens: three rotary tables in one batch, and a second time from cached pages."""
    config, values = save_vendor(tmp_path, "qwen", **QWEN)
    prompts = [prompt(length, 97, 5) for length in (38, 41, 79, 81, 130)]
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=0)
    with Engine(tmp_path, dtype="bfloat16", **SETTINGS, **on, **weights) as engine:
        for _ in range(2):
            for ids, output in zip(prompts, engine.generate(prompts, params), strict=True):
                tokens = list(output.token_ids)
                logits = torch.from_numpy(vendor_logits(config, values, [*ids, *tokens], prompt_len=len(ids)))
                likely = logits[len(ids) - 1 : -1].log_softmax(1)[range(12), tokens]
                told = torch.tensor([entry.logprob for entry in output.logprobs or ()])
                off = float((told - likely).abs().median())
                print(json.dumps({"prompt": len(ids), "off": off, **weights}))
                assert off < 0.1
