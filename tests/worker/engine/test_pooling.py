"""A request may ask for a vector: the final hidden states of transformers, pooled, with equal bits however it ran."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from allspan import Engine, RequestOptions, SamplingParams
from allspan.protos.api.errors import DeadlineExceeded, InvalidRequest
from allspan.protos.embeddings.rerank import QWEN3
from support.byte_tokenizer import write_byte_tokenizer
from support.cores import fake_core, request
from support.tiny_models import prompt, save_tiny
from support.waiting import wait_until

SIZES: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4, "page_size": 16, "threads": 1}
LENGTHS = (1, 2, 17, 64, 100)
POOLED = {"last": lambda rows: rows[-1], "mean": lambda rows: rows.mean(0), "cls": lambda rows: rows[0]}


def hidden(reference: Any, ids: list[int]) -> torch.Tensor:
    """Final hidden states of all tokens, [n, H]."""
    with torch.no_grad():
        found: torch.Tensor = reference.model(torch.tensor([ids])).last_hidden_state[0]
    return found


def test_vectors_are_transformers_with_equal_bits_in_any_chunks_alone_among_others_and_cached(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "qwen3")
    prompts = [prompt(length, reference.config.vocab_size, length) for length in LENGTHS]
    expected = [hidden(reference, ids) for ids in prompts]
    first: dict[str, np.ndarray[Any, Any]] = {}
    for step_tokens, caching in ((4, True), (7, False), (256, True)):
        settings = SIZES | {"max_num_batched_tokens": step_tokens, "enable_prefix_caching": caching}
        with Engine(tmp_path, **settings) as engine:
            handle, _ = engine.start_request([1, 2, 3], SamplingParams(max_tokens=120, ignore_eos=True))
            for pooling, pool in POOLED.items():
                options = RequestOptions(pooling=pooling)
                found = engine.embed(prompts, normalize=False, options=options)
                np.testing.assert_allclose(found, [pool(rows) for rows in expected], atol=1e-5)
                assert np.array_equal(engine.embed(prompts[-1], normalize=False, options=options)[0], found[-1])
                assert np.array_equal(first.setdefault(pooling, found), found)
            engine.release_request(handle)
            statistics = engine.statistics()
            assert (statistics.prefix_hit_tokens > 0) == caching
            wait_until(lambda held=engine: not held.statistics().pages_used)


def test_cosine_and_length_of_the_default_are_those_of_the_last_token(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "qwen3")
    ids = prompt(40, reference.config.vocab_size, 5)
    row = hidden(reference, ids)[-1].double().numpy()
    with Engine(tmp_path, **SIZES) as engine:
        vector = engine.embed(ids)[0].astype(np.float64)
    assert abs(np.sqrt((vector * vector).sum()) - 1) < 1e-6
    assert vector @ row / np.sqrt(row @ row) > 1 - 1e-6


def test_a_reranker_gives_the_probability_of_yes_over_no(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "qwen3", vocab_size=256, max_position_embeddings=512)
    config = (tmp_path / "config.json").read_text()
    write_byte_tokenizer(tmp_path)
    # Answers of this tokenizer are single bytes.
    (tmp_path / "config.json").write_text(config.replace("{", '{"classifier_from_token": ["n", "y"], ', 1))
    with Engine(tmp_path, **(SIZES | {"max_model_len": 512})) as engine:
        found = engine.score("what", ["a document", "another"])
        for score, document in zip(found, ("a document", "another"), strict=True):
            ids = engine.tokenizer.encode(QWEN3.prompt("what", document), add_special_tokens=False)
            with torch.no_grad():
                logits = reference(torch.tensor([ids])).logits[0, -1].double()
            pair = logits[[ord("n"), ord("y")]]
            assert abs(score - torch.softmax(pair, 0)[1].item()) < 1e-5
        ranked = engine.rerank("what", ["a document", "another"], top_n=1)
        assert [each.index for each in ranked] == [int(np.argmax(found))]


def test_a_folder_for_embeddings_alone_pools_as_its_files_say_and_refuses_to_generate(tmp_path: Path) -> None:
    """Laid out as Qwen3-Embedding: a Qwen3Model, whose names have no prefix, with sentence-transformers' files."""
    reference = save_tiny(tmp_path / "whole", "qwen3")
    reference.model.save_pretrained(tmp_path)
    modules = [{"type": "models.Transformer", "path": ""}, {"type": "models.Pooling", "path": "1_Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    ids = prompt(40, reference.config.vocab_size, 5)
    with Engine(tmp_path, **SIZES) as engine:
        np.testing.assert_allclose(engine.embed(ids)[0], hidden(reference, ids).mean(0), atol=1e-5)
        with pytest.raises(InvalidRequest, match="makes embeddings and generates no tokens"):
            engine.generate([1, 2], SamplingParams(max_tokens=1))


def test_a_deadline_ends_a_request_for_a_vector(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3", max_position_embeddings=8192)
    with Engine(tmp_path, **(SIZES | {"max_model_len": 8192, "max_num_batched_tokens": 4})) as engine:
        with pytest.raises(DeadlineExceeded):
            engine.embed([list(range(90)) * 80], options=RequestOptions(timeout_s=0.05))
        wait_until(lambda: not engine.statistics().pages_used)


def test_what_cannot_be_pooled_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="pooling is 'max', must be one of last, mean, cls, score"):
        RequestOptions(pooling="max")
    core, _ = fake_core()
    one = request(0, [1], max_tokens=1)
    one.options = RequestOptions(pooling="last")
    with pytest.raises(InvalidRequest, match="the model gives no hidden states"):
        core.submit(one)
