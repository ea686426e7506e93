"""The typed keyword arguments of the engines are the settings' fields: a new field is missing nowhere."""

from __future__ import annotations

from typing import get_type_hints

from allspan.client.engine import ServeOptions
from allspan.launch.settings import serve_parser
from allspan.protos.config.settings import (
    AdapterConfig,
    CacheConfig,
    EngineOptions,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    ServiceConfig,
)
from allspan.worker.engine.settings import EngineSettings

OWN = {"path", "name"}
"""Of ModelConfig: what the model argument says."""


def declared(*classes: type) -> dict[str, object]:
    """The type of each field, by name."""
    return {name: kind for cls in classes for name, kind in get_type_hints(cls).items() if name not in OWN}


def flags() -> set[str]:
    return {action.dest for action in serve_parser()._actions}


def test_the_engine_s_keyword_arguments_are_the_fields_of_its_settings() -> None:
    settings = declared(ModelConfig, CacheConfig, SchedulerConfig, ParallelConfig, AdapterConfig)
    settings["watchdog_timeout"] = declared(ServiceConfig)["watchdog_timeout"]
    assert get_type_hints(EngineSettings) == settings


def test_every_setting_that_is_a_flag_is_an_option_of_both_engines() -> None:
    settings = get_type_hints(EngineSettings)
    assert set(get_type_hints(EngineOptions)) == set(settings) & flags()


def test_every_serve_option_is_a_flag() -> None:
    assert set(get_type_hints(ServeOptions)) - flags() == {"quiet"}
