"""Quantised checkpoints in the engine on the CUDA kernels: the tokens of transformers' model with the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from allspan import Engine, SamplingParams
from support.quantised_checkpoints import FORMS, quantise_folder
from support.tiny_models import prompt, reference_logits, save_tiny

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "head_dim": 64,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "intermediate_size": 288,
}
SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,
    "kv_cache_bytes": 4_000_000,
}


def save_quantised(folder: Path, name: str) -> Any:
    """transformers' model in float32, with the weights that the tensors stand for."""
    model = save_tiny(folder, "qwen2", **SIZES).float()
    form, config = FORMS[name]
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for each, values in quantise_folder(folder, form, config).items():
            parameters[each].copy_(values)
    return model


def check(folder: Path, name: str, asked: list[list[int]], on: dict[str, Any], dtype: str = "bfloat16") -> None:
    """Each token is transformers' best, or as good but for what 16 bits round away. Inputs of 8 bits are as noisy as
    they are: a model of two layers may take another token, but half of the prompts' tokens are about as likely."""
    model = save_quantised(folder, name)
    is_noisy = "fp8" in name or name == "compressed-int8"
    slack = 2.0 if is_noisy else 0.1 if dtype == "bfloat16" else 0.02
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, prompt_logprobs=0 if is_noisy else None)
    with Engine(folder, **on, **SETTINGS | {"dtype": dtype}) as engine:
        outputs = engine.generate(asked, params)
    for one, output in zip(asked, outputs, strict=True):
        logits: Tensor = reference_logits(model, [*one, *output.token_ids])[:-1]
        for token, row in zip(output.token_ids, logits[len(one) - 1 :], strict=True):
            assert float(row.max() - row[token]) <= slack * float(row.std())
        if is_noisy and len(one) > 2:
            likely = logits.log_softmax(1)[range(len(one) - 1), one[1:]]
            told = torch.tensor([entry.logprob for entry in output.prompt_logprobs])
            assert float((told - likely).abs().median()) < 0.6


@pytest.mark.parametrize(("name", "dtype"), [("fp8-blocks", "bfloat16"), ("gptq-ordered", "float16")])
def test_a_few_tokens_are_those_of_transformers(name: str, dtype: str, tmp_path: Path, on: dict[str, Any]) -> None:
    check(tmp_path, name, [prompt(7, 97), prompt(2, 97, 1)], on, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", FORMS)
def test_tokens_behind_prompts_are_those_of_transformers(name: str, dtype: str, tmp_path: Path) -> None:
    """More rows than the kernels for few rows take."""
    check(tmp_path, name, [prompt(length, 97, length) for length in (1, 40, 120, 200)], {"device": "cuda"}, dtype)
