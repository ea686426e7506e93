"""A block with pages of its own and adapters on every linear layer need no edit of the project."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from allspan.kernels.table import BACKENDS, Backend, op_set
from allspan.protos.config.settings import CacheConfig, ModelConfig
from allspan.worker.cache.kv import KVCache
from allspan.worker.load.loader import load_model
from allspan.worker.load.registry import FAMILIES
from allspan.worker.models.blocks.gqa import Gqa
from allspan.worker.models.families.qwen2 import QWEN2
from allspan.worker.models.foreign.config import ForeignConfig
from allspan.worker.models.model import Model
from allspan.worker.models.spec import ModelSpec
from allspan.worker.program.program import ProgramBuilder, Rows, Slot
from allspan.worker.step.inputs import GroupInputs, StepInputs
from support.outside_window import Windowed
from support.threads import ThreadWorld
from support.tiny_models import prefill, prompt, reference_logits, relative_error, save_tiny, step_inputs

SIZE, WINDOW = 4, 6
IDS = prompt(41, 97)


def _read_mixed(config: ForeignConfig) -> ModelSpec:
    """Qwen2 with a window in some layers, which `layer_types` names."""
    spec, kinds = QWEN2.read(config), config.get("layer_types")

    def block(attention: Any) -> Windowed:
        return Windowed(**{each.name: getattr(attention, each.name) for each in fields(Gqa)})

    layers = [
        replace(layer, attention=block(layer.attention)) if kind == "sliding_attention" else layer
        for layer, kind in zip(spec.layers, kinds, strict=True)
    ]
    return replace(spec, layers=tuple(layers))


@pytest.fixture
def mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Layers 2 and 3 of 4 have the window."""
    monkeypatch.setitem(BACKENDS, "toy", Backend({"window_attention": "support.outside_window:window_attention"}))
    monkeypatch.setitem(FAMILIES, "qwen2", replace(QWEN2, read=_read_mixed))
    return save_tiny(
        tmp_path, "qwen2", num_hidden_layers=4, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2
    )


def load(path: Path, ranks: int, rank: int) -> Model:
    config, pages = ModelConfig(path=str(path), name="tiny"), CacheConfig(page_size=SIZE)
    return load_model(config, ThreadWorld(ranks).collectives[rank], op_set("toy"), 16, 16, cache=pages)


def test_layers_of_two_cache_groups_read_their_own_pages(mixed: Any, tmp_path: Path) -> None:
    """Each group has its own page table; pages behind the window are spoilt as soon as they are left."""
    model, expected = load(tmp_path, 1, 0), reference_logits(mixed, IDS)
    assert [group.layers for group in model.cache_groups] == [(0, 1), (2, 3)]
    assert [group.lifetime.window for group in model.cache_groups] == [0, WINDOW]
    caches = [KVCache(group.spec, 12) for group in model.cache_groups]
    model.bind_cache(*caches)
    tables, start = ([7, 3, 0, 9, 1, 5, 11, 2, 10, 4, 6], [2, 8, 4, 0, 10, 1, 6, 3, 9, 7, 5]), 0
    for count in (1, 7, 3, 1, 1, 12, 16):
        first, second = (step_inputs([IDS[start : start + count]], [start], [table], SIZE) for table in tables)
        first.groups = (GroupInputs(second.slots, second.page_indptr, second.page_indices),)
        found = model.forward(first)
        assert relative_error(found, expected[start : start + count]) < 1e-4, f"from {start} on"
        start += count
        for page in tables[1][: model.cache_groups[1].lifetime.first_seen(start) // SIZE]:
            for tensor in (*caches[1].keys, *caches[1].values):
                tensor[page] = torch.nan
    assert start == len(IDS)


class LowRank:
    """A LinearDelta: on every linear layer of layer 0 and 1, adapter 1 adds x · aᵀ · bᵀ; 0 is no adapter."""

    num_slots = 2

    def __init__(self, model: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tensors: dict[str, Tensor] = {}
        for layer in range(2):
            block = model.model.layers[layer]
            for name, parts in (
                ("qkv", (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj)),
                ("o", (block.self_attn.o_proj,)),
                ("gate_up", (block.mlp.gate_proj, block.mlp.up_proj)),
                ("down", (block.mlp.down_proj,)),
            ):
                outputs = [part.weight.shape[0] for part in parts]
                a = torch.randn(2, parts[0].weight.shape[1], generator=generator) / 8
                b = torch.randn(sum(outputs), 2, generator=generator) / 8
                self.tensors |= {f"lora.layers.{layer}.{name}.a": a, f"lora.layers.{layer}.{name}.b": b}
                for part, rows in zip(parts, torch.split(b, outputs), strict=True):
                    with torch.no_grad():
                        part.weight += rows @ a

    def has(self, layer: str) -> bool:
        return layer.startswith("layers.")

    def shrink(self, program: ProgramBuilder, layer: str, x: Slot) -> Slot:
        of_logits = program.rows(x) is Rows.LOGITS
        rows = program.input("logits_rows", Rows.LOGITS) if of_logits else None
        low = program.scratch("low", x, 2)
        program.op("low_rank", x, program.input("adapters"), rows, program.named(f"lora.{layer}.a"), low)
        return low

    def expand(self, program: ProgramBuilder, layer: str, low: Slot, product: Slot) -> None:
        program.op("add_low_rank", low, program.named(f"lora.{layer}.b"), product)


def low_rank(x: Tensor, adapters: Tensor, rows: Tensor | None, a: Tensor, low: Tensor) -> None:
    """low = x · aᵀ in rows whose adapter is 1, else 0; `rows` are the tokens that x has."""
    chosen = adapters if rows is None else adapters[rows.long()]
    low.copy_((chosen == 1).float()[:, None] * (x.float() @ a.T))


def add_low_rank(low: Tensor, b: Tensor, product: Tensor) -> None:
    """product += low · bᵀ."""
    product += low.float() @ b.T


def _with_adapters(inputs: StepInputs, adapters: Mapping[int, int]) -> StepInputs:
    counts = inputs.qo_indptr.diff()
    slots = torch.tensor([adapters[request] for request in range(len(counts))], dtype=torch.int32)
    inputs.adapters = slots.repeat_interleave(counts)
    return inputs


@pytest.mark.parametrize("quantization", ["none", "a8w8"])
def test_an_adapter_slot_changes_its_own_row_and_no_other(
    quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = {name: f"{__name__}:{name}" for name in ("low_rank", "add_low_rank")}
    monkeypatch.setitem(BACKENDS, "toy", Backend(ops))
    reference = save_tiny(tmp_path, "qwen2")
    config, ids = ModelConfig(path=str(tmp_path), name="tiny", quantization=quantization), IDS[:12]
    base = load_model(config, ThreadWorld(1).collectives[0], op_set("toy"), 24, 24, cache=CacheConfig(page_size=16))
    without = prefill(base, [ids], 24)[0]
    expected = reference_logits(reference, ids)
    delta = LowRank(reference)  # merges itself into the reference
    model = load_model(config, ThreadWorld(1).collectives[0], op_set("toy"), 24, 24, cache=CacheConfig(page_size=16))
    model.add_adapters(delta)
    model.bind_cache(KVCache(model.cache_groups[0].spec, 2))
    inputs = _with_adapters(step_inputs([ids, ids], [0, 0], [[0], [1]], 16), {0: 1, 1: 0})
    adapted, plain = torch.split(model.forward(inputs), 12)
    torch.testing.assert_close(plain, without, rtol=1e-4, atol=1e-4)
    near = 1e-4 if quantization == "none" else 0.1
    assert relative_error(adapted, reference_logits(reference, ids)) < near
    assert relative_error(adapted, expected) > 0.2
