"""A cluster of two ranks: `ClientEngine` starts it with mpirun, each rank holds half of the weights.

    python examples/python/two_ranks.py [MODEL]

With `allspan serve MODEL --ranks 2` running already, `ClientEngine(attach="RUN_DIR")` joins that cluster instead.
"""

from __future__ import annotations

import sys

from allspan import ClientEngine, SamplingParams


def main(model: str) -> None:
    with ClientEngine(model, ranks=2, threads=1, quiet=True) as engine:
        for rank in engine.statistics().ranks:
            print(f"rank {rank.rank}: {rank.weight_bytes / 2**20:.1f} MiB of weights")
        print(engine.generate("The sky is", SamplingParams(max_tokens=16, temperature=0.0))[0].text)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "SmolLM2-135M-Instruct")
