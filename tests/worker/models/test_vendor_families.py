"""Logits of families that transformers has no class for, against plain numpy, at every position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.tiny_models import logits_on_ranks, prompt, relative_error
from support.vendor_models import CONFIGS, save_vendor, vendor_logits


def vocabulary(config: Any) -> int:
    return int(config.get("padded_vocab_size", config.get("vocab_size")))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_the_vendors_formulas_on_any_number_of_ranks(name: str, tmp_path: Path) -> None:
    """Prompts of 120 tokens for those whose tables do not depend on the prompt's length; it is Qwen's original context
    for the others: `test_prompt_tables.py` goes beyond."""
    config, weights = save_vendor(tmp_path, name)
    ids = prompt(40 if name == "qwen" else 120, vocabulary(config))
    expected = torch.from_numpy(vendor_logits(config, weights, ids))
    for num_ranks in (1, 2, 3):
        actual = logits_on_ranks(tmp_path, num_ranks, [ids])[0]
        assert relative_error(actual, expected) < 1e-4, f"{num_ranks} ranks"
