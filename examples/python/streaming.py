"""Streaming: prints text as it is generated, from two requests at the same time, and stops one of them early.

python examples/python/streaming.py [MODEL]
"""

from __future__ import annotations

import asyncio
import sys

from allspan import Engine, SamplingParams


async def stream(engine: Engine, prompt: str, max_tokens: int) -> str:
    """The text of one request, printed piece by piece."""
    handle, queue = engine.start_request(prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0))
    ids: list[int] = []
    try:
        async for output in queue:  # the new tokens since the last read
            ids += output.token_ids
            print(f"[{prompt[:12]}…] {engine.tokenizer.decode(ids)!r}")
    finally:
        engine.release_request(handle)  # stops the request if it still runs
    return engine.tokenizer.decode(ids)


async def main(model: str) -> None:
    with Engine(model) as engine:
        texts = await asyncio.gather(stream(engine, "Once upon a time", 16), stream(engine, "The weather today", 16))
        print(texts)

        handle, queue = engine.start_request("Count: 1, 2, 3,", SamplingParams(max_tokens=200, temperature=0.0))
        print("first tokens:", queue.get().token_ids)
        engine.stop_request(handle)
        engine.sync_request(handle, timeout=10)
        print("state after stop_request:", queue.state.value)
        engine.release_request(handle)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "SmolLM2-135M-Instruct"))
