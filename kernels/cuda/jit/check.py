"""What CUDA kernels need, and what of it is here: `python -m allspan.kernels check` prints one JSON object,
{"torch", "cupy", "nvrtc", "gpus", "missing"}: versions or null, names of GPUs as torch sees them, and one line about
what keeps kernels from running where there is a GPU ("": nothing)."""

from __future__ import annotations

import importlib.metadata
import json
from typing import Any

import torch

from allspan.kernels.cuda.jit.modules import driver
from allspan.kernels.cuda.jit.nvrtc import architecture, loaded_major, nvrtc
from allspan.kernels.cuda.jit.variants import all_variants
from allspan.kernels.errors import BackendUnavailable


def check() -> dict[str, Any]:
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    facts: dict[str, Any] = {
        "torch": torch.version.cuda,
        "cupy": _cupy(),
        "nvrtc": None,
        "gpus": [torch.cuda.get_device_name(i) for i in gpus],
        "missing": "",
    }
    try:
        compiler = nvrtc(loaded_major())
        facts["nvrtc"] = ".".join(map(str, compiler.version))
        if loaded_major() is None:
            raise BackendUnavailable("this torch is a CPU build")
        if not gpus:
            raise BackendUnavailable("torch finds no GPU")
        driver()
        for i in gpus:
            capability = torch.cuda.get_device_capability(i)
            if architecture(capability).removesuffix("a") not in compiler.architectures():
                raise BackendUnavailable(f"NVRTC {facts['nvrtc']} does not know {architecture(capability)}")
            if not all_variants(capability):
                raise BackendUnavailable(f"no kernel runs on {architecture(capability)}")
    except BackendUnavailable as error:
        facts["missing"] = str(error)
    return facts


def _cupy() -> str | None:
    for package in ("cupy-cuda13x", "cupy-cuda12x", "cupy"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


if __name__ == "__main__":
    print(json.dumps(check()))
