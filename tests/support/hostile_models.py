"""A tiny model as bytes, to be spoilt, and what the readers say of a spoilt one: one line, soon, with little memory."""

from __future__ import annotations

import json
import resource
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from allspan.launch.models.checkpoint_files import check_files
from allspan.protos.api.errors import CheckpointError, ModelNotFound
from allspan.protos.config.converted_manifest import is_converted, read_manifest
from allspan.protos.text import generation_defaults, load_tokenizer
from support.byte_tokenizer import write_byte_tokenizer

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCABULARY = 8, 2, 2, 1, 4, 16, 256
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
    "model.norm.weight": (HIDDEN,),
    "lm_head.weight": (VOCABULARY, HIDDEN),
} | {
    f"model.layers.{i}.{name}.weight": shape
    for i in range(LAYERS)
    for name, shape in {
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (MLP, HIDDEN),
        "mlp.up_proj": (MLP, HIDDEN),
        "mlp.down_proj": (HIDDEN, MLP),
    }.items()
}

MOST_SECONDS = 2.0
"""Of a processor, for everything that a launcher reads of a refused model."""
MOST_CHARS = 2100
MOST_MORE_BYTES = 400 << 20
"""The peak of memory beyond what a sound model needs."""


def entries() -> dict[str, dict[str, Any]]:
    """A sound safetensors header."""
    made, end = {}, 0
    for name, shape in SHAPES.items():
        start, end = end, end + 4 * _product(shape)
        made[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    return made


def safetensors(header: object = None, length: int | None = None, data: bytes | None = None) -> bytes:
    """A safetensors file; what is not given is sound."""
    text = header if isinstance(header, bytes) else json.dumps(entries() if header is None else header).encode()
    body = bytes(sum(4 * _product(shape) for shape in SHAPES.values())) if data is None else data
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def save_sound(folder: Path) -> Path:
    """A folder whose every file is read without complaint."""
    write_byte_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text('{"temperature": 0.5, "eos_token_id": [1]}')
    (folder / "model.safetensors").write_bytes(safetensors())
    return folder


class Gguf:
    """Writes the parts of a GGUF file as they are told, sound or not."""

    def __init__(self, version: int = 3, magic: bytes = b"GGUF") -> None:
        self._head = magic + struct.pack("<I", version)
        self.keys: list[tuple[bytes, bytes]] = []
        self.tensors: list[bytes] = []
        self.counts: list[int | None] = [None, None]
        """The numbers of tensors and of keys that the file claims; None: as many as there are."""
        self.data = b""

    def key(self, name: str, value: object) -> Gguf:
        self.keys.append((string(name), typed(value)))
        return self

    def tensor(self, name: str, dims: Sequence[int], offset: int, kind: int = 0, num_dims: int | None = None) -> Gguf:
        count = len(dims) if num_dims is None else num_dims
        packed = string(name) + struct.pack("<I", count) + struct.pack(f"<{len(dims)}Q", *dims)
        self.tensors.append(packed + struct.pack("<IQ", kind, offset))
        return self

    def bytes(self) -> bytes:
        counts = [
            made if claimed is None else claimed
            for claimed, made in zip(self.counts, (len(self.tensors), len(self.keys)), strict=True)
        ]
        header = self._head + struct.pack("<QQ", *counts) + b"".join(key + value for key, value in self.keys)
        header += b"".join(self.tensors)
        return header + bytes(-len(header) % 32) + self.data


def string(text: str | bytes, length: int | None = None) -> bytes:
    """A GGUF string; `length` is what it claims."""
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data) if length is None else length) + data


def typed(value: object) -> bytes:
    """A GGUF value behind its type; bytes are taken as they are."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value) if value < 2**32 else struct.pack("<IQ", 10, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + string(value)
    assert isinstance(value, list)
    kind = 8 if isinstance(value[0], str) else 6 if isinstance(value[0], float) else 5
    packed = [string(each) if kind == 8 else struct.pack("<f" if kind == 6 else "<i", each) for each in value]
    return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(packed)


GGUF_KEYS: dict[str, object] = {
    "general.architecture": "llama",
    "llama.block_count": LAYERS,
    "llama.context_length": 64,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": MLP,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [f"t{i}" for i in range(VOCABULARY)],
    "tokenizer.ggml.token_type": [1] * VOCABULARY,
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
}
_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf(changes: Mapping[str, object] | None = None, tensors: bool = True) -> Gguf:
    """A sound file but for `changes` of its keys; None as a value leaves the key out."""
    file = Gguf()
    for name, value in (GGUF_KEYS | dict(changes or {})).items():
        if value is not None:
            file.key(name, value)
    if tensors:
        end = 0
        for name, shape in SHAPES.items():
            file.tensor(gguf_name(name), shape[::-1], end)
            end += -(-4 * _product(shape) // 32) * 32
        file.data = bytes(end)
    return file


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.weight"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[rest]}.weight"


def refusals(model: Path) -> list[str]:
    """What a start would say of a model, before a rank runs: every reader is asked, and each ends well or with a typed
    error. Asserts that they are one line each, soon, and with little memory."""
    said: list[str] = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    readers: tuple[Callable[[], object], ...] = (
        lambda: read_manifest(model) if is_converted(model) else None,
        lambda: check_files(model),
        lambda: load_tokenizer(model),
        lambda: generation_defaults(model),
    )
    for read in readers:
        try:
            read()
        except (CheckpointError, ModelNotFound) as error:
            said.append(error.message)
    assert not [line for line in said if "\n" in line or len(line) > MOST_CHARS]
    took = time.process_time() - started
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert took < MOST_SECONDS, f"{took:.1f} s: {said}"
    assert more < MOST_MORE_BYTES, f"{more >> 20} MiB: {said}"
    return said


def _product(shape: Sequence[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
