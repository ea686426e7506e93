"""What the files of a model say of its embeddings, and what of it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allspan.protos.api.errors import CheckpointError, InvalidRequest
from allspan.protos.embeddings.calls import text_pairs
from allspan.protos.embeddings.card import EmbeddingCard, embedding_card
from allspan.protos.embeddings.rerank import QWEN3
from allspan.protos.embeddings.vectors import cosine, embedding, probability, ranked, to_base64


def write(folder: Path, **files: Any) -> Path:
    """JSON files by their names, in which "__" stands for a folder."""
    for name, value in files.items():
        file = folder / (name.replace("__", "/") + ".json")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(value))
    return folder


def modules(*kinds: str) -> list[dict[str, Any]]:
    paths = {"Pooling": "pool", "Transformer": ""}
    return [{"type": f"sentence_transformers.models.{kind}", "path": paths.get(kind, kind)} for kind in kinds]


def test_a_plain_model_takes_the_last_token_and_generates(tmp_path: Path) -> None:
    card = embedding_card(write(tmp_path, config={"architectures": ["LlamaForCausalLM"], "hidden_size": 8}))
    assert card == EmbeddingCard(size=8)


@pytest.mark.parametrize(
    ("architecture", "generates"),
    [("Qwen3Model", False), ("ChatGLMModel", True), ("QWenLMHeadModel", True), ("BaichuanForCausalLM", True)],
)
def test_a_class_with_a_head_generates_whatever_its_name(architecture: str, generates: bool, tmp_path: Path) -> None:
    assert embedding_card(write(tmp_path, config={"architectures": [architecture]})).generates is generates


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_sentence_transformers_files_decide(tmp_path: Path, pooling: dict[str, Any], expected: str) -> None:
    folder = write(
        tmp_path,
        config={"architectures": ["Qwen3Model"], "hidden_size": 8},
        modules=modules("Transformer", "Pooling"),
        pool__config=pooling,
        config_sentence_transformers={"prompts": {"query": "Q: ", "document": ""}, "default_prompt_name": "query"},
    )
    card = embedding_card(folder)
    assert (card.pooling, card.normalize, card.generates) == (expected, False, False)
    assert (card.prompt(None), card.prompt("search_document"), card.prompt("search_query")) == ("Q: ", "", "Q: ")
    with pytest.raises(InvalidRequest, match="input_type is 'sts', must be one of the model's prompts"):
        card.prompt("sts")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"modules": modules("Transformer", "Dense")}, "'Dense' is not supported"),
        ({"modules": modules("Pooling"), "pool__config": {"pooling_mode_max_tokens": True}}, "pooling 'max_tokens'"),
        ({"modules": [{"type": "a.Pooling", "path": "../x"}]}, "must lie within the folder"),
        ({"modules": {"a": 1}}, "must be a list"),
        ({"config_sentence_transformers": {"prompts": {"query": 1}}}, "prompts must be"),
        ({"config_sentence_transformers": {"default_prompt_name": "query"}}, "which prompts does not have"),
        ({"config_sentence_transformers": {"similarity_fn_name": "manhattan"}}, "'manhattan' is not supported"),
        ({"config": {"classifier_from_token": "no"}}, "must be two texts"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        embedding_card(write(tmp_path, **({"config": {"hidden_size": 8}} | files)))


def test_known_models_are_told_by_their_names(tmp_path: Path) -> None:
    folder = write(tmp_path / "Qwen3-Embedding-0.6B", config={"hidden_size": 1024})
    card = embedding_card(folder)
    assert card.is_matryoshka
    assert card.prompt("query").endswith("\nQuery:")
    assert embedding_card(folder, "Qwen3_Reranker 4B").head == QWEN3


def test_dimensions_need_a_model_that_was_trained_for_them() -> None:
    with pytest.raises(InvalidRequest, match="is_matryoshka"):
        EmbeddingCard(size=8).check_dimensions(4)
    EmbeddingCard(size=8).check_dimensions(8)
    with pytest.raises(InvalidRequest, match="must be one of 4, 2"):
        EmbeddingCard(size=8, is_matryoshka=True, dimensions=(4, 2)).check_dimensions(3)
    with pytest.raises(InvalidRequest, match="must be from 1 to 8"):
        EmbeddingCard(size=8, is_matryoshka=True).check_dimensions(9)


def test_vectors_are_cut_and_then_normalised() -> None:
    sent = np.asarray([3.0, 4.0, 100.0], dtype="<f4").tobytes()
    assert embedding(sent, 2).tolist() == pytest.approx([0.6, 0.8])
    assert embedding(sent, normalize=False).tolist() == [3.0, 4.0, 100.0]
    assert embedding(bytes(8)).tolist() == [0.0, 0.0]
    assert to_base64(np.asarray([1.0], dtype=np.float32)) == "AACAPw=="
    assert cosine(embedding(sent), embedding(sent)) == pytest.approx(1.0)
    assert probability(np.asarray([-800.0], dtype="<f4").tobytes()) == pytest.approx(0.0)
    assert ranked([0.1, 0.9, 0.9], 2) == [(1, 0.9), (2, 0.9)]


def test_texts_of_a_pair_are_no_control_tokens() -> None:
    made = QWEN3.prompt("<|im_end|>", "{query}")
    assert made.count("<|im_end|>") == 3
    assert "<Document>: {query}<|im_end|>" in made
    own = "".join(made[a:b] for a, b in made.own)
    assert own.count("<|im_end|>") == 2


@pytest.mark.parametrize("dimensions", [0, -1, True, 1.5, "a"])
def test_dimensions_that_are_no_number_of_elements_are_refused(dimensions: Any, tmp_path: Path) -> None:
    card = embedding_card(write(tmp_path, config={"text_config": {"hidden_size": 8}, "is_matryoshka": True}))
    assert card.size == 8
    with pytest.raises(InvalidRequest, match=r"dimensions is .*, must be a number from 1 on"):
        card.check_dimensions(dimensions)
    with pytest.raises(InvalidRequest, match="must be from 1 to 8"):
        card.check_dimensions(9)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "no Pooling module"),
        (json.dumps(modules("Transformer", "Pooling", "Pooling")), "two Pooling modules"),
        (json.dumps(modules("Pooling")) + ',"x":1', "list of at most 16 modules"),
    ],
)
def test_modules_that_leave_pooling_open_are_refused(text: str, said: str, tmp_path: Path) -> None:
    folder = write(tmp_path, config={"architectures": ["Qwen3Model"]}, pool__config={"pooling_mode": "mean"})
    (folder / "modules.json").write_text(text)
    with pytest.raises(CheckpointError, match=said):
        embedding_card(folder)


@pytest.mark.parametrize("given", [None, 5, {"a": 1}, b"a"])
def test_what_is_no_text_cannot_be_scored(given: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"documents is .*, must be a text or a list of texts"):
        text_pairs("q", given)
    with pytest.raises(InvalidRequest, match=r"queries is .*, must be a text or a list of texts"):
        text_pairs(given, ["a"])
    with pytest.raises(InvalidRequest, match="input_type is"):
        EmbeddingCard().prompt([given])  # type: ignore[arg-type]
