"""A model with a multimodal rotary embedding takes three positions a token, as transformers does; equal ones are a
token's index, whatever runs beside them and wherever chunks begin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allspan import Engine, SamplingParams
from allspan.protos.api.errors import InvalidRequest
from allspan.worker.step.row_inputs import PromptPositions
from support.prompt_positions import logits_at, picture, save_sectioned, text
from support.tiny_models import prompt, save_tiny

PAGE_SIZE, CHUNK = 16, 16
SETTINGS: dict[str, Any] = {
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": CHUNK,
    "page_size": PAGE_SIZE,
}
PARAMS = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, logprobs=1)
SIZES: dict[str, Any] = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}
ASKED = [
    (prompt(40, 97, 1), picture(40, 3, 4, 5)),
    (prompt(33, 97, 2), picture(33, 9, 6, 4)),
    (prompt(23, 97, 3), picture(23, 0, 2, 7)),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    """The same weights without sections and with them, and transformers' model of the latter."""
    plain, sectioned = (tmp_path_factory.mktemp(name) for name in ("plain", "sectioned"))
    save_tiny(plain, "qwen2", tie_word_embeddings=True, **SIZES)
    return plain, sectioned, save_sectioned(sectioned, [2, 3, 3], **SIZES)


def check(outputs: list[Any], ids: list[int], positions: np.ndarray, reference: Any) -> None:
    """Every token is the reference's, with its log-probability."""
    said = [token for output in outputs for token in output.token_ids]
    assert len(said) == PARAMS.max_tokens
    expected = logits_at(reference, [*ids, *said], positions)[len(ids) - 1 : -1].log_softmax(-1)
    assert said == expected.argmax(-1).tolist()
    found = [each.logprob for output in outputs for each in output.logprobs or ()]
    assert found == pytest.approx(expected.amax(-1).tolist(), abs=2e-4)


def with_index_positions(engine: Engine, prompts: list[list[int]]) -> list[list[Any]]:
    """The outputs of prompts whose three positions are a token's index, all started at once."""
    queues = [engine.start_with_positions(ids, PromptPositions(text(len(ids))), PARAMS)[1] for ids in prompts]
    return [list(queue) for queue in queues]


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_distinct_positions_are_those_of_transformers(folders: tuple[Path, Path, Any], kernels: str) -> None:
    with Engine(folders[1], kernels=kernels, **SETTINGS) as engine:
        queues = [engine.start_with_positions(ids, PromptPositions(at), PARAMS)[1] for ids, at in ASKED]
        found = [list(queue) for queue in queues]
    for outputs, (ids, positions) in zip(found, ASKED, strict=True):
        check(outputs, ids, positions, folders[2])


def test_the_answer_goes_on_from_the_largest_position_not_from_the_last(folders: tuple[Path, Path, Any]) -> None:
    """The prompt's last token is a chunk of its own, which runs as the steps behind it do."""
    ids, positions = ASKED[1]
    assert len(ids) % CHUNK == 1
    assert (positions[:, -1] < positions.max()).any()
    with Engine(folders[1], kernels="cpu", **SETTINGS) as engine:
        outputs = list(engine.start_with_positions(ids, PromptPositions(positions), PARAMS)[1])
    check(outputs, ids, positions, folders[2])


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize("pages", ["float32", "int8"])
def test_equal_positions_are_the_index_of_a_token(folders: tuple[Path, Path, Any], kernels: str, pages: str) -> None:
    """The CPU kernels give equal bits beside anything; torch's follow what runs beside a row: its prompts run alone."""
    plain, sectioned, _ = folders
    asked = [ids for ids, _ in ASKED]
    settings = SETTINGS | {"kernels": kernels, "kv_cache_dtype": pages}
    batches = [asked] if kernels == "cpu" else [[ids] for ids in asked]
    with Engine(plain, **settings) as engine:
        expected = [output for batch in batches for output in engine.generate(batch, PARAMS)]
    with Engine(sectioned, **settings) as engine:
        silent = [output for batch in batches for output in engine.generate(batch, PARAMS)]
        said = [outputs for batch in batches for outputs in with_index_positions(engine, batch)]
    for one, other, outputs in zip(expected, silent, said, strict=True):
        assert (other.token_ids, other.logprobs) == (one.token_ids, one.logprobs)
        assert tuple(token for output in outputs for token in output.token_ids) == one.token_ids
        assert tuple(each for output in outputs for each in output.logprobs or ()) == tuple(one.logprobs or ())


def test_other_positions_are_another_prompt_to_the_prefix_cache(folders: tuple[Path, Path, Any]) -> None:
    ids, positions = ASKED[0]
    with Engine(folders[1], kernels="cpu", **SETTINGS) as engine:
        queues = [engine.start_request(ids, PARAMS)[1]]
        list(queues[0])
        for at in (positions, positions + 1, positions):
            queues.append(engine.start_with_positions(ids, PromptPositions(at), PARAMS)[1])
            *_, last = queues[-1]
            expected = len(ids) // PAGE_SIZE * PAGE_SIZE if len(queues) == 4 else 0
            assert last.timings is not None
            assert last.timings.cached_tokens == expected


def test_positions_that_do_not_fit_are_refused(folders: tuple[Path, Path, Any]) -> None:
    plain, sectioned, _ = folders
    three = np.zeros((3, 4), dtype=np.int32)
    with Engine(sectioned, kernels="cpu", **SETTINGS) as engine:
        for rows, words in (
            (three[:2], r"shape \(2, 4\), must be \(3, 4\)"),
            (three - 1, "reach from -1 to -1"),
            (three + 127, r"to 127, must be within 0 and max_model_len - 2 \(126\)"),
        ):
            with pytest.raises(InvalidRequest, match=words):
                engine.start_with_positions([1, 2, 3, 4], PromptPositions(rows), PARAMS)
        queue = engine.start_with_positions([1, 2, 3, 4], PromptPositions(three + 125), PARAMS)[1]
        assert sum(len(output.token_ids) for output in queue) == 2
    with Engine(plain, kernels="cpu", **SETTINGS) as engine, pytest.raises(InvalidRequest, match="leave them out"):
        engine.start_with_positions([1, 2, 3, 4], PromptPositions(three), PARAMS)
