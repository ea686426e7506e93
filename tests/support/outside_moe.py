"""A mixture of experts from outside: an MLP block whose weights have an expert dimension, its op in plain torch, and
Qwen3-MoE as a family that uses it, in both spellings of its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from allspan.kernels.packed_spec import PackedSpec
from allspan.kernels.reference.packed_linear import unpack
from allspan.worker.models.blocks.base import MlpBlock
from allspan.worker.models.foreign.common import model_spec, read_gated_mlp, read_gqa, read_norm
from allspan.worker.models.foreign.config import ForeignConfig
from allspan.worker.models.foreign.family import Family
from allspan.worker.models.foreign.rotary import read_rotary
from allspan.worker.models.pieces import EP, TP, Axis, Linear, Part, Piece
from allspan.worker.models.spec import LayerSpec, ModelSpec, Norms
from allspan.worker.quant.packed import PackedMethod
from allspan.worker.weights.weight_map import DENSE, Entry, Foreign, WeightMap

if TYPE_CHECKING:
    from allspan.worker.models.sublayer import Sublayer
    from allspan.worker.program.program import Slot


@dataclass(frozen=True, slots=True)
class Experts:
    """An MlpBlock: each token goes through the `top_k` best of `num_experts` gated MLPs. Ranks share out whole
    experts, or with `slices` the columns of each."""

    num_experts: int
    top_k: int
    width: int
    slices: bool = False

    @property
    def experts(self) -> Axis:
        return Axis(self.num_experts, group="" if self.slices else EP)

    def pieces(self, prefix: str, hidden: Axis) -> tuple[Piece, ...]:
        columns = Axis(self.width, group=TP if self.slices else "")
        gate_up = Part(prefix + "expert_gate", columns), Part(prefix + "expert_up", columns)
        return (
            Linear(prefix + "router", (Part(prefix + "router", Axis(self.num_experts)),), hidden),
            Linear(prefix + "expert_gate_up", gate_up, hidden, is_gated=True, experts=self.experts),
            Linear(prefix + "expert_down", (Part(prefix + "expert_down", hidden),), columns, experts=self.experts),
        )

    def emit(self, sub: Sublayer, x: Slot) -> None:
        scores = sub.buffer("router", self.num_experts)
        sub.linear("router", x, scores)
        method = sub.holding.method
        assert isinstance(method, PackedMethod)
        specs = [
            method.packed(sub.holding.shape_of(sub.piece(f"expert_{name}")))[0].spec for name in ("gate_up", "down")
        ]
        weights = [sub.weight(f"expert_{name}.weight") for name in ("gate_up", "down")]
        first = sub.shard.units(self.experts).start
        sub.program.op("experts", x, scores, tuple(weights), tuple(specs), first, self.top_k, sub.output)
        sub.add(sums_ranks=True)


def experts(
    x: Tensor,
    scores: Tensor,
    weights: tuple[Tensor, Tensor],
    specs: tuple[PackedSpec, PackedSpec],
    first: int,
    top_k: int,
    out: Tensor,
) -> None:
    """out, which may be x, = what this rank's experts, of which the first has this number, add to each row."""
    chosen = scores.softmax(-1).topk(top_k)
    factors = torch.zeros_like(scores).scatter(1, chosen.indices, chosen.values / chosen.values.sum(-1, keepdim=True))
    total = torch.zeros_like(out)
    for number, (gate_up, down) in enumerate(zip(*weights, strict=True), first):
        gate, up = functional.linear(x, unpack(gate_up, specs[0], torch.float32)).chunk(2, dim=-1)
        product = functional.linear(functional.silu(gate) * up, unpack(down, specs[1], torch.float32))
        total += factors[:, number : number + 1] * product
    out.copy_(total)


def _read(config: ForeignConfig, slices: bool) -> ModelSpec:
    norm = read_norm(config)
    attention = read_gqa(config, read_rotary(config, 0), qk_norm_eps=norm.eps)
    sizes = (config.size(key) for key in ("num_local_experts", "num_experts_per_tok", "moe_intermediate_size"))
    sparse = Experts(*sizes, slices=slices)
    mlps: list[MlpBlock] = [
        read_gated_mlp(config) if layer in config.get("mlp_only_layers") else sparse
        for layer in range(config.size("num_hidden_layers"))
    ]
    layers = [LayerSpec(attention, mlp, Norms(norm), Norms(norm)) for mlp in mlps]
    return model_spec(config, "qwen3_moe", layers, config.size("max_position_embeddings"))


def _names(gate: Foreign, up: Foreign, down: Foreign) -> WeightMap:
    entries = {"expert_gate": gate, "expert_up": up, "expert_down": down, "router": Foreign(_MLP + "gate")}
    return DENSE.with_entries(*(Entry("layers.{i}." + name, foreign, name) for name, foreign in entries.items()))


_MLP = "model.layers.{i}.mlp."
_EXPERT = _MLP + "experts.{e}."
BY_EXPERT = _names(Foreign(_EXPERT + "gate_proj"), Foreign(_EXPERT + "up_proj"), Foreign(_EXPERT + "down_proj"))
"""Each expert's matrices are tensors of their own."""
_GATE_UP = Foreign(_MLP + "experts.gate_up_proj", has_suffix=False)
STACKED = _names(_GATE_UP, _GATE_UP, Foreign(_MLP + "experts.down_proj", has_suffix=False))
"""All experts' are one tensor, gate above up."""


def qwen3_moe(weights: WeightMap, slices: bool) -> Family:
    return Family("qwen3_moe", ("Qwen3MoeForCausalLM",), lambda config: _read(config, slices), weights=weights)
