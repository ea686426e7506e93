"""Quantised weights: the same model in several formats, with the bytes that they take and the speed that they give.

python examples/python/quantised_weights.py [MODEL]
"""

from __future__ import annotations

import sys
import time

from allspan import Engine, SamplingParams

PARAMS = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)


def main(model: str) -> None:
    for quantization in ("none", "int8", "uint4"):  # "auto", the default, keeps what the file has
        with Engine(model, quantization=quantization) as engine:
            engine.generate("Warm up", PARAMS)
            begun = time.perf_counter()
            text = engine.generate("The largest planet is", PARAMS)[0].text
            rate = PARAMS.max_tokens / (time.perf_counter() - begun)
            weights = engine.statistics().ranks[0].weight_bytes / 2**20
            print(f"{quantization:>6}: {weights:6.1f} MiB of weights, {rate:5.1f} tokens/s, {text[:40]!r}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "SmolLM2-135M-Instruct")
