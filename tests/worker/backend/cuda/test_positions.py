"""Three positions a token on the CUDA kernels: steps op by op, padded ones and recorded ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from allspan import Engine, SamplingParams
from allspan.worker.step.row_inputs import PromptPositions
from support.prompt_positions import logits_at, picture, save_sectioned, text
from support.tiny_models import prompt, save_tiny

SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "page_size": 16,
    "kv_cache_bytes": 4_000_000,
}
SIZES: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
PARAMS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
ASKED = [(prompt(21, 97, 1), picture(21, 3, 3, 5)), (prompt(9, 97, 2), picture(9, 0, 2, 4))]


def test_positions_turn_queries_and_keys_as_in_transformers(tmp_path: Path, on: dict[str, Any]) -> None:
    save_tiny(tmp_path / "plain", "qwen2", torch.bfloat16, tie_word_embeddings=True, **SIZES)
    reference = save_sectioned(tmp_path / "sectioned", [2, 3, 3], torch.bfloat16, **SIZES)
    with Engine(tmp_path / "plain", **on, **SETTINGS) as engine:
        expected = [one.token_ids for one in engine.generate([ids for ids, _ in ASKED], PARAMS)]
    found: list[list[tuple[int, ...]]] = []
    with Engine(tmp_path / "sectioned", **on, **SETTINGS) as engine:
        for placed in ([(ids, text(len(ids))) for ids, _ in ASKED], ASKED):
            queues = [engine.start_with_positions(ids, PromptPositions(at), PARAMS)[1] for ids, at in placed]
            found.append([tuple(token for output in queue for token in output.token_ids) for queue in queues])
    assert found[0] == expected != found[1]
    for tokens, (ids, positions) in zip(found[1], ASKED, strict=True):
        logits = logits_at(reference, [*ids, *tokens], positions)[len(ids) - 1 : -1]
        said = logits[torch.arange(len(tokens)), torch.tensor(tokens)]
        assert (logits.amax(-1) - said <= 0.05 * logits.std(-1)).all()
