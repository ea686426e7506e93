"""`allspan rm NAME`: removes a model from the models folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from allspan.launch.console import say, size
from allspan.launch.models.local_models import LocalModel, local_models, the_one
from allspan.protos.api.errors import ConfigError, ModelNotFound
from allspan.protos.cluster.running import running_clusters
from allspan.protos.config.flags import Parser
from allspan.protos.config.home import models_dir


def make_parser() -> Parser:
    parser = Parser(
        "allspan rm", "Removes models from the models folder ($ALLSPAN_HOME/models); nothing outside it is removed."
    )
    parser.add_argument("names", nargs="+", metavar="NAME", help="Names a model, as `allspan list` shows it.")
    parser.add_argument("-y", "--yes", action="store_true", help="Removes it without asking.")
    return parser


def run(argv: Sequence[str]) -> int:
    namespace = make_parser().parse(argv)
    chosen = list(dict.fromkeys(choose(name) for name in namespace.names))
    for model in chosen:
        check_unused(model)
    for model in chosen:
        if not (namespace.yes or confirmed(model)):
            say(f"{model.name} is kept")
            return 1
        freed = model.num_bytes
        model.remove()
        say(f"removed {model.name}: {size(freed)} are free again")
    return 0


def choose(name: str) -> LocalModel:
    """Returns the model lying at the path `name`, or called so. ModelNotFound, or ConfigError for one elsewhere and for
    a name of several."""
    models = local_models()
    wanted = _place(Path(name).expanduser())
    found = next((model for model in models if _place(model.path) == wanted), None) or the_one(name, models)
    if found is None and os.path.lexists(wanted):
        raise ConfigError(f"{name} lies outside {models_dir()}; remove it yourself")
    if found is None:
        raise ModelNotFound(f"no model {name!r} in {models_dir()}; allspan list shows what is there")
    inside = os.path.realpath(found.path.parent) + os.sep
    if not found.is_pulled or not inside.startswith(os.path.realpath(models_dir()) + os.sep):
        raise ConfigError(f"{found.name} lies outside {models_dir()}; remove it yourself")
    return found


def _place(path: Path) -> Path:
    """Returns where the file, folder or link itself lies, whatever links lead to it."""
    return path.resolve() if path.name in ("", "..") else path.parent.resolve() / path.name


def check_unused(model: LocalModel) -> None:
    """Raises ConfigError while a running cluster serves the model."""
    path = os.path.realpath(model.path)
    for cluster in running_clusters():
        used = os.path.realpath(cluster.record.model_path)
        if used == path or used.startswith(path + os.sep):
            raise ConfigError(
                f"{model.name} is served by a running cluster (pid {cluster.record.pid}); "
                f"end it first: allspan stop {cluster.record.pid}"
            )


def confirmed(model: LocalModel) -> bool:
    """Asks on the terminal. Raises ConfigError where there is none to ask on."""
    if not sys.stdin.isatty():
        raise ConfigError(f"standard input is no terminal to ask on; allspan rm -y {model.name} removes it unasked")
    try:
        answer = input(f"Remove {model.name} ({size(model.num_bytes)}, {model.path})? [y/N] ")
    except EOFError:
        return False
    return answer.strip().lower() in ("y", "yes")
