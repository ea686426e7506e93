"""SentencePiece merging against its definition."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from allspan.protos.text.tokenizers.spm import SpmModel

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def by_definition(tokens: dict[str, int], scores: list[float], text: str) -> list[int]:
    """Merges the best-scored neighbours, the leftmost of equals, until none is a token."""
    parts = list(text.replace(" ", "▁"))
    while True:
        unions = [(scores[tokens[a + b]], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in tokens]
        if not unions:
            break
        at = -max(unions)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    ids = []
    for part in parts:
        ids += [tokens[part]] if part in tokens else [tokens[BYTES[byte]] for byte in part.encode()]
    return ids


words = st.text("ab▁é", min_size=1, max_size=4)
texts = st.text("ab é界", max_size=24)


@settings(max_examples=300)
@given(st.dictionaries(words, st.integers(-6, 0), max_size=24), texts)
def test_merges_are_those_of_the_definition(pieces: dict[str, int], text: str) -> None:
    tokens = [*BYTES, *pieces]
    scores = [0.0] * 256 + [float(score) for score in pieces.values()]
    ids = {token: i for i, token in enumerate(tokens)}
    assert SpmModel(tokens, scores).encode(text) == by_definition(ids, scores, text)
