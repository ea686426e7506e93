"""Every family on a GPU in every format of weights: the likelihoods of transformers' model, printed as JSON (-s)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from allspan import Engine, SamplingParams
from support.family_rows import FAMILIES, save_family
from support.tiny_models import prompt, reference_logits

FORMATS: dict[str, tuple[dict[str, Any], float]] = {
    "bfloat16": ({"dtype": "bfloat16"}, 0.1),
    "float32": ({"dtype": "float32"}, 1e-3),
    "int8": ({"dtype": "bfloat16", "quantization": "int8"}, 0.15),
    "uint4": ({"dtype": "bfloat16", "quantization": "uint4"}, 1.2),
}
"""Settings, and how far a token's logarithm may be off by the median: what these weights round away."""
REFUSED = ("exaone4", "exaone4, no window")
"""In 16 bits, as docs/models.md says."""
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "page_size": 16,
    "kv_cache_bytes": 8_000_000,
}
IDS = prompt(120, 97)
"""Longer than every window of the rows, in two chunks."""


def difference(folder: Path, model: Any, settings: dict[str, Any]) -> float:
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
    with Engine(folder, **SETTINGS, **settings) as engine:
        (output,) = engine.generate([IDS], params)
    assert len(output.token_ids) == 4
    whole = IDS + prompt(30, 97, 1)  # a rotation by the length of the prompt is that of the longest one
    likely = reference_logits(model, whole)[: len(IDS) - 1].log_softmax(1)[range(len(IDS) - 1), IDS[1:]]
    told = torch.tensor([entry.logprob for entry in output.prompt_logprobs])
    return float((told - likely).abs().median())


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_every_format_of_weights(name: str, tmp_path: Path) -> None:
    row = FAMILIES[name]
    model = save_family(tmp_path, row).float()
    found: dict[str, float | str] = {}
    for form, (settings, _) in FORMATS.items():
        more = {"device": "cuda", "max_model_len": row.max_model_len or 160}
        try:
            found[form] = round(difference(tmp_path, model, settings | more), 5)
        except Exception as error:  # what the table is about
            found[form] = f"{type(error).__name__}: {error}"
    print(json.dumps({"family": name, **found}))
    for form, (settings, most) in FORMATS.items():
        told = found[form]
        if name in REFUSED and settings["dtype"] != "float32":
            assert isinstance(told, str), found
            assert "no norm before its blocks" in told
        else:
            assert isinstance(told, float), found
            assert told < most, found
