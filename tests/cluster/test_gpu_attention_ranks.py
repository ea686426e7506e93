"""Two GPUs that attend for requests of their own: the tokens of one, and of transformers' model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from allspan import ClientEngine, SamplingParams
from allspan.launch.placement.gpus import find_gpus, visible_gpus
from support.byte_model import page_bytes
from support.byte_tokenizer import write_byte_tokenizer
from support.latent_models import save_latent
from support.tiny_models import prompt, reference_logits, save_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

VOCAB, PAGE = 256, 16
LATENTS = {"qk_rope_head_dim": 16, "v_head_dim": 16, "vocab_size": VOCAB, "max_position_embeddings": 4096}
WINDOWS: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "use_sliding_window": True,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention"],
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
}
FIRST = prompt(400, VOCAB, 1)
"""What every third request begins with."""
SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "gpu_memory_utilization": 0.1,
    "page_size": PAGE,
    "max_model_len": 3072,
    "max_num_seqs": 32,
    "threads": 1,
    "oversubscribe": True,
    "startup_timeout": 300.0,
}
"""Prompts are longer than the largest step that is captured."""


@pytest.fixture(autouse=True)
def two_gpus() -> None:
    if len(visible_gpus(find_gpus())) < 2:
        pytest.skip("gpu: two of them are needed")


def save(folder: Path, name: str) -> Any:
    """A folder that clusters serve, of weights that bfloat16 holds."""
    model = save_tiny(folder, "qwen2", **WINDOWS) if name == "windows" else save_latent(folder, name, **LATENTS)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    model.save_pretrained(folder)
    config = (folder / "config.json").read_text()
    write_byte_tokenizer(folder)  # writes a config.json of its own
    (folder / "config.json").write_text(config)
    return model


def prompts(longest: int) -> list[list[int]]:
    """Short and long ones, some of which begin alike."""
    many = [FIRST[: 100 + 7 * i] if i % 3 == 0 else prompt(1 + 13 * i, VOCAB, 2 + i) for i in range(40)]
    return [*many, prompt(longest, VOCAB, 99), prompt(longest - 7, VOCAB, 98)]


def params(count: int) -> list[SamplingParams]:
    """Of different lengths; one in six samples, one asks for the log-probabilities of its prompt."""
    return [
        SamplingParams(
            max_tokens=40 + 5 * (i % 12),
            temperature=0.9 * (i % 6 == 5),
            seed=i,
            ignore_eos=True,
            logprobs=0,
            prompt_logprobs=0 if i == 4 else None,
        )
        for i in range(count)
    ]


def assert_likely(model: Any, asked: Sequence[Sequence[int]], outputs: Sequence[Any], slack: float) -> None:
    """Greedy tokens are the model's best after those before them, or nearly, but for a few where 16 bits have chosen
    another expert; tokens are told as likely as they are."""
    misses, wrong = [], []
    for one, output, own in zip(asked, outputs, params(len(asked)), strict=True):
        assert len(output.token_ids) == own.max_tokens
        whole = [*one, *output.token_ids]
        logits = reference_logits(model, whole)
        rows = logits[len(one) - 1 : -1]
        chosen = rows[range(len(rows)), output.token_ids]
        if not own.temperature:
            misses.append((rows.max(1).values - chosen) / rows.std(1))
        told = torch.tensor([entry.logprob for entry in (*output.prompt_logprobs, *output.logprobs)])
        likely = logits.log_softmax(1)[range(len(whole) - 1), whole[1:]][-len(told) :]
        wrong.append((told - likely).abs())
    assert float((torch.cat(misses) > slack).float().mean()) < 0.02
    assert max(float(own.median()) for own in misses) == 0.0
    assert max(float(own.median()) for own in wrong) < slack


@pytest.mark.parametrize(
    ("name", "pages", "eager", "apart"),
    [
        ("v3", "auto", False, True),
        ("v3", "int8", True, True),
        ("v2 lite", "int8", False, True),
        ("windows", "auto", False, True),
        ("v3", "auto", False, False),
    ],
)
def test_two_gpus_make_the_tokens_of_the_model(name: str, pages: str, eager: bool, apart: bool, tmp_path: Path) -> None:
    """With rows of their own or shares of all heads, in chunks, in steps that are captured and in larger ones, from
    cached pages and pages of the host, put out and let in again."""
    model = save(tmp_path, name)
    asked = prompts(2900)
    size = page_bytes(tmp_path, 1, PAGE, "bfloat16" if pages == "auto" else pages)
    few = {"kv_cache_bytes": 200 * size, "host_kv_cache_bytes": 1000 * size}
    layout = {"data_parallel_attention": apart, "enable_expert_parallel": name == "v3"}
    with ClientEngine(
        tmp_path, ranks=2, dtype="bfloat16", kv_cache_dtype=pages, enforce_eager=eager, **SETTINGS | few | layout
    ) as engine:
        for _ in range(2):
            outputs = engine.generate(asked, params(len(asked)))
            assert_likely(model, asked, outputs, 0.1 if pages == "auto" else 0.5)
        counters = engine.statistics()
    assert counters.preemptions > 0 or name == "windows", "whose two cache groups have more pages of these bytes"
    assert counters.prefix_hit_tokens > 0
    assert counters.prefix_host_hit_tokens > 0
    assert counters.pages_used == 0


def test_two_gpus_make_the_tokens_of_one_in_float32(tmp_path: Path) -> None:
    save(tmp_path, "v3")
    asked = prompts(300)[:16]
    found = {}
    for ranks in (1, 2):
        with ClientEngine(
            tmp_path, ranks=ranks, dtype="float32", data_parallel_attention=True, **SETTINGS | {"max_model_len": 1024}
        ) as engine:
            found[ranks] = [output.token_ids for output in engine.generate(asked, params(len(asked)))]
    assert found[2] == found[1]


def test_weights_in_fp8_blocks_are_about_those_of_one_gpu(tmp_path: Path) -> None:
    """By how likely they find the tokens of prompts that come in chunks."""
    save(tmp_path, "v3")
    asked = prompts(300)[:16]
    own = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
    fp8 = {"dtype": "bfloat16", "quantization": "fp8", "quantization_group": 128, "max_num_batched_tokens": 128}
    told = {}
    for ranks in (1, 2):
        with ClientEngine(tmp_path, ranks=ranks, data_parallel_attention=True, **SETTINGS | fp8) as engine:
            outputs = engine.generate(asked, own)
        told[ranks] = torch.tensor([entry.logprob for output in outputs for entry in output.prompt_logprobs])
    assert len(told[1]) == len(told[2]) == sum(len(one) - 1 for one in asked)
    assert float((told[1] - told[2]).abs().median()) < 0.1
