"""Offline batch: many prompts in one call, inside this process, without a server.

python examples/python/offline_batch.py [MODEL]
"""

from __future__ import annotations

import sys

from allspan import Engine, SamplingParams

PROMPTS = [
    "The three primary colours are",
    "Water boils at",
    "The capital of Japan is",
    "A haiku about the sea:",
]


def main(model: str) -> None:
    with Engine(model) as engine:
        completions = engine.generate(PROMPTS, SamplingParams(max_tokens=24, temperature=0.0))
        for prompt, completion in zip(PROMPTS, completions, strict=True):
            print(f"{prompt!r} → {completion.text!r} ({completion.finish_reason})")
        statistics = engine.statistics()
        print(f"{statistics.prompt_tokens} prompt tokens, {statistics.generated_tokens} generated tokens")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "SmolLM2-135M-Instruct")
