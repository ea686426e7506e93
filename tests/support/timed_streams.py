"""Streams of a server, read in a process of its own (on another host, say), with the time of each piece.

`python timed_streams.py URL BODY…` sends all the bodies at once and prints, for each, a line of JSON: the token ids of
each piece with the monotonic time at which it came, or {"error": …}.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from time import monotonic
from typing import Any

TIMEOUT_S = 60.0


def body(max_tokens: int, **fields: Any) -> dict[str, Any]:
    wanted = {"stream": True, "return_token_ids": True, "ignore_eos": True}
    return {"model": "tiny", "prompt": "A host is lost", "max_tokens": max_tokens, **wanted, **fields}


def words(url: str, bodies: list[dict[str, Any]]) -> list[str]:
    """The command that reads these streams."""
    return [sys.executable, __file__, url, *map(json.dumps, bodies)]


def tokens(pieces: list[Any]) -> list[int]:
    return [token for _, ids in pieces for token in ids]


def longest_gap(pieces: list[Any], since: float) -> float:
    """Seconds between two pieces, the second of which came after a time."""
    return max((later - sooner for (sooner, _), (later, _) in pairwise(pieces) if later > since), default=0.0)


def _read(url: str, text: str) -> Any:
    request = urllib.request.Request(url, text.encode(), {"Content-Type": "application/json"})
    pieces = []
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            for line in answer:
                data = line.removeprefix(b"data: ").strip()
                if not data.startswith(b"{"):
                    continue
                event = json.loads(data)
                if "error" in event:
                    return event
                for choice in event["choices"]:
                    if ids := choice.get("token_ids"):
                        pieces.append((monotonic(), ids))
    except OSError as error:
        return {"error": str(error)}
    return pieces


if __name__ == "__main__":
    with ThreadPoolExecutor(16) as pool:
        for found in pool.map(lambda text: _read(sys.argv[1], text), sys.argv[2:]):
            print(json.dumps(found), flush=True)
