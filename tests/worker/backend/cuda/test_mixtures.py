"""Families with experts on the CUDA kernels: the likelihoods of transformers' model, and graphs for every routing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from allspan import Engine, SamplingParams
from allspan.kernels.cuda.latent import expand_rule
from allspan.kernels.cuda.latent.expand_rule import ExpandRule
from allspan.worker.backend.cuda import step_layout
from support.mxfp4_model import save_mxfp4
from support.quantised_checkpoints import FORMS, quantise_folder
from support.tiny_models import prompt, reference_logits

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "moe_intermediate_size": 48,
    "num_experts_per_tok": 2,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
LATENTS = {
    "n_routed_experts": 8,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "first_k_dense_replace": 1,
}
WHOLE = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 8192,
}
"""Latents of released models."""
ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3_moe", {"num_local_experts": 6, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen2": ("qwen2_moe", {"num_experts": 6, "shared_expert_intermediate_size": 56}),
    "minimax": ("minimax_m2", {"num_local_experts": 6, "intermediate_size": 48}),
    "glm4": ("glm4_moe", {"n_routed_experts": 8, "routed_scaling_factor": 2.5, "use_qk_norm": True, "n_group": 4}),
    "deepseek_v2": ("deepseek_v2", LATENTS | {"q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "deepseek_v3": ("deepseek_v3", LATENTS | {"n_group": 4, "topk_group": 2}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 6, "sliding_window": 24, "rope_parameters": ROPE}),
}
SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 160,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "page_size": 16,
    "kv_cache_bytes": 8_000_000,
}
EMULATED = ("fp8-blocks", "gptq-channel")
IDS = prompt(70, 97)
"""In two chunks, the first of more rows than a block sums up by itself."""


def save(folder: Path, name: str, **changes: Any) -> Any:
    """A random model whose routers' biases decide: they are far larger than scores differ."""
    model_type, config = MODELS[name]
    torch.manual_seed(5)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES | config | changes))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in key else 0.0, 0.15)
            parameter.copy_(parameter.bfloat16())
        for key, buffer in model.named_buffers():
            if "correction_bias" in key:
                buffer.copy_(torch.randperm(len(buffer)) * 2.0 - 12.0)
    model.eval()
    model.save_pretrained(folder)
    return model


def difference(folder: Path, model: Any, settings: dict[str, Any]) -> float:
    """How far a token's logarithm is off by the median, of prompts that run beside each other and what follows them."""
    asked = [IDS, prompt(9, 97, 1), prompt(1, 97, 2)]
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, prompt_logprobs=0, logprobs=0)
    with Engine(folder, **SETTINGS | settings) as engine:
        outputs = engine.generate(asked, params)
        for load in engine.statistics().experts:
            computed = sum(map(len, asked)) + len(asked) * (params.max_tokens - 1)
            assert load.choices == 2 * computed, f"layer {load.layer}: padding is not counted"
    found: list[float] = []
    for ids, output in zip(asked, outputs, strict=True):
        whole = [*ids, *output.token_ids]
        likely = reference_logits(model, whole).log_softmax(1)[range(len(whole) - 1), whole[1:]]
        told = [entry.logprob for entry in (*output.prompt_logprobs, *output.logprobs)]
        assert len(told) == len(likely)
        found += (torch.tensor(told) - likely).abs().tolist()
    return float(torch.tensor(found).median())


@pytest.mark.parametrize("name", MODELS)
def test_likelihoods_are_those_of_transformers(name: str, tmp_path: Path, on: dict[str, Any]) -> None:
    model = save(tmp_path, name)
    assert difference(tmp_path, model, on) < 0.05


def errors(folder: Path, model: Any, asked: list[list[list[int]]], settings: dict[str, Any]) -> torch.Tensor:
    """How far the logarithms of chosen tokens are off, of some batches of prompts one after the other."""
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=0)
    found = []
    with Engine(folder, **SETTINGS | settings) as engine:
        for batch in asked:
            for ids, output in zip(batch, engine.generate(batch, params), strict=True):
                whole = [*ids, *output.token_ids]
                likely = reference_logits(model, whole).log_softmax(1)[range(len(ids) - 1, len(whole) - 1)]
                told = torch.tensor([entry.logprob for entry in output.logprobs])
                found.append((told - likely.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]).abs())
        assert engine.statistics().prefix_hit_tokens >= 64 + 96
    return torch.cat(found)


def test_chunks_and_cached_prefixes_of_latents(
    tmp_path: Path, on: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values are made of all that prompts see: in chunks, and when pages hold most of them."""
    monkeypatch.setattr(step_layout, "LEAST_ROWS", 2)
    monkeypatch.setattr(ExpandRule, "_pays", lambda self, new, before: new > 0)
    model = save(tmp_path, "deepseek_v3")
    asked = [IDS, IDS[:65] + prompt(40, 97, 3), prompt(9, 97, 1)]
    assert float(errors(tmp_path, model, [asked, asked], on | {"max_num_batched_tokens": 48}).median()) < 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("launching", [0.0, 1e15], ids=["launched", "captured"])
def test_long_prompts_of_latents(launching: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of released models' sizes, in large steps: that begin in them, straddle two, and go on further."""
    monkeypatch.setattr(expand_rule, "_LAUNCHING", launching)
    model = save(tmp_path, "deepseek_v3", **WHOLE)
    first = [prompt(2500, 97, 1), prompt(2500, 97, 2), prompt(4300, 97, 3)]
    then = [first[2][:3000] + prompt(1000, 97, 4), first[0][:2000] + prompt(90, 97, 5), prompt(300, 97, 6)]
    settings = {"device": "cuda", "max_model_len": 4400, "max_num_batched_tokens": 4096, "kv_cache_bytes": 64_000_000}
    assert float(errors(tmp_path, model, [first, then], settings).median()) < 0.05


def test_experts_in_mxfp4_are_those_that_transformers_decodes(tmp_path: Path, on: dict[str, Any]) -> None:
    assert difference(tmp_path, save_mxfp4(tmp_path)[0], on) < 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", ["int8", "uint4", "fp8"])
@pytest.mark.parametrize("name", MODELS)
def test_quantised_experts_are_about_as_likely(name: str, quantization: str, tmp_path: Path) -> None:
    model = save(tmp_path, name)
    assert difference(tmp_path, model, {"device": "cuda", "quantization": quantization}) < 1.2


@pytest.mark.parametrize(
    "form", [name if name in EMULATED else pytest.param(name, marks=pytest.mark.gpu) for name in FORMS]
)
def test_experts_of_quantised_checkpoints_are_about_as_likely(form: str, tmp_path: Path, on: dict[str, Any]) -> None:
    """As transformers finds tokens with the weights that the tensors stand for."""
    save(tmp_path, "qwen3")
    plain = load_file(tmp_path / "model.safetensors")
    make, config = FORMS[form]
    decoded = quantise_folder(tmp_path, make, config, kept=(".gate.",))
    (tmp_path / "plain").mkdir()
    save_file(
        {name: decoded.get(name, each).float() for name, each in plain.items()},
        tmp_path / "plain/model.safetensors",
        {"format": "pt"},
    )
    described = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": None}
    (tmp_path / "plain/config.json").write_text(json.dumps(described))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain").eval()
    assert difference(tmp_path, model, on) < (0.6 if "fp8" in form or form == "compressed-int8" else 0.05)
