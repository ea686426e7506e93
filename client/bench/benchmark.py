"""The definition of a benchmark: its settings, the cluster options that it needs, a measurement, and a table of the
report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from allspan.client.bench.machine import machine, versions
from allspan.client.engine import ClientEngine
from allspan.protos.api.errors import ConfigError

Options = dict[str, Any]
"""Flags of `allspan serve`, by their names with underscores."""
Report = dict[str, Any]
"""JSON values: seconds, bytes, tokens per second."""


@dataclass(frozen=True)
class Benchmark:
    """One row of the table of `allspan bench`. `config` is a frozen dataclass: its fields are the command's flags."""

    cluster: ClassVar[str] = "A cluster is started for it."
    """What its help says of the cluster that it measures."""

    name: str
    about: str
    """What it does, in a whole sentence."""
    config: type
    prepare: Callable[[Any, Options], Options]
    """(config, the options given) → the options of the cluster. Raises ConfigError before anything is started."""
    measure: Callable[[ClientEngine, Any, Options], Report]
    table: Callable[[Report], str]

    def run(self, model: str, config: Any, quiet: bool = False, **serve_options: Any) -> Report:
        """Starts a cluster, measures and ends it. The report has settings, versions and the machine as well."""
        given = {key: value for key, value in serve_options.items() if value is not None}
        options = self.prepare(config, given)
        with ClientEngine(model, quiet=quiet, **options) as engine:
            report = self.measure(engine, config, options)
            facts = engine.statistics()
            vocab_size = engine.cluster.vocab_size
        report["settings"] = {"model": model, "vocab_size": vocab_size, **asdict(config), **options}
        report["versions"] = versions(facts)
        report["machine"] = machine()
        return report


def with_context(options: Options, needed: int, made_of: str) -> Options:
    """Returns the options with `max_model_len` at `needed` unless it is given; ConfigError when the given one is
    less."""
    given = options.get("max_model_len") or needed
    if given < needed:
        raise ConfigError(f"--max-model-len is {given}, must be at least {made_of} ({needed})")
    return {**options, "max_model_len": given}


def at_least(config: Any, least: Mapping[str, float]) -> None:
    """Checks the least values of fields; ConfigError names the first field of `config` that is below its own."""
    for name, low in least.items():
        if (value := getattr(config, name)) < low:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}, must be at least {low:g}")
