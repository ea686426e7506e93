"""`python -m allspan.launch.hosts.checks.tell`: prints this host's facts and its MPI as one JSON object."""

from __future__ import annotations

import json
from dataclasses import asdict

from allspan.launch.hosts.host_facts import read_facts
from allspan.launch.supervision import mpi
from allspan.protos.api.errors import ConfigError


def main() -> None:
    try:
        found = mpi.find_mpirun()
        version, problem = f"{found.kind} {'.'.join(map(str, found.version))}", ""
    except ConfigError as error:
        version, problem = "", error.message
    print(json.dumps({"mpi": version, "mpi_problem": problem, "facts": asdict(read_facts())}), flush=True)


if __name__ == "__main__":
    main()
