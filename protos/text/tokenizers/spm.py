"""SentencePiece's BPE: merges the adjacent pair whose union has the best score, until no union is a token.

Kudo & Richardson 2018; the order of merges (best score, then leftmost) is that of sentencepiece and llama.cpp.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

SPACE = "▁"


class SpmModel:
    """Vocabulary with scores; characters without a token fall back to their UTF-8 bytes ("<0x0A>").

    `byte_ids`: the tokens of those bytes, where their texts are no tokens. `unknown`: the token of a character whose
    bytes have none; nothing stands for it by default.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        scores: Sequence[float],
        byte_ids: Mapping[int, int] | None = None,
        unknown: int | None = None,
    ) -> None:
        self._ids = {text: token_id for token_id, text in enumerate(tokens)}
        self._scores = list(scores)
        found = [self._ids.get(f"<0x{byte:02X}>") if byte_ids is None else byte_ids.get(byte) for byte in range(256)]
        self._bytes = [unknown if token_id is None else token_id for token_id in found]
        # Where no token has a space inside, merges never cross from a word to the next: words can be done one by one.
        inner = re.compile(f"[^{SPACE}]{SPACE}")
        self._by_words = not any(inner.search(text) for text in tokens)
        self._word = lru_cache(maxsize=16384)(self._merge)

    def encode(self, text: str) -> list[int]:
        text = text.replace(" ", SPACE)
        if not self._by_words:
            return list(self._merge(text))
        return [token_id for word in re.findall(f"{SPACE}*[^{SPACE}]+|{SPACE}+", text) for token_id in self._word(word)]

    def _merge(self, word: str) -> tuple[int, ...]:
        parts = list(word)
        following = [*range(1, len(parts)), -1]
        preceding = list(range(-1, len(parts) - 1))
        queue: list[tuple[float, int, int, str]] = []

        def offer(left: int, right: int) -> None:
            if left >= 0 and right >= 0:
                union = parts[left] + parts[right]
                token_id = self._ids.get(union)
                if token_id is not None:
                    heapq.heappush(queue, (-self._scores[token_id], left, right, union))

        for left in range(len(parts) - 1):
            offer(left, left + 1)
        while queue:
            _, left, right, union = heapq.heappop(queue)
            if not parts[left] or not parts[right] or parts[left] + parts[right] != union:
                continue  # one of the two was merged meanwhile
            parts[left], parts[right] = union, ""
            following[left] = following[right]
            if following[right] >= 0:
                preceding[following[right]] = left
            offer(preceding[left], left)
            offer(left, following[left])
        return tuple(token_id for part in parts if part for token_id in self._token_or_bytes(part))

    def _token_or_bytes(self, part: str) -> list[int]:
        token_id = self._ids.get(part)
        if token_id is not None:
            return [token_id]
        return [token_id for byte in part.encode() if (token_id := self._bytes[byte]) is not None]
