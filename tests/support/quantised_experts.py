"""Tiny quantised checkpoints of families with experts, and transformers' logits for what their tensors stand for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from allspan.kernels.reference.packed_linear import unpack
from allspan.protos.config.settings import CacheConfig, ModelConfig
from allspan.worker.load.loader import open_checkpoint, prepare
from allspan.worker.models.layout import layout
from allspan.worker.models.pieces import Linear
from allspan.worker.quant.packed import PackedMethod
from support.quantised_checkpoints import FORMS, Form, quantise_folder
from support.tiny_models import logits_on_ranks, prompt, reference_logits

SIZES: dict[str, Any] = {
    "hidden_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "head_dim": 32,
    "intermediate_size": 160,
    "moe_intermediate_size": 288,
    "num_experts_per_tok": 2,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
"""Of 288 columns two or four ranks have parts that begin within a group of 64 or 128."""
QWEN2 = {"num_experts": 5, "shared_expert_intermediate_size": 96}
PLAIN = (".gate.", "shared_expert_gate")
FEW = ((4, 0), (2, 2))
LAYOUTS = ((1, 0), (2, 0), *FEW, (4, 2))
"""Ranks, and groups of them that have experts of their own (0: none)."""
ORDERED = {"gptq-ordered", "compressed-int4-ordered"}
"""Forms with an order of inputs for each expert."""
IDS = prompt(23, 97)


def split(groups: int) -> dict[str, Any]:
    return {"enable_expert_parallel": True, "expert_parallel_size": groups} if groups else {}


@dataclass(frozen=True)
class Saved:
    path: Path
    form: str
    expected: Tensor
    """transformers' logits of IDS."""
    decoded: dict[str, Tensor]

    def error(self, ranks: int, groups: int, **config: Any) -> float:
        """How far a token's logits are off at most, over the largest; where inputs are rounded, two of the tokens may
        go to another expert."""
        (found,) = logits_on_ranks(self.path, ranks, [IDS], **split(groups), **config)
        errors = (found - self.expected).abs().amax(1) / self.expected.abs().max()
        return float(errors.sort().values[-3 if self.form == "compressed-int8" else -1])


def save_plain(folder: Path, model_type: str, **config: Any) -> dict[str, Tensor]:
    """A random model, and its tensors."""
    torch.manual_seed(5)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES | config))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in key else 0.0, 0.1)
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def decoded_logits(folder: Path, tensors: dict[str, Tensor]) -> Tensor:
    """transformers' logits of the folder's model with other weights."""
    config, plain = folder / "config.json", folder / "plain"
    plain.mkdir()
    values = json.loads(config.read_text()) | {"quantization_config": None}
    (plain / "config.json").write_text(json.dumps(values))
    save_file({name: each.float() for name, each in tensors.items()}, plain / "model.safetensors", {"format": "pt"})
    return reference_logits(AutoModelForCausalLM.from_pretrained(plain).eval(), IDS)


def save(
    folder: Path, form: str | tuple[Form, Any], kept: tuple[str, ...] = (), model_type: str = "qwen3_moe", **config: Any
) -> Saved:
    """A random model in a form, or one of FORMS; what has `kept` in its name stays plain."""
    plain = save_plain(folder, model_type, **config or {"num_experts": 5})
    make, described = FORMS[form] if isinstance(form, str) else form
    decoded = quantise_folder(folder, make, described, PLAIN + kept)
    return Saved(folder, str(form), decoded_logits(folder, plain | decoded), decoded)


def check_rows(saved: Saved, ranks: int, groups: int) -> None:
    """What the packed weights of every rank's experts hold is what the tensors stand for; as if on a GPU."""
    config = ModelConfig(str(saved.path), "tiny", dtype="bfloat16", **split(groups))
    checked = 0
    for rank in range(ranks):
        prepared = prepare(config, CacheConfig(), rank, ranks)
        holding = prepared.holding
        tensors = holding.read(open_checkpoint(prepared.source, "auto"), "cpu")
        assert isinstance(holding.method, PackedMethod)
        for piece in layout(holding.spec):
            if not isinstance(piece, Linear) or piece.experts is None:
                continue
            (packed,) = holding.method.packed(holding.shape_of(piece))
            is_cut = groups != ranks and piece.name.endswith("down")
            is_decoded = saved.form == "gptq-irregular" or (saved.form in ORDERED and is_cut)
            assert packed.spec.kind.is_quantised != is_decoded
            for place, expert in enumerate(holding.shard.units(piece.experts)):
                values = unpack(tensors[f"{piece.name}.{packed.weight}"][place], packed.spec, torch.float64)
                if packed.is_ordered:
                    values = values[:, tensors[f"{piece.name}.{packed.order}"][place].argsort()]
                for part, held in zip(piece.parts, torch.split(values, list(packed.spec.parts)), strict=True):
                    layer, role = part.name.removeprefix("layers.").split(".expert_")
                    name = f"model.layers.{layer}.mlp.experts.{expert}.{role}_proj.weight"
                    rows, inputs = (holding.shard.part(axis) for axis in (part.rows, piece.inputs))
                    expected = saved.decoded[name][rows.start : rows.stop, inputs.start : inputs.stop]
                    torch.testing.assert_close(held, expected, rtol=4e-3, atol=5e-4, msg=lambda m, n=name: f"{n}: {m}")
                    checked += 1
    assert checked == 2 * 3 * 5 * (ranks if not groups else 1)


def opened(folder: Path) -> tuple[Any, ...]:
    config = ModelConfig(str(folder), "tiny")
    prepared = prepare(config, CacheConfig(), 0, 1)
    return prepared.source, prepared.holding, config
