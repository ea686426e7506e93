"""Prefix cache: the second question about the same text skips the text, and the timings show it.

python examples/python/prefix_cache.py [MODEL]
"""

from __future__ import annotations

import sys

from allspan import Engine, RequestOptions, SamplingParams

TEXT = "allspan keeps the keys and values of full pages for later requests that begin with the same tokens. " * 20
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


def ask(engine: Engine, question: str, options: RequestOptions | None = None) -> int:
    """Asks about TEXT and returns how many prompt tokens the cache had."""
    handle, queue = engine.start_request(TEXT + question, GREEDY, options=options)
    for _ in queue:
        pass
    timings = queue.timings
    engine.release_request(handle)
    assert timings is not None  # it came with the end
    known = f"{timings.cached_tokens} of {timings.prompt_tokens} prompt tokens cached"
    print(f"{known}, {timings.ttft_s * 1e3:.0f} ms to the first token")
    return timings.cached_tokens


def main(model: str) -> None:
    with Engine(model) as engine:
        ask(engine, "Question: what is kept?")
        ask(engine, "Question: for whom?")
        ask(engine, "Question: for whom?", RequestOptions(prefix_cache=False))  # neither reads nor fills the cache
        ask(engine, "Question: for whom?", RequestOptions(cache_salt="another tenant"))  # shares with its own salt only
        print(f"hit rate {engine.statistics().prefix_hit_rate:.2f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "SmolLM2-135M-Instruct")
