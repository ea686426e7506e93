"""Every family against transformers, as folders and as GGUF files."""

from __future__ import annotations

from pathlib import Path

import pytest

from allspan.worker.load.registry import find_model
from allspan.worker.models.spec_json import spec_json, spec_of
from support.family_files import save_family_gguf
from support.family_rows import FAMILIES, save_family
from support.tiny_models import logits_on_ranks, prompt, reference_logits, relative_error

IDS = prompt(150, 97)
"""Longer than every window and every original context of the rows."""


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers_on_any_number_of_ranks(name: str, tmp_path: Path) -> None:
    row = FAMILIES[name]
    model = save_family(tmp_path, row)
    expected = reference_logits(model, IDS)
    for num_ranks in (1, 2, 3):
        found = logits_on_ranks(tmp_path, num_ranks, [IDS], chunk=64, max_model_len=row.max_model_len)[0]
        assert relative_error(found, expected) < 1e-4, f"{num_ranks} ranks"
    spec = find_model(str(tmp_path)).spec
    assert spec_of(spec_json(spec)) == spec
    if row.gguf:
        save_family_gguf(tmp_path / "model.gguf", model, row)
        found = logits_on_ranks(tmp_path / "model.gguf", 2, [IDS], max_model_len=row.max_model_len)[0]
        assert relative_error(found, expected) < 1e-4, "GGUF"
