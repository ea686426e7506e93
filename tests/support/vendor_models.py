"""Decoders that transformers has no class for, from the formulas of their vendors' code in plain numpy, float64:
ChatGLM2 and 3, Qwen 1, Baichuan 1 and 2. Weights have the names of the vendors' checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

Floats = NDArray[np.float64]
Weights = Mapping[str, Floats]
Config = Mapping[str, Any]


_CHATGLM = {
    "model_type": "chatglm",
    "architectures": ["ChatGLMModel"],
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 6,
    "kv_channels": 12,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "ffn_hidden_size": 53,
    "padded_vocab_size": 131,
    "seq_length": 160,
    "layernorm_epsilon": 1e-5,
    "add_qkv_bias": True,
    "add_bias_linear": False,
}
_QWEN = {
    "model_type": "qwen",
    "architectures": ["QWenLMHeadModel"],
    "num_hidden_layers": 4,
    "hidden_size": 60,
    "num_attention_heads": 5,
    "kv_channels": 12,
    "intermediate_size": 74,
    "vocab_size": 97,
    "seq_length": 40,
    "max_position_embeddings": 160,
    "rotary_emb_base": 10000,
    "layer_norm_epsilon": 1e-6,
    "use_dynamic_ntk": True,
    "use_logn_attn": True,
    "no_bias": True,
}
_BAICHUAN = {
    "model_type": "baichuan",
    "architectures": ["BaichuanForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 60,
    "num_attention_heads": 5,
    "intermediate_size": 37,
    "vocab_size": 97,
    "model_max_length": 160,
    "rms_norm_eps": 1e-6,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "chatglm3": _CHATGLM,
    "chatglm2-32k": _CHATGLM | {"rope_ratio": 16, "_name_or_path": "THUDM/chatglm2-6b-32k"},
    "glm-4": _CHATGLM | {"rope_ratio": 500, "layernorm_epsilon": 1.5625e-7, "add_bias_linear": True},
    "qwen": _QWEN,
    "qwen-72b": _QWEN | {"use_logn_attn": False, "use_dynamic_ntk": False, "seq_length": 160, "no_bias": False},
    "baichuan-7b": _BAICHUAN | {"max_position_embeddings": 160, "architectures": ["BaiChuanForCausalLM"]},
    "baichuan-13b": _BAICHUAN,
    "baichuan2-13b": _BAICHUAN | {"vocab_size": 125696, "hidden_size": 20, "intermediate_size": 24},
}


def save_vendor(
    folder: Path, name: str, dtype: torch.dtype = torch.float32, **overrides: Any
) -> tuple[Config, Weights]:
    """Writes a random checkpoint of CONFIGS[name], whose norms and biases are random too. Returns its config, and its
    weights as `dtype` rounds them."""
    config = CONFIGS[name] | overrides
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for tensor, shape in _shapes(config).items():
        is_norm = len(shape) == 1 and not tensor.endswith(".bias")
        values = torch.randn(shape, generator=generator) * 0.15 + (1.0 if is_norm else 0.0)
        tensors[tensor] = values.to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return config, {tensor: values.double().numpy() for tensor, values in tensors.items()}


def _shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if config["model_type"] == "chatglm":
        start, count, inner = "transformer.encoder.layers.", config["num_layers"], config["ffn_hidden_size"]
        q = heads * config["kv_channels"]
        qkv = q + 2 * config["multi_query_group_num"] * config["kv_channels"]
        linears = {
            "self_attention.query_key_value": (qkv, hidden, config["add_qkv_bias"]),
            "self_attention.dense": (hidden, q, config["add_bias_linear"]),
            "mlp.dense_h_to_4h": (2 * inner, hidden, config["add_bias_linear"]),
            "mlp.dense_4h_to_h": (hidden, inner, config["add_bias_linear"]),
        }
        norms, names = (
            ("input_layernorm", "post_attention_layernorm"),
            (
                "transformer.embedding.word_embeddings",
                "transformer.encoder.final_layernorm",
                "transformer.output_layer",
            ),
        )
        vocab = config["padded_vocab_size"]
    elif config["model_type"] == "qwen":
        start, count, inner = "transformer.h.", config["num_hidden_layers"], config["intermediate_size"] // 2
        q, has_bias = heads * config["kv_channels"], not config["no_bias"]
        linears = {
            "attn.c_attn": (3 * q, hidden, True),
            "attn.c_proj": (hidden, q, has_bias),
            "mlp.w1": (inner, hidden, has_bias),
            "mlp.w2": (inner, hidden, has_bias),
            "mlp.c_proj": (hidden, inner, has_bias),
        }
        norms, names = ("ln_1", "ln_2"), ("transformer.wte", "transformer.ln_f", "lm_head")
        vocab = config["vocab_size"]
    else:
        start, count, inner = "model.layers.", config["num_hidden_layers"], config["intermediate_size"]
        linears = {
            "self_attn.W_pack": (3 * hidden, hidden, False),
            "self_attn.o_proj": (hidden, hidden, False),
            "mlp.gate_proj": (inner, hidden, False),
            "mlp.up_proj": (inner, hidden, False),
            "mlp.down_proj": (hidden, inner, False),
        }
        norms, names = ("input_layernorm", "post_attention_layernorm"), ("model.embed_tokens", "model.norm", "lm_head")
        vocab = config["vocab_size"]
    embedding, norm, head = names
    shapes: dict[str, tuple[int, ...]] = {
        f"{embedding}.weight": (vocab, hidden),
        f"{norm}.weight": (hidden,),
        f"{head}.weight": (vocab, hidden),
    }
    for layer in range(count):
        shapes |= {f"{start}{layer}.{name}.weight": (hidden,) for name in norms}
        for name, (rows, columns, has_bias) in linears.items():
            shapes[f"{start}{layer}.{name}.weight"] = rows, columns
            if has_bias:
                shapes[f"{start}{layer}.{name}.bias"] = (rows,)
    return shapes


def vendor_hidden(config: Config, weights: Weights, ids: Sequence[int], prompt_len: int | None = None) -> Floats:
    """[n, hidden]: what the head reads of each token; `prompt_len` of them (None: all) were the request's prompt."""
    return {"chatglm": _chatglm, "qwen": _qwen, "baichuan": _baichuan}[config["model_type"]](
        config, weights, np.asarray(ids), len(ids) if prompt_len is None else prompt_len
    )


def vendor_logits(config: Config, weights: Weights, ids: Sequence[int], prompt_len: int | None = None) -> Floats:
    """[n, vocabulary]."""
    hidden = vendor_hidden(config, weights, ids, prompt_len)
    head = weights["transformer.output_layer.weight" if config["model_type"] == "chatglm" else "lm_head.weight"]
    if config["model_type"] == "baichuan" and config["vocab_size"] == 125696:
        head = head / np.maximum(np.linalg.norm(head, axis=1, keepdims=True), 1e-12)
    return hidden @ head.T


def alibi_slopes(count: int) -> Floats:
    """Of so many heads: a geometric series for the largest power of two in it, and every other term of the one twice as
    fine for the rest (https://arxiv.org/abs/2108.12409, section 3)."""
    power = 1 << (count.bit_length() - 1)
    whole = 2.0 ** (-8.0 * np.arange(1, power + 1) / power)
    finer = 2.0 ** (-4.0 * (2 * np.arange(1, count - power + 1) - 1) / power)
    return np.concatenate((whole, finer))


def _chatglm(config: Config, weights: Weights, ids: NDArray[np.int64], prompt_len: int) -> Floats:
    heads, groups, size = (config[key] for key in ("num_attention_heads", "multi_query_group_num", "kv_channels"))
    eps, count = config["layernorm_epsilon"], len(ids)
    positions, theta = np.arange(count, dtype=np.float64), 10000.0
    if config.get("rope_ratio") and "chatglm2" in config.get("_name_or_path", ""):
        positions /= config["rope_ratio"]
    else:
        theta *= config.get("rope_ratio", 1.0)
    angles = _angles(positions, theta, size // 2)

    def attention(start: str, x: Floats) -> Floats:
        qkv = _linear(weights, start + "self_attention.query_key_value", x)
        q, k, v = np.split(qkv, [heads * size, (heads + groups) * size], axis=1)
        q, k = (_turned_neighbours(each.reshape(count, -1, size), angles) for each in (q, k))
        return _linear(weights, start + "self_attention.dense", _attended(q, k, v.reshape(count, -1, size)))

    def mlp(start: str, x: Floats) -> Floats:
        gate, up = np.split(_linear(weights, start + "mlp.dense_h_to_4h", x), 2, axis=1)
        return _linear(weights, start + "mlp.dense_4h_to_h", _silu(gate) * up)

    norms = ("input_layernorm", "post_attention_layernorm")
    start, embedding = "transformer.encoder.layers.", weights["transformer.embedding.word_embeddings.weight"]
    x = _layers(weights, embedding[ids], start, config["num_layers"], norms, eps, attention, mlp)
    return _normed(x, weights["transformer.encoder.final_layernorm.weight"], eps)


def _qwen(config: Config, weights: Weights, ids: NDArray[np.int64], prompt_len: int) -> Floats:
    heads, eps, count = config["num_attention_heads"], config["layer_norm_epsilon"], len(ids)
    size, trained = config["kv_channels"], config["seq_length"]
    alpha = 1.0
    if config["use_dynamic_ntk"]:
        alpha = max(1.0, 2.0 ** np.ceil(np.log2(prompt_len / trained) + 1) - 1)
    theta = config["rotary_emb_base"] * alpha ** (size / (size - 2))
    angles = _angles(np.arange(count, dtype=np.float64), theta, size)
    seen = np.arange(1, count + 1)
    longer = np.where(config["use_logn_attn"] & (seen > trained), np.log(seen) / np.log(trained), 1.0)

    def attention(start: str, x: Floats) -> Floats:
        q, k, v = (
            each.reshape(count, heads, size) for each in np.split(_linear(weights, start + "attn.c_attn", x), 3, axis=1)
        )
        q, k = _turned_halves(q, angles) * longer[:, None, None], _turned_halves(k, angles)
        return _linear(weights, start + "attn.c_proj", _attended(q, k, v))

    def mlp(start: str, x: Floats) -> Floats:
        inner = _linear(weights, start + "mlp.w1", x) * _silu(_linear(weights, start + "mlp.w2", x))
        return _linear(weights, start + "mlp.c_proj", inner)

    x = weights["transformer.wte.weight"][ids]
    x = _layers(weights, x, "transformer.h.", config["num_hidden_layers"], ("ln_1", "ln_2"), eps, attention, mlp)
    return _normed(x, weights["transformer.ln_f.weight"], eps)


def _baichuan(config: Config, weights: Weights, ids: NDArray[np.int64], prompt_len: int) -> Floats:
    heads, eps, count = config["num_attention_heads"], config["rms_norm_eps"], len(ids)
    size = config["hidden_size"] // heads
    turns = "max_position_embeddings" in config
    angles = _angles(np.arange(count, dtype=np.float64), 10000.0, size)

    def attention(start: str, x: Floats) -> Floats:
        q, k, v = (
            each.reshape(count, heads, size) for each in np.split(_linear(weights, start + "self_attn.W_pack", x), 3, 1)
        )
        if turns:
            q, k = _turned_halves(q, angles), _turned_halves(k, angles)
        mixed = _attended(q, k, v, None if turns else alibi_slopes(heads))
        return _linear(weights, start + "self_attn.o_proj", mixed)

    def mlp(start: str, x: Floats) -> Floats:
        gate, up = (_linear(weights, f"{start}mlp.{name}_proj", x) for name in ("gate", "up"))
        return _linear(weights, start + "mlp.down_proj", _silu(gate) * up)

    norms = ("input_layernorm", "post_attention_layernorm")
    x = weights["model.embed_tokens.weight"][ids]
    x = _layers(weights, x, "model.layers.", config["num_hidden_layers"], norms, eps, attention, mlp)
    return _normed(x, weights["model.norm.weight"], eps)


def _layers(
    weights: Weights,
    x: Floats,
    start: str,
    count: int,
    norms: tuple[str, str],
    eps: float,
    attention: Callable[[str, Floats], Floats],
    mlp: Callable[[str, Floats], Floats],
) -> Floats:
    for layer in range(count):
        own = f"{start}{layer}."
        x = x + attention(own, _normed(x, weights[f"{own}{norms[0]}.weight"], eps))
        x = x + mlp(own, _normed(x, weights[f"{own}{norms[1]}.weight"], eps))
    return x


def _linear(weights: Weights, name: str, x: Floats) -> Floats:
    return x @ weights[name + ".weight"].T + weights.get(name + ".bias", 0.0)


def _normed(x: Floats, weight: Floats, eps: float) -> Floats:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def _silu(x: Floats) -> Floats:
    return x / (1 + np.exp(-x))


def _angles(positions: Floats, theta: float, size: int) -> Floats:
    """[positions, 1, pairs]."""
    return (positions[:, None] / theta ** (np.arange(0, size, 2) / size))[:, None, :]


def _turned_halves(x: Floats, angles: Floats) -> Floats:
    """Element i of a head is turned with element i + half a head."""
    low, high = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate((low * cos - high * sin, high * cos + low * sin), axis=-1)


def _turned_neighbours(x: Floats, angles: Floats) -> Floats:
    """Elements 2i and 2i + 1 of a head are turned together, as long as there are angles; the rest stays."""
    turned, pairs = x.copy(), angles.shape[-1]
    even, odd = x[..., : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
    cos, sin = np.cos(angles), np.sin(angles)
    turned[..., : 2 * pairs : 2], turned[..., 1 : 2 * pairs : 2] = even * cos - odd * sin, odd * cos + even * sin
    return turned


def _attended(q: Floats, k: Floats, v: Floats, slopes: Floats | None = None) -> Floats:
    """[n, heads · size], causal."""
    count, heads, size = q.shape
    group, distance = heads // k.shape[1], np.arange(count)[None, :] - np.arange(count)[:, None]
    out = np.empty_like(q)
    for head in range(heads):
        scores = q[:, head] @ k[:, head // group].T / np.sqrt(size)
        if slopes is not None:
            scores = scores + slopes[head] * distance
        scores = np.where(distance <= 0, scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, head] = shares @ v[:, head // group] / shares.sum(-1, keepdims=True)
    return out.reshape(count, -1)
