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
from allspan.worker.step.row_inputs import RowInputs
from support.byte_tokenizer import write_byte_tokenizer
from support.cores import Collected, fake_core, fake_gpu_core, request, step_until_idle
from support.fake_model import HIDDEN, FakeModel, greedy, logits_after
from support.threads import ThreadWorld
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
                with pytest.raises(InvalidRequest, match="prompt_logprobs is given beside pooling"):
                    engine.generate([prompts[0]], SamplingParams(prompt_logprobs=2), options)
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


WIDTHS = {1: (97,), 3: (33, 32, 32)}


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize(("make", "size"), [(fake_core, 1), (fake_core, 3), (fake_gpu_core, 3)])
@pytest.mark.parametrize("event", ["cancel", "preempt"])
def test_a_prompt_that_leaves_halfway_keeps_no_page_and_changes_no_other_vector_or_token(
    event: str, make: Any, size: int, pooling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeModel, "row_inputs", RowInputs(hidden_size=HIDDEN))
    world, collected = ThreadWorld(size), Collected()
    widths = {"widths": WIDTHS[size]} if make is fake_core else {}
    ranks = [
        {"collectives": world.collectives[rank], "channel": world.channels[rank]} if size > 1 else {}
        for rank in range(size)
    ]
    cores = [make(18, collected, **each, **widths)[0] for each in ranks]
    halfway, other, decode = [7] * 40, [8, 9] * 11, [1, 2, 3]

    def submit(number: int, ids: list[int], priority: int = 0, **params: Any) -> Any:
        for core in reversed(cores):
            one = request(number, ids, **params)
            one.options = RequestOptions(pooling="" if params["max_tokens"] > 1 else pooling, priority=priority)
            core.submit(one)
        return one

    def on_rank(rank: int) -> None:
        if rank:
            return cores[rank].run()
        one = submit(0, halfway, max_tokens=1)
        for _ in range(2 if make is fake_core else 1):  # a GPU's next step is in flight then
            cores[0].step()
        assert 0 < one.num_computed < len(halfway)
        submit(1, decode, max_tokens=9)
        submit(2, other, max_tokens=1)
        if event == "cancel":
            for core in reversed(cores):
                core.cancel([one.request_id])
        else:
            submit(3, [5] * 52, priority=-1, max_tokens=9)
        step_until_idle(cores[0])
        assert (cores[0].statistics().preemptions > 0) == (event == "preempt")
        cores[0].shutdown()
        return cores[0].run()

    world.run(on_rank)
    assert not collected.errors
    outputs = [collected.outputs[number.to_bytes(16, "little")] for number in range(3)]
    assert list(outputs[1].token_ids) == greedy(decode, 9)
    assert outputs[0].finish_reason == ("cancelled" if event == "cancel" else "stop")
    for output, ids in [(outputs[2], other), (outputs[0], halfway)][: 1 + (event == "preempt")]:
        states = np.stack([logits_after(ids[: end + 1], 97)[:HIDDEN] for end in range(len(ids))])
        np.testing.assert_allclose(np.frombuffer(output.vector, "<f4"), POOLED[pooling](states), atol=1e-6)
    assert [core.statistics().running for core in cores] == [0] * size
    assert cores[0].statistics().pages_used == 0
    assert not any(core._batch._pools or core._batch._parked for core in cores)


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
