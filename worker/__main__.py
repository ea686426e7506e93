"""`python -m allspan.worker`: one rank, as mpirun starts it.

mpirun … python -m allspan.worker CONFIG.json            (what the launcher writes)
mpirun … python -m allspan.worker --model PATH --run-dir DIR [flags]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from allspan.protos.api.errors import ConfigError
from allspan.protos.config.config_json import RANK_LIMITS, check, from_json
from allspan.protos.config.flags import Parser, add_options, build, fail
from allspan.protos.config.settings import (
    CHOICES,
    AdapterConfig,
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    ServiceConfig,
    WorkerConfig,
)
from allspan.worker.process.host import place

PROG = "allspan.worker"
_GROUPS = {
    "model": ModelConfig,
    "service": ServiceConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
    "adapters": AdapterConfig,
}


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Ends with exit code 0 after an orderly end, 2 for wrong arguments, 1 for anything else."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        config = read_config(arguments)
    except ConfigError as error:
        fail(PROG, error.message, 2)
    # Torch, MPI and gRPC are loaded only for arguments that will do.
    from allspan.worker.app import run_rank

    run_rank(config)


def read_config(arguments: Sequence[str]) -> WorkerConfig:
    """From a JSON file, or from flags. Raises ConfigError; a wrong flag ends the program with one line and code 2."""
    ranks = place()
    if len(arguments) == 1 and not arguments[0].startswith("-"):
        try:
            text = Path(arguments[0]).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"the configuration cannot be read: {error}") from error
        return from_json(text, ranks[0] if ranks else 0)
    parser = Parser(PROG, "One rank of a cluster, started by mpirun; give the path of a JSON file, or flags.")
    parser.add_argument("--model", dest="path", required=True, metavar="PATH", help="Names a folder or GGUF file.")
    parser.add_argument(
        "--name", default="", metavar="TEXT", help="Sets the name that requests use (default: the path's)."
    )
    for cls in _GROUPS.values():
        add_options(parser, cls, skip=("path", "name"), choices=CHOICES, limits=RANK_LIMITS)
    namespace = parser.parse(arguments)
    namespace.name = namespace.name or Path(namespace.path).stem
    return check(WorkerConfig(**{group: build(cls, namespace) for group, cls in _GROUPS.items()}))


if __name__ == "__main__":
    main()
