"""Finds the model that drafts for another one, where the settings name one."""

from __future__ import annotations

from dataclasses import replace

from allspan.launch.models.checkpoint_files import check_files
from allspan.launch.models.find_model import resolve_model
from allspan.launch.models.hub import HubConfig
from allspan.protos.config.settings import SchedulerConfig
from allspan.protos.config.speculation import with_draft_model


def with_its_path(settings: SchedulerConfig, hub: HubConfig, has_weights: bool) -> SchedulerConfig:
    """The same settings with the path of that model, fetched if need be and its files checked. Raises as
    `resolve_model` and `check_files`. The hub's revision is the other model's."""

    def find(name: str) -> str:
        path = resolve_model(name, replace(hub, revision="")).path
        check_files(path, has_weights)
        return str(path)

    return replace(settings, speculative_config=with_draft_model(settings.speculative_config, find))
