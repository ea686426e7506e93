"""The values of config.json (and of GGUF metadata under the same names) that sizes are computed from: types and limits.

A family reads them once more in its own way (`allspan.worker.models.families`); a launcher asks here, which needs no
torch, before it starts a rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from allspan.protos.api.errors import CheckpointError
from allspan.protos.model_files.json_values import shown
from allspan.protos.model_files.limits import CONFIG_NUMBERS, CONFIG_SIZES, MAX_NUMBER, MAX_SIZE, MAX_VOCABULARY
from allspan.protos.model_files.safetensors_header import StoredTensor

GGUF_NAMES = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "attention.sliding_window": "sliding_window",
}
"""A key of GGUF metadata, behind the architecture's name → the name in config.json."""

_ROPE = ("rope_scaling", "rope_parameters")
_TOKEN_IDS = ("bos_token_id", "eos_token_id")


def size_of(key: str, value: object, source: str, most: int | None = None) -> int:
    """A positive integer up to `most`, or else the key's limit. Raises CheckpointError naming file, key, value and
    limit."""
    most = CONFIG_SIZES.get(key, MAX_SIZE) if most is None else most
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{source}: {key} must be a positive integer, got {shown(value)} (at most {most})")
    if value > most:
        raise CheckpointError(f"{source}: {key} is {shown(value)}, must be at most {most}")
    return value


def number_of(key: str, value: object, source: str) -> float:
    """A positive number up to the key's limit. Raises CheckpointError as `size_of` does."""
    most = CONFIG_NUMBERS.get(key, MAX_NUMBER)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CheckpointError(f"{source}: {key} must be a positive number, got {shown(value)} (at most {most:g})")
    if value > most:
        raise CheckpointError(f"{source}: {key} is {shown(value)}, must be at most {most:g}")
    return float(value)


def token_ids_of(key: str, value: Any, source: str, vocab_size: int | None = None) -> tuple[int, ...]:
    """One id, a list of ids, or none. Raises CheckpointError for an id that is none of the vocabulary's."""
    if value is None:
        return ()
    ids = value if isinstance(value, list | tuple) else [value]
    if any(type(each) is not int or each < 0 for each in ids):
        raise CheckpointError(f"{source}: {key} must be a token id or a list of them, got {shown(value)}")
    most = MAX_VOCABULARY if vocab_size is None else vocab_size
    if beyond := [each for each in ids if each >= most]:
        raise CheckpointError(
            f"{source}: {key} has the id {shown(beyond[0])}, must be below {most}, the number of tokens: correct the id"
        )
    return tuple(ids)


def check_config(values: Mapping[str, Any], source: str) -> None:
    """Checks what is there of the values that sizes are computed from. Raises CheckpointError for the first that
    cannot be."""
    sizes = {key: size_of(key, values[key], source) for key in CONFIG_SIZES if values.get(key) is not None}
    for key in ("rope_theta", "rms_norm_eps"):
        if values.get(key) is not None:
            number_of(key, values[key], source)
    for key in _ROPE:
        if values.get(key):
            _check_rope(values[key], f"{source}: {key}")
    for key in _TOKEN_IDS:
        token_ids_of(key, values.get(key), source, sizes.get("vocab_size"))
    heads = sizes.get("num_attention_heads")
    if heads is None:
        return
    kv_heads = sizes.get("num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(f"{source}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")


def check_shapes(values: Mapping[str, Any], tensors: Mapping[str, StoredTensor], source: str) -> None:
    """Compares the config's sizes with the tensors that nearly all families have under these names, as far as both are
    there. Raises CheckpointError naming the tensor; the ranks compare all of them."""
    layers = values.get("num_hidden_layers")
    found = _num_layers(tensors)
    if found is not None and isinstance(layers, int) and layers != found:
        raise CheckpointError(f"{source}: num_hidden_layers is {layers}, the weights have {found} layers")
    wanted = [values.get("vocab_size"), values.get("hidden_size")]
    for name in ("model.embed_tokens.weight", "token_embd.weight"):
        tensor = tensors.get(name)
        if tensor is None:
            continue
        if len(tensor.shape) != 2 or any(w not in (None, size) for w, size in zip(wanted, tensor.shape, strict=True)):
            raise CheckpointError(
                f"{source}: tensor {name!r} has shape {list(tensor.shape)}, vocab_size and hidden_size are {wanted}"
            )


def gguf_config(metadata: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The metadata's sizes under config.json's names. Raises CheckpointError for metadata without an architecture."""
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise CheckpointError(f"{source}: general.architecture must be a name, got {shown(architecture)}")
    prefix = f"{architecture}."
    named = {theirs: metadata.get(prefix + ours) for ours, theirs in GGUF_NAMES.items()}
    return {key: value for key, value in named.items() if value is not None and not isinstance(value, list)}


def _check_rope(scaling: object, source: str) -> None:
    if not isinstance(scaling, Mapping):
        raise CheckpointError(f"{source} must be an object, got {shown(scaling)}")
    for key, value in scaling.items():
        if value is None:
            continue
        if key in CONFIG_SIZES:
            size_of(key, value, source)
        elif key in CONFIG_NUMBERS:
            number_of(key, value, source)


def _num_layers(tensors: Mapping[str, Any]) -> int | None:
    numbers = set()
    for name in tensors:
        for prefix in ("model.layers.", "blk."):
            if name.startswith(prefix):
                number = name[len(prefix) :].partition(".")[0]
                numbers.add(int(number) if number.isascii() and number.isdigit() and len(number) < 10 else -1)
    return max(numbers) + 1 if numbers else None
