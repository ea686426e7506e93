"""A real model takes embedding rows in the place of token ids: the model's own rows of the same ids give equal tokens,
whatever runs beside them and wherever chunks begin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allspan import Engine, SamplingParams
from allspan.protos.api.errors import InvalidRequest
from allspan.worker.step.row_inputs import PromptEmbeddings
from support.tiny_models import prompt, save_tiny

SETTINGS: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 16, "page_size": 16}
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """A folder, and the embedding of each token."""
    folder = tmp_path_factory.mktemp("model")
    reference = save_tiny(folder, "qwen2")
    return folder, reference.get_input_embeddings().weight.detach().numpy()


def test_rows_of_the_same_ids_give_equal_tokens(model: tuple[Path, np.ndarray]) -> None:
    folder, table = model
    asked = [prompt(length, len(table), length) for length in (5, 40, 23)]
    with Engine(folder, kernels="cpu", **SETTINGS) as engine:
        expected = engine.generate(asked, PARAMS)
        queues = []
        for ids, (first, last) in zip(asked, ((0, 5), (7, 36), (22, 23)), strict=True):
            rows = PromptEmbeddings(first, table[ids[first:last]])
            unsaid = [*ids[:first], *[0] * (last - first), *ids[last:]]
            queues.append(engine.start_with_embeddings(unsaid, rows, PARAMS)[1])
        found = [list(queue) for queue in queues]
    for one, outputs in zip(expected, found, strict=True):
        assert tuple(token for output in outputs for token in output.token_ids) == one.token_ids


def test_other_rows_are_another_prompt(model: tuple[Path, np.ndarray]) -> None:
    folder, table = model
    ids = prompt(33, len(table))
    with Engine(folder, kernels="cpu", **SETTINGS) as engine:
        tokens = []
        for shift in (0, 1, 0):
            rows = PromptEmbeddings(0, np.roll(table, shift, axis=0)[ids])
            queue = engine.start_with_embeddings(ids, rows, PARAMS)[1]
            tokens.append([token for output in queue for token in output.token_ids])
    assert tokens[0] == tokens[2] != tokens[1]


def test_rows_of_another_width_are_refused(model: tuple[Path, np.ndarray]) -> None:
    folder, table = model
    with (
        Engine(folder, kernels="cpu", **SETTINGS) as engine,
        pytest.raises(InvalidRequest, match=r"shape \(2, 5\), must be \[tokens, 96\]"),
    ):
        engine.start_with_embeddings([1, 2], PromptEmbeddings(0, table[:2, :5]), PARAMS)
