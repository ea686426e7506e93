"""Compiles every kernel ahead of its first use: `python -m allspan.kernels compile [ARCHITECTURE …]`.

A launcher runs it as a process (`allspan warm`). Progress goes to standard error; standard output gets one JSON object:
{"compiler", "folder", "architectures": {NAME: {"compiled", "found", "num_bytes", "seconds"}}}, or {"error"}, or
{"refused"} for a name that is no architecture.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from allspan.kernels.cuda.jit.compiled import compile_all, kernels_dir, label
from allspan.kernels.cuda.jit.nvrtc import CompilationError, architecture, loaded_major, nvrtc
from allspan.kernels.cuda.jit.variants import LEAST_CAPABILITY, all_variants
from allspan.kernels.errors import BackendUnavailable


def main(names: Sequence[str]) -> int:
    try:
        print(json.dumps(warm(names)))
        return 0
    except ValueError as error:
        print(json.dumps({"refused": str(error)}))
    except (BackendUnavailable, CompilationError, OSError) as error:
        print(json.dumps({"error": str(error)}))
    return 1


def warm(names: Sequence[str]) -> dict[str, Any]:
    """For these architectures ("sm_90a"; "sm_90" means it too), or those of the GPUs here.

    Raises ValueError for an architecture that is not known, BackendUnavailable without a compiler, or without a GPU
    where none is named; CompilationError."""
    compiler = nvrtc(loaded_major())
    known = compiler.architectures()
    capabilities = [_capability(name, known) for name in names] or _here()
    report = {architecture(capability): _fill(capability) for capability in dict.fromkeys(capabilities)}
    version = ".".join(map(str, compiler.version))
    return {"compiler": f"NVRTC {version}", "folder": str(kernels_dir()), "architectures": report}


def _fill(capability: tuple[int, int]) -> dict[str, Any]:
    name = architecture(capability)
    begun = time.perf_counter()
    compiled, paths = 0, set()
    wanted = all_variants(capability)
    for kernel, cubin in compile_all(wanted, name, nvrtc(loaded_major())):
        paths.add(cubin.path)
        if cubin.seconds:
            compiled += 1
            print(f"allspan: {label(kernel)} for {name}: {cubin.seconds:.1f} s", file=sys.stderr, flush=True)
    return {
        "compiled": compiled,
        "found": len(paths) - compiled,
        "num_bytes": sum(path.stat().st_size for path in paths),
        "seconds": round(time.perf_counter() - begun, 3),
    }


def _capability(name: str, known: Sequence[str]) -> tuple[int, int]:
    found = re.fullmatch(r"(sm_(\d+)(\d))a?", name)
    if found is None or found[1] not in known:
        raise ValueError(f"{name!r} is no architecture; this compiler knows {', '.join(known)}")
    capability = int(found[2]), int(found[3])
    if not all_variants(capability):
        least = architecture(LEAST_CAPABILITY)
        raise ValueError(f"no kernel here runs on {name}: they need {least} or later")
    return capability


def _here() -> list[tuple[int, int]]:
    if not torch.cuda.is_available():
        raise BackendUnavailable("torch finds no GPU here: name architectures with --arch (sm_80, sm_90a, …)")
    return [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
