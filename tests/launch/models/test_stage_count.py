"""More stages of a pipeline than a model has layers are refused from its settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from allspan.launch.models.checkpoint_files import check_stages
from allspan.protos.api.errors import ConfigError


@pytest.mark.parametrize("values", [{"num_hidden_layers": 2}, {"text_config": {"num_hidden_layers": 2}}])
def test_a_stage_without_a_layer_is_refused_by_its_flag(values: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    check_stages(tmp_path, 2)
    with pytest.raises(ConfigError, match="--pipeline-parallel-size is 3, must be at most 2"):
        check_stages(tmp_path, 3)
