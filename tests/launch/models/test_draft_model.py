"""The model that drafts is found as every other one."""

from __future__ import annotations

from pathlib import Path

import pytest

from allspan.launch.models.draft_model import with_its_path
from allspan.launch.models.hub import HubConfig
from allspan.protos.api.errors import CheckpointError, ModelNotFound
from allspan.protos.config.settings import SchedulerConfig
from allspan.protos.config.speculation import parse_speculation


def settings(model: Path) -> SchedulerConfig:
    return SchedulerConfig(speculative_config=f'{{"model": "{model}", "num_speculative_tokens": 3}}')


def test_its_path_takes_the_place_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small").mkdir()
    monkeypatch.chdir(tmp_path)
    found = with_its_path(settings(Path("small")), HubConfig(revision="main"), has_weights=False)
    asked = parse_speculation(found.speculative_config)
    assert asked is not None
    assert (asked.model, asked.num_speculative_tokens) == (str(tmp_path / "small"), 3)
    assert with_its_path(SchedulerConfig(), HubConfig(), has_weights=True) == SchedulerConfig()


def test_one_that_is_nowhere_or_damaged_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"speculative_config: .*nowhere"):
        with_its_path(settings(tmp_path / "nowhere"), HubConfig(), has_weights=True)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        with_its_path(settings(tmp_path), HubConfig(), has_weights=True)
