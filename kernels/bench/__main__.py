"""One group of cases on the first GPU: `python -m allspan.kernels.bench GROUP [--rounds N]`.

A launcher runs it as a process (`allspan bench kernels`), so that a kernel that breaks the GPU's context spoils one
group. Standard output gets a JSON object a line: {"device"}, then a {"case"} each as it comes, or {"error"}.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any

import torch

from allspan.kernels.bench.case import Case
from allspan.kernels.bench.measure import GraphClock, Result, measure, roofs
from allspan.kernels.cuda.jit.check import check
from allspan.kernels.errors import BackendUnavailable

GROUPS = {
    "decode": "allspan.kernels.bench.attention:decode_cases",
    "prefill": "allspan.kernels.bench.attention:prefill_cases",
    "latent": "allspan.kernels.bench.latent:latent_cases",
    "cascade": "allspan.kernels.bench.cascade:cascade_cases",
    "linear": "allspan.kernels.bench.linear:linear_cases",
    "experts": "allspan.kernels.bench.mixtures:mixture_cases",
    "adapters": "allspan.kernels.bench.adapters:adapter_cases",
    "elementwise": "allspan.kernels.bench.elementwise:elementwise_cases",
    "sampling": "allspan.kernels.bench.sampling:sampling_cases",
}
PEERS = ("flashinfer-python", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("group", choices=tuple(GROUPS))
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    try:
        for line in run(arguments.group, arguments.rounds):
            print(json.dumps(line), flush=True)
    except BackendUnavailable as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    return 0


def run(group: str, rounds: int) -> Iterator[dict[str, Any]]:
    """Raises BackendUnavailable where CUDA kernels cannot run."""
    facts = check()
    if facts["missing"]:
        raise BackendUnavailable(facts["missing"])
    torch.manual_seed(0)
    clock, properties = GraphClock(), torch.cuda.get_device_properties(0)
    device = {"name": properties.name, "multiprocessors": properties.multi_processor_count, **roofs(clock, "cuda")}
    yield {"device": device, "versions": _versions(facts)}
    for result in measure(tuple(cases(group)), "cuda", clock, rounds, properties.total_memory):
        yield {"case": as_json(result)}
        torch.cuda.empty_cache()


def cases(group: str) -> Iterable[Case]:
    module, _, function = GROUPS[group].partition(":")
    make: Callable[[], Iterable[Case]] = getattr(importlib.import_module(module), function)
    return make()


def as_json(result: Result) -> dict[str, Any]:
    return asdict(result) | {"ratio": result.ratio}


def _versions(facts: dict[str, Any]) -> dict[str, str]:
    found = {"torch": torch.__version__, "cupy": facts["cupy"] or "", "nvrtc": facts["nvrtc"] or ""}
    for package in PEERS:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
