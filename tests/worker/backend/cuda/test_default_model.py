"""The default model on a GPU: transformers' tokens, but where bfloat16 rounds what lies close."""

from __future__ import annotations

from typing import Any

import pytest

from allspan import Engine, SamplingParams
from support.default_model import chat_prompts, default_model, reference_logits
from support.equality import assert_greedy, assert_nearly_greedy

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
SETTINGS: dict[str, Any] = {"device": "cuda", "max_model_len": 1024, "max_num_seqs": 32, "kv_cache_bytes": 1 << 30}


@pytest.mark.parametrize("is_eager", [False, True], ids=["graphs", "eager"])
def test_greedy_output_is_that_of_transformers(is_eager: bool) -> None:
    prompts = chat_prompts()
    with Engine(default_model(), **SETTINGS, enforce_eager=is_eager) as engine:
        together = engine.generate(prompts, GREEDY)
        alone = [engine.generate(prompt, GREEDY)[0] for prompt in prompts[:4]]
    for prompt, output in zip([*prompts, *prompts], [*together, *alone], strict=False):
        assert_nearly_greedy(output.token_ids, reference_logits(prompt, list(output.token_ids)), f"{prompt[:4]}")
    assert sum(len(output.token_ids) for output in together) > 20 * 32  # most outputs run to their full length


def test_greedy_output_in_float32_is_that_of_transformers() -> None:
    prompts = chat_prompts()[:5]
    with Engine(default_model(), **SETTINGS, dtype="float32", quantization="none") as engine:
        outputs = engine.generate(prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(output.token_ids, reference_logits(prompt, list(output.token_ids)), f"{prompt[:4]}")
