"""Models over KV pages of every format and size: close to float32, the same bits however a prompt is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from allspan.kernels.table import backends, op_set
from allspan.protos.api.errors import ConfigError
from allspan.protos.config.settings import CacheConfig, ModelConfig
from allspan.worker.cache.spec import ITEM_BITS
from allspan.worker.load.loader import load_model, prepare
from allspan.worker.models.decoder import build_decoder
from allspan.worker.models.layout import layout
from allspan.worker.models.model import Model
from allspan.worker.models.pieces import Linear
from allspan.worker.models.rope import mean_rotated
from allspan.worker.program.program import Named
from support.threads import ThreadWorld
from support.tiny_models import logits_on_ranks, prefill, prompt, relative_error, save_tiny

DRIFT = {"float32": 1e-5, "bfloat16": 2e-2, "int8": 2e-2, "uint4": 0.3}
"""Of the largest logit, what a format may be off; float16 is for float16 models alone, which CPUs do not run."""
IDS = prompt(90, 97)


def paged(kv_cache_dtype: str, page_size: int = 16) -> CacheConfig:
    return CacheConfig(page_size=page_size, kv_cache_dtype=kv_cache_dtype)


def far_off(actual: Tensor, expected: Tensor) -> float:
    """The mean difference, over the largest logit."""
    return float((actual - expected).abs().mean() / expected.abs().max())


def test_every_format_is_tried_here_but_those_that_are_refused(tmp_path: Path) -> None:
    assert DRIFT.keys() | {"float16", "fp8"} == ITEM_BITS.keys()
    save_tiny(tmp_path, "llama")
    with pytest.raises(ConfigError, match="kv_cache_dtype 'float16' does not go with dtype 'float32': use auto"):
        logits_on_ranks(tmp_path, 1, [IDS], cache=paged("float16"))
    with pytest.raises(ConfigError, match=r"kv_cache_dtype 'fp8' is for latents .*: take int8 or uint4"):
        logits_on_ranks(tmp_path, 1, [IDS], cache=paged("fp8"))


@pytest.mark.parametrize("kv_cache_dtype", DRIFT)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_every_format_is_near_float32_on_any_number_of_ranks(name: str, kv_cache_dtype: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, name)
    exact = logits_on_ranks(tmp_path, 1, [IDS])[0]
    one = logits_on_ranks(tmp_path, 1, [IDS], cache=paged(kv_cache_dtype))[0]
    assert relative_error(one, exact) < DRIFT[kv_cache_dtype]
    for num_ranks in (2, 3, 4):
        many = logits_on_ranks(tmp_path, num_ranks, [IDS], cache=paged(kv_cache_dtype))[0]
        # Ranks add up in another order; now and then that puts an element on the next step of its scale.
        assert relative_error(many, one) < DRIFT[kv_cache_dtype] / 2, f"{num_ranks} ranks"
        assert far_off(many, one) < DRIFT[kv_cache_dtype] / 20, f"{num_ranks} ranks"


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "uint4"])
@pytest.mark.parametrize("backend", [name for name in backends() if name.startswith("cpu/")] or ["cpu"])
def test_quantised_pages_give_the_same_bits_however_a_prompt_is_cut(
    backend: str, kv_cache_dtype: str, tmp_path: Path
) -> None:
    if backend not in backends():
        pytest.skip("the compiled kernels are not built")
    save_tiny(tmp_path, "llama")
    prompts = [prompt(length, 97, seed=length) for length in (70, 9)]
    settings: dict[str, Any] = {"backend": backend, "cache": paged(kv_cache_dtype)}
    for num_ranks in (1, 2):
        whole = logits_on_ranks(tmp_path, num_ranks, prompts, **settings)
        for chunk in (1, 7):
            cut = logits_on_ranks(tmp_path, num_ranks, prompts, chunk, **settings)
            assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True)), f"chunks of {chunk}"
        alone = logits_on_ranks(tmp_path, num_ranks, prompts[1:], **settings)
        assert torch.equal(alone[0], whole[1]), "alone"
        for page_size in (32, 64, 128):
            other = logits_on_ranks(
                tmp_path, num_ranks, prompts, backend=backend, cache=paged(kv_cache_dtype, page_size)
            )
            assert all(torch.equal(a, b) for a, b in zip(whole, other, strict=True)), f"pages of {page_size}"


@pytest.mark.parametrize("head_dim", [10, 18, 80])
def test_a_head_of_any_size_can_be_quantised(head_dim: int, tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3", head_dim=head_dim)
    exact = logits_on_ranks(tmp_path, 1, [IDS])[0]
    assert relative_error(logits_on_ranks(tmp_path, 2, [IDS], cache=paged("int8"))[0], exact) < DRIFT["int8"]


def with_large_biases(folder: Path, seed: int) -> None:
    """A checkpoint whose keys stand out in one element, as those of some models do."""
    reference = save_tiny(folder, "qwen2")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in reference.model.layers:
            bias = layer.self_attn.k_proj.bias
            bias.copy_(torch.randn(bias.shape, generator=generator))
            bias[-1] = 150.0  # of the slowest pair
    reference.save_pretrained(folder)


def load(folder: Path, kv_cache_dtype: str) -> Model:
    config = ModelConfig(path=str(folder), name="tiny")
    return load_model(config, ThreadWorld(1).collectives[0], op_set("reference"), 90, 90, cache=paged(kv_cache_dtype))


def test_a_large_bias_of_the_keys_leaves_the_scale_to_what_differs(tmp_path: Path) -> None:
    with_large_biases(tmp_path, 0)
    exact = prefill(load(tmp_path, "float32"), [IDS], 90)[0]
    model = load(tmp_path, "int8")
    centered = far_off(prefill(model, [IDS], 90)[0], exact)
    (qkv,) = (piece for piece in layout(model.spec) if piece.name == "layers.0.qkv")
    assert isinstance(qkv, Linear)
    parts = list(model.holding.shape_of(qkv).parts)
    biases = [torch.split(model.weights[f"layers.{layer}.qkv.bias"], parts)[1] for layer in range(2)]
    kept = [bias.clone() for bias in biases]
    for bias in biases:
        bias.zero_()
    model.weights_changed()  # centers of zero
    for bias, values in zip(biases, kept, strict=True):
        bias.copy_(values)
    assert centered < far_off(prefill(model, [IDS], 90)[0], exact) / 4


def test_what_is_derived_from_weights_follows_them(tmp_path: Path) -> None:
    with_large_biases(tmp_path / "old", 0)
    with_large_biases(tmp_path / "new", 1)
    model, new = load(tmp_path / "old", "int8"), load(tmp_path / "new", "int8")
    for name, tensor in model.weights.items():
        tensor.copy_(new.weights[name])
    model.weights_changed()
    assert torch.equal(prefill(model, [IDS], 90)[0], prefill(new, [IDS], 90)[0])


def test_only_keys_of_a_quantised_cache_are_rotated(tmp_path: Path) -> None:
    save_tiny(tmp_path / "biased", "qwen2")
    save_tiny(tmp_path / "plain", "llama2")
    for folder, centers in (("biased", 2), ("plain", 0)):
        prepared = prepare(ModelConfig(path=str(tmp_path / folder), name="tiny"), CacheConfig(), 0, 1)
        plain, quantised = (build_decoder(prepared.holding, quantised).program for quantised in (False, True))
        for program, is_rotated in ((plain, False), (quantised, True)):
            assert [op.arguments[4].is_on for op in program.ops if op.name == "rotary_append"] == [is_rotated] * 2
        names = [slot.name for slot in quantised.slots if isinstance(slot, Named)]
        assert sum(name.startswith("k_center.") for name in names) == centers


def test_the_mean_of_what_is_turned_to_every_position() -> None:
    angles = torch.tensor([0.0, 0.5, 1.0])
    cos_sin = torch.stack((angles.cos(), angles.sin()), dim=1)
    x = torch.tensor([[2.0, -1.0, 7.0]])
    turned = [[2 * a.cos() + a.sin(), -1 * a.cos() + 2 * a.sin(), torch.tensor(7.0)] for a in angles]
    expected = torch.tensor(turned).mean(0, keepdim=True)
    torch.testing.assert_close(mean_rotated(x, cos_sin), expected)
