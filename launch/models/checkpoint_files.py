"""Checks of a model's files before any process starts, so that a damaged or hostile file is reported at once.

Headers and settings are read, never the weights themselves. The ranks check every tensor once more when they read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from allspan.protos.api.errors import CheckpointError, ConfigError
from allspan.protos.api.wording import counted
from allspan.protos.config.converted_manifest import is_converted, read_manifest
from allspan.protos.model_files.config_values import check_config, check_shapes, gguf_config
from allspan.protos.model_files.json_values import read_json_object
from allspan.protos.model_files.limits import MAX_CONFIG_BYTES, MAX_TEMPLATE_BYTES, MAX_TOKENIZER_BYTES
from allspan.protos.model_files.regular_file import check_regular, is_there
from allspan.protos.model_files.safetensors_header import StoredTensor, read_safetensors_header
from allspan.protos.model_files.weight_files import read_tensors
from allspan.protos.text.tokenizers.gguf_metadata import gguf_of, parts_of, read_header

_MOST_BYTES = {
    "config.json": MAX_CONFIG_BYTES,
    "generation_config.json": MAX_CONFIG_BYTES,
    "tokenizer_config.json": MAX_CONFIG_BYTES,
    "special_tokens_map.json": MAX_CONFIG_BYTES,
    "added_tokens.json": MAX_CONFIG_BYTES,
    "tokenizer.json": MAX_TOKENIZER_BYTES,
    "tokenizer.model": MAX_TOKENIZER_BYTES,
    "qwen.tiktoken": MAX_TOKENIZER_BYTES,
    "tekken.json": MAX_TOKENIZER_BYTES,
    "vocab.json": MAX_TOKENIZER_BYTES,
    "merges.txt": MAX_TOKENIZER_BYTES,
    "chat_template.jinja": MAX_TEMPLATE_BYTES,
    "chat_template.json": MAX_CONFIG_BYTES,
}
"""The files beside the weights that a start may read."""


def check_files(model: Path, has_weights: bool = True) -> None:
    """Checks a model's folder or file: that every file can be read and is a regular one, that sizes are within their
    limits, that tensors lie within their files, and that the manifest of converted weights fits its files. Without
    `has_weights` only the settings are looked at. A folder without a model passes: who reads
    it says so. Raises CheckpointError naming the file."""
    if not model.is_dir():
        if model.suffix == ".json":
            _check_settings(model)
        else:
            _check_gguf(model, has_weights)
        return
    for name, limit in _MOST_BYTES.items():
        if is_there(model / name):
            check_regular(model / name, limit)
    if is_converted(model):
        _check_converted(model)
    elif is_there(model / "config.json"):
        _check_settings(model / "config.json")
        if has_weights:
            tensors = {name: stored for name, (_, stored) in read_tensors(model).items()}
            check_shapes(read_json_object(model / "config.json"), tensors, str(model / "config.json"))
    elif file := gguf_of(model):
        _check_gguf(file, has_weights)


def check_stages(model: Path, stages: int) -> None:
    """Checks that a model has a layer for each stage of a pipeline, where its settings give their number; the ranks
    check it for every family. Raises ConfigError and CheckpointError."""
    if stages == 1:
        return
    config = model / "config.json" if model.is_dir() else model
    values: Mapping[str, object] = {}
    if config.suffix == ".json" and is_there(config):
        values = read_json_object(config)
    elif file := gguf_of(model):
        values = gguf_config(read_header(file).metadata, str(file))
    inner = values.get("text_config")
    layers = (inner if isinstance(inner, dict) else values).get("num_hidden_layers")
    if isinstance(layers, int) and stages > layers:
        raise ConfigError(
            f"--pipeline-parallel-size is {stages}, must be at most {layers}: {model.name} has "
            f"{counted(layers, 'layer')}, and a stage needs one"
        )


def check_tokenizer(model: Path) -> None:
    """Loads the tokenizer of a model, for commands that need it not, but would prepare what cannot be served; one
    without a tokenizer passes. Raises CheckpointError."""
    from allspan.protos.text import load_tokenizer  # takes a part of a second

    gguf = gguf_of(model)
    files = ("tokenizer.json", "tokenizer.model", "qwen.tiktoken", "tekken.json")
    has_one = any(is_there(model / name) for name in files)
    if "tokenizer.ggml.tokens" in read_header(gguf).metadata if gguf else has_one:
        load_tokenizer(model)


def _check_settings(config: Path) -> None:
    check_config(read_json_object(config), str(config))


def _check_gguf(file: Path, has_weights: bool) -> None:
    tensors: dict[str, StoredTensor] = {}
    values: dict[str, object] = {}
    tokens: object = None
    for part in parts_of(file) if has_weights else [file]:
        header = read_header(part)
        if part == file:
            values = gguf_config(header.metadata, str(file))
            tokens = header.metadata.get("tokenizer.ggml.tokens")
        tensors |= {each.name: StoredTensor("", each.shape, each.offset, 0) for each in header.tensors}
    check_config(values, str(file))
    if not has_weights:
        return
    check_shapes(values, tensors, str(file))
    embedding = tensors.get("token_embd.weight")
    if embedding is not None and isinstance(tokens, list) and len(tokens) > embedding.shape[0]:
        raise CheckpointError(
            f"{file}: tokenizer.ggml.tokens has {len(tokens)} tokens, token_embd.weight {embedding.shape[0]} rows: it "
            "is the tokenizer of another model"
        )


def _check_converted(folder: Path) -> None:
    for rank in read_manifest(folder).ranks:
        path = folder / rank.name
        is_missing = not is_there(path)
        found = 0 if is_missing else check_regular(path)
        if is_missing or found != rank.num_bytes:
            what = "missing" if is_missing else "altered" if found > rank.num_bytes else "truncated"
            raise CheckpointError(
                f"{path}: {what}: it has {found} bytes, its manifest says {rank.num_bytes}: convert the model again"
            )
        read_safetensors_header(path)
