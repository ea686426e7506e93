"""Tiny random draft heads, and what they compute in plain float32: EAGLE-3's from its formulas, layers for multi-token
prediction from transformers' layer of their target."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

EPS = 1e-5
HEADS, KV_HEADS, SIZE = 6, 3, 16
Rows = tuple[Tensor, Tensor]
"""float32 [n, ids] and [n, hidden]: logits of each row, and what the row of a draft behind it reads."""


def random_state(shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """float32 tensors; norms are about 1."""
    generator = torch.Generator().manual_seed(5)
    return {
        name: torch.randn(*shape, generator=generator) * 0.15 + float("norm" in name) for name, shape in shapes.items()
    }


def save_eagle3(
    folder: Path, vocab: int, draft_vocab: int, width: int = 60, wide: int = 60, **config: Any
) -> dict[str, Tensor]:
    """Writes a head of a target with the hidden size `wide`, as its authors publish it, or as speculators does where
    the config says `speculators_model_type`. Returns its tensors by the authors' names."""
    shapes = {
        "fc.weight": (width, 3 * wide),
        "midlayer.hidden_norm.weight": (width,),
        "midlayer.input_layernorm.weight": (width,),
        "midlayer.post_attention_layernorm.weight": (width,),
        "midlayer.self_attn.q_proj.weight": (HEADS * SIZE, 2 * width),
        "midlayer.self_attn.k_proj.weight": (KV_HEADS * SIZE, 2 * width),
        "midlayer.self_attn.v_proj.weight": (KV_HEADS * SIZE, 2 * width),
        "midlayer.self_attn.o_proj.weight": (width, HEADS * SIZE),
        "midlayer.mlp.gate_proj.weight": (70, width),
        "midlayer.mlp.up_proj.weight": (70, width),
        "midlayer.mlp.down_proj.weight": (width, 70),
        "norm.weight": (width,),
        "lm_head.weight": (draft_vocab, width),
    }
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (3 * wide,)
    if width != wide:
        shapes["embed_tokens.weight"] = (vocab, width)
    state = random_state(shapes)
    chosen = torch.randperm(vocab, generator=torch.Generator().manual_seed(1))[:draft_vocab].sort().values
    maps = {"d2t": chosen - torch.arange(draft_vocab), "t2d": torch.isin(torch.arange(vocab), chosen)}
    layer = {
        "model_type": "llama",
        "hidden_size": width,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": SIZE,
        "intermediate_size": 70,
        "vocab_size": vocab,
        "rms_norm_eps": EPS,
        "max_position_embeddings": 64,
        "rope_theta": 10000.0,
    }
    is_nested = "speculators_model_type" in config
    own = {"transformer_layer_config": layer} if is_nested else {"architectures": ["LlamaForCausalLMEagle3"]} | layer
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(own | {"draft_vocab_size": draft_vocab} | config))
    names = {name: name.replace("midlayer.", "layers.0.") if is_nested else name for name in state}
    save_file({names[name]: tensor for name, tensor in state.items()} | maps, folder / "model.safetensors")
    return state | maps


def eagle3_rows(
    state: Mapping[str, Tensor],
    embeddings: Tensor,
    features: Tensor,
    num_chained: int,
    keeps_normed: bool = False,
    chains_normed: bool = False,
) -> Rows:
    """Rows with these embeddings [n, hidden]; features [n - num_chained, 3 hidden] are of the first, each of the others
    reads the state of the one before."""
    given = features
    if "input_norm.weight" in state:
        given = _rms(given, state["input_norm.weight"])
    states, rows = given @ state["fc.weight"].T, []
    for _ in range(num_chained + 1):  # once more for each chained row, as if there were no cache
        rows = list(_eagle3_layer(state, embeddings[: len(states)], states, keeps_normed))
        rows[1] = _rms(rows[0], state["norm.weight"])
        states = torch.cat((states, (rows[1] if chains_normed else rows[0])[-1:]))
    return rows[1] @ state["lm_head.weight"].T, rows[1] if chains_normed else rows[0]


def _eagle3_layer(state: Mapping[str, Tensor], embeddings: Tensor, states: Tensor, keeps_normed: bool) -> Rows:
    def weight(name: str) -> Tensor:
        return state[f"midlayer.{name}.weight"]

    n = len(states)
    normed = _rms(states, weight("hidden_norm"))
    pair = torch.cat((_rms(embeddings, weight("input_layernorm")), normed), dim=1)
    q, k, v = ((pair @ weight(f"self_attn.{x}_proj").T).view(n, -1, SIZE).transpose(0, 1) for x in "qkv")
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=0) for x in (k, v))
    scores = (_turned(q) @ _turned(k).transpose(1, 2) * SIZE**-0.5).masked_fill(
        torch.ones(n, n, dtype=torch.bool).triu(1), float("-inf")
    )
    attended = (scores.softmax(-1) @ v).transpose(0, 1).reshape(n, -1)
    residual = (normed if keeps_normed else states) + attended @ weight("self_attn.o_proj").T
    x = _rms(residual, weight("post_attention_layernorm"))
    gated = torch.nn.functional.silu(x @ weight("mlp.gate_proj").T) * (x @ weight("mlp.up_proj").T)
    return residual + gated @ weight("mlp.down_proj").T, residual


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def _turned(x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[1])[:, None] * 10000.0 ** (-torch.arange(0, SIZE, 2) / SIZE)
    cos, sin = angles.cos(), angles.sin()
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


class Mtp:
    """A target with a layer for multi-token prediction, both random; `target` is transformers' model of the former."""

    def __init__(self, folder: Path, model_type: str, **config: Any) -> None:
        torch.manual_seed(2)
        layers = config["num_hidden_layers"]
        self.target, self._body = (
            _model(model_type, config | {"num_hidden_layers": count, "first_k_dense_replace": dense})
            for count, dense in ((layers, 1), (1, 0))
        )
        self.target.save_pretrained(folder)
        hidden = config["hidden_size"]
        self._own = random_state(
            {"enorm.weight": (hidden,), "hnorm.weight": (hidden,), "eh_proj.weight": (hidden, 2 * hidden)}
        )
        self._body.save_pretrained(folder / "layer")
        body = load_file(folder / "layer" / "model.safetensors")
        prefix, first = f"model.layers.{layers}.", "model.layers.0."
        tensors = {prefix + name: tensor for name, tensor in self._own.items()}
        tensors |= {name.replace(first, prefix): tensor for name, tensor in body.items() if name.startswith(first)}
        tensors[prefix + "shared_head.norm.weight"] = body["model.norm.weight"]
        tensors[prefix + "embed_tokens.weight"] = self.target.model.embed_tokens.weight.detach().clone()
        tensors[prefix + "shared_head.head.weight"] = self.target.lm_head.weight.detach().clone()
        save_file(load_file(folder / "model.safetensors") | tensors, folder / "model.safetensors")
        self._body.lm_head.weight = self.target.lm_head.weight

    def take(self, folder: Path, decoded: Mapping[str, Tensor]) -> None:
        """Has these values instead, by their names in the checkpoint, and files in `folder`."""
        prefix, first = f"model.layers.{self.target.config.num_hidden_layers}.", "model.layers.0."
        own = {name.replace(prefix, first): each for name, each in decoded.items() if name.startswith(prefix)}
        self.target = _with(self.target, folder / "target", decoded)
        self._body = _with(self._body, folder / "body", own)
        self._body.lm_head.weight = self.target.lm_head.weight

    @staticmethod
    def rewrite(folder: Path, scales: Mapping[str, float], eh_proj: Tensor) -> None:
        """Writes the files of `folder` anew: tensors with these parts in their names times so much, norms of ones, and
        a head whose row of a token is another one's embedding, so that the token that follows depends on the last."""
        path = folder / "model.safetensors"
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if name.endswith("norm.weight"):
                tensor.fill_(1.0)
            for part, scale in scales.items():
                if part in name:
                    tensor.mul_(scale)
            if name.endswith("eh_proj.weight"):
                tensor.copy_(eh_proj)
        embedding = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = embedding.roll(7, dims=0).contiguous()
        save_file(tensors, path)

    def rows(self, embeddings: Tensor, features: Tensor, num_chained: int) -> Rows:
        """As `eagle3_rows`."""
        states = features
        for _ in range(num_chained + 1):
            pair = [
                torch.nn.functional.rms_norm(x, x.shape[-1:], self._own[f"{name}.weight"], 1e-6)
                for name, x in (("enorm", embeddings[: len(states)]), ("hnorm", states))
            ]
            x = torch.cat(pair, dim=1) @ self._own["eh_proj.weight"].T
            with torch.no_grad():
                found = self._body(inputs_embeds=x[None], output_hidden_states=True)
            states = torch.cat((states, found.hidden_states[-1][0, -1:]))
        return found.logits[0], found.hidden_states[-1][0]


def _model(model_type: str, config: Mapping[str, Any]) -> Any:
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(AutoConfig.for_model(model_type, **config), attn_implementation="eager")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in key else 0.0, 0.15)
        for key, buffer in model.named_buffers():
            if "correction_bias" in key:
                buffer.normal_(0.0, 0.2)
    return model.eval()


def _with(model: Any, folder: Path, values: Mapping[str, Tensor]) -> Any:
    """The same model with other values, by the names of its checkpoint."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    changed = {name: each.float().contiguous() for name, each in values.items() if name in tensors}
    save_file(tensors | changed, folder / "model.safetensors", {"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
