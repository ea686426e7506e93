"""The default model's logits in its own GGUF blocks and re-quantised, beside transformers' float32 ones."""

from __future__ import annotations

import pytest
import torch

from support.default_model import chat_prompts, default_model, reference_model
from support.tiny_models import logits_on_ranks, relative_error

pytestmark = pytest.mark.timeout(900)

# Twice what was measured: the largest difference, of the largest logit, and the mean Kullback-Leibler divergence, in
# nats. 8-bit inputs with a scale for 128 of them cost most; 4 bits in groups of 32 find back the file's own.
BOUNDS = {"gguf": (0.12, 0.02), "int8": (0.12, 0.02), "a8w8": (0.4, 0.1), "uint4": (0.05, 0.005)}


@pytest.mark.parametrize(
    "quantization", ["gguf", *(pytest.param(name, marks=pytest.mark.nightly) for name in BOUNDS if name != "gguf")]
)
def test_logits_are_near_those_of_float32(quantization: str) -> None:
    prompts = [chat_prompts()[i] for i in (2, 10)]
    for num_ranks in (1, 2):
        found = logits_on_ranks(default_model(), num_ranks, prompts, backend="auto", quantization=quantization)
        for ids, logits in zip(prompts, found, strict=True):
            with torch.no_grad():
                expected = reference_model()(torch.tensor([ids])).logits[0]
            chances = expected.log_softmax(-1)
            divergence = (chances.exp() * (chances - logits.log_softmax(-1))).sum(-1).mean()
            largest, mean = BOUNDS[quantization]
            assert relative_error(logits, expected) < largest
            assert divergence < mean
