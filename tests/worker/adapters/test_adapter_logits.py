"""Logits with adapters against transformers with the same adapters merged into its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from allspan.kernels.table import op_set
from allspan.protos.config.settings import CacheConfig, ModelConfig
from allspan.worker.adapters.slots import AdapterSlots
from allspan.worker.cache.kv import KVCache
from allspan.worker.load.loader import load_model
from allspan.worker.models.model import Model
from allspan.worker.step.inputs import GroupInputs
from support.family_files import save_family_gguf
from support.family_rows import FAMILIES, save_family
from support.peft_adapters import EVERY, merged, save_adapter
from support.threads import ThreadWorld
from support.tiny_models import prompt, reference_logits, relative_error, save_tiny, step_inputs

SHARED = ("embed_tokens", "lm_head")
IDS = [prompt(20, 97, seed) for seed in range(3)]


def with_adapters(
    path: Path,
    world: ThreadWorld,
    rank: int,
    adapters: Sequence[Path],
    most: int,
    backend: str = "reference",
    **config: Any,
) -> Model:
    """A rank's model with these adapters in its slots."""
    settings = ModelConfig(path=str(path), name="tiny", **config)
    model = load_model(settings, world.collectives[rank], op_set(backend, 2), 64, 64, cache=CacheConfig(page_size=16))
    slots = AdapterSlots(model.holding, len(adapters), most)
    slots.allocate("cpu")
    for slot, folder in enumerate(adapters):
        slots.load(slot, folder)
    model.add_adapters(slots)
    model.bind_cache(*(KVCache(group.spec, 8) for group in model.cache_groups))
    return model


def step(
    model: Model, prompts: Sequence[Sequence[int]], slots: Sequence[int], rows: Sequence[int] | None = None
) -> list[Tensor]:
    """The logits of whole prompts in one step, each with the adapter in its slot; or of these rows, as one."""
    pages = [[2 * i, 2 * i + 1] for i in range(len(prompts))]
    inputs = step_inputs(prompts, [0] * len(prompts), pages, 16)
    same = GroupInputs(inputs.slots, inputs.page_indptr, inputs.page_indices)
    inputs = replace(inputs, groups=(same,) * (len(model.cache_groups) - 1))
    if max(slots) >= 0:
        counts = torch.tensor([len(ids) for ids in prompts])
        inputs = replace(inputs, adapters=torch.tensor(slots, dtype=torch.int32).repeat_interleave(counts))
    if rows is not None:
        return [model.forward(replace(inputs, logits_rows=torch.tensor(rows, dtype=torch.int32))).clone()]
    return list(torch.split(model.forward(inputs).clone(), [len(ids) for ids in prompts]))


def on_ranks(path: Path, ranks: int, adapters: Sequence[Path], slots: Sequence[int], **config: Any) -> list[Tensor]:
    world = ThreadWorld(ranks)
    found = world.run(
        lambda rank: step(with_adapters(path, world, rank, adapters, 16, **config), IDS[: len(slots)], slots)
    )
    return [torch.cat([parts[i] for parts in found], 1) for i in range(len(slots))]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rows_with_different_adapters_and_none_are_those_of_merged_weights(ranks: int, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "base", "qwen2")
    deltas = [
        save_adapter(tmp_path / "one", model, 8),
        save_adapter(tmp_path / "two", model, 16, ("q_proj", "down_proj"), seed=1, r=16, use_rslora=True),
    ]
    found = on_ranks(tmp_path / "base", ranks, [tmp_path / "one", tmp_path / "two"], (1, -1, 0))
    expected = [merged(model, deltas[1]), model, merged(model, deltas[0])]
    for logits, each, ids in zip(found, expected, IDS, strict=True):
        assert relative_error(logits, reference_logits(each, ids)) < 1e-5
    assert relative_error(found[0], reference_logits(model, IDS[0])) > 0.05


@pytest.mark.parametrize("target", EVERY)
def test_an_adapter_of_one_module_alone_changes_what_it_should(target: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "base", "qwen2")
    deltas = save_adapter(tmp_path / "one", model, 8, (target,))
    (found,) = on_ranks(tmp_path / "base", 2, [tmp_path / "one"], (0,))
    assert relative_error(found, reference_logits(merged(model, deltas), IDS[0])) < 1e-5


@pytest.mark.parametrize("rank", [1, 8, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_and_scales_that_differ_by_module_are_followed(rank: int, dtype: torch.dtype, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "base", "qwen2")
    patterns = {"rank_pattern": {"layers.0.self_attn.q_proj": 5, "v_proj": 3}, "alpha_pattern": {"(q|k)_proj": 30}}

    def rank_of(name: str) -> int:
        return 5 if name.endswith("layers.0.self_attn.q_proj") else 3 if name.endswith("v_proj") else rank

    deltas = save_adapter(tmp_path / "one", model, rank_of, dtype=dtype, r=rank, **patterns)
    (found,) = on_ranks(tmp_path / "base", 1, [tmp_path / "one"], (0,))
    assert relative_error(found, reference_logits(merged(model, deltas), IDS[0])) < 1e-5


@pytest.mark.parametrize(
    "name", ["phi3, window", "llama", "glm4", "gemma3", "granite", "minimax_m2", "qwen2_moe", "deepseek_v3"]
)
def test_fused_turned_and_scaled_layers_take_adapters(name: str, tmp_path: Path) -> None:
    row = FAMILIES[name]
    model = save_family(tmp_path / "base", row)
    targets = (*EVERY, "qkv_proj", "gate_up_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")
    deltas = save_adapter(tmp_path / "one", model, 8, targets)
    found = on_ranks(tmp_path / "base", 2, [tmp_path / "one"], (0, -1))
    assert relative_error(found[0], reference_logits(merged(model, deltas), IDS[0])) < 1e-4
    assert relative_error(found[1], reference_logits(model, IDS[1])) < 1e-4


@pytest.mark.parametrize("targets", [("embed_tokens",), ("lm_head",), ("embed_tokens", "lm_head", "v_proj")])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_adapters_of_the_embedding_and_of_the_head_change_the_one_that_they_name(
    name: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    """Gemma's are one weight, which is held scaled."""
    model = save_family(tmp_path / "base", FAMILIES[name])
    assert model.config.tie_word_embeddings == (name == "gemma3")
    deltas = save_adapter(tmp_path / "one", model, 8, targets)
    found = on_ranks(tmp_path / "base", 2, [tmp_path / "one"], (0, -1), backend="auto")
    assert relative_error(found[0], reference_logits(merged(model, deltas), IDS[0])) < 1e-5
    assert relative_error(found[1], reference_logits(model, IDS[1])) < 1e-5


def test_adapters_fit_a_gguf_file_whose_rows_lie_otherwise_in_layers_without_rotary(tmp_path: Path) -> None:
    model = save_family(tmp_path / "base", FAMILIES["smollm3"])
    save_family_gguf(tmp_path / "model.gguf", model, FAMILIES["smollm3"])
    deltas = save_adapter(tmp_path / "one", model, 8, ("q_proj", "k_proj", *SHARED))
    found = on_ranks(tmp_path / "model.gguf", 2, [tmp_path / "one"], (0, -1))
    assert relative_error(found[0], reference_logits(merged(model, deltas), IDS[0])) < 1e-4
    assert relative_error(found[1], reference_logits(model, IDS[1])) < 1e-4


@pytest.mark.parametrize("quantization", ["int8", "uint4", "a8w8"])
def test_products_of_adapters_are_not_quantised(quantization: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "base", "qwen2")
    deltas = save_adapter(tmp_path / "one", model, 8, EVERY + SHARED)
    config = {"quantization": quantization, "dtype": "float32"}
    plain, changed = on_ranks(tmp_path / "base", 1, [tmp_path / "one"], (-1, 0), **config)
    error = relative_error(plain, reference_logits(model, IDS[0]))
    assert relative_error(changed, reference_logits(merged(model, deltas), IDS[1])) < 2 * error + 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_kernels_give_the_same_bits_alone_and_beside_other_adapters(dtype: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "base", "qwen2")
    folders = [tmp_path / str(seed) for seed in range(2)]
    deltas = [save_adapter(folder, model, 8, EVERY + SHARED, seed=seed) for seed, folder in enumerate(folders)]
    world = ThreadWorld(1)
    held = with_adapters(tmp_path / "base", world, 0, folders, 16, "auto", dtype=dtype)
    together = step(held, IDS, (1, -1, 0))
    for ids, slot, logits in zip(IDS, (1, -1, 0), together, strict=True):
        assert torch.equal(step(held, [ids], [slot])[0], logits)
    near = 1e-5 if dtype == "float32" else 0.1
    assert relative_error(together[0], reference_logits(merged(model, deltas[1]), IDS[0])) < near


def test_rows_of_logits_are_of_their_own_tokens_adapters(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "base", "qwen2")
    save_adapter(tmp_path / "one", model, 8)
    held = with_adapters(tmp_path / "base", ThreadWorld(1), 0, [tmp_path / "one"], 8, "auto")
    all_rows = torch.cat(step(held, IDS, (-1, 0, -1)))
    for rows in ([19, 39, 59], [39], [5, 59]):
        assert torch.equal(torch.cat(step(held, IDS, (-1, 0, -1), rows)), all_rows[rows])


def test_an_adapter_of_zeros_gives_the_bits_of_the_base(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "base", "qwen2")
    save_adapter(tmp_path / "zero", model, 8, EVERY + SHARED, lora_alpha=1e-30)
    held = with_adapters(tmp_path / "base", ThreadWorld(1), 0, [tmp_path / "zero"], 8, "auto")
    assert torch.equal(step(held, IDS[:1], [0])[0], step(held, IDS[:1], [-1])[0])
