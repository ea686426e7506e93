"""The keys of cached pages, as the ranks make them and as a client looks them up."""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from allspan.protos.api.adapters import NO_ADAPTER

KEY_BYTES = 16
SHORT_BYTES = 8


def root_key(*parts: str | int) -> bytes:
    """What stands before a first page: the model's name, the version of its weights, the adapter's digest, the digests
    of embedding rows and positions, the rotary table, the cache salt."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=KEY_BYTES).digest()


def page_keys(before: bytes, tokens: Sequence[int], page_size: int) -> list[bytes]:
    """The keys of the full pages that these token ids (int32) make, after the page of key `before`."""
    return list(iter_page_keys(before, tokens, page_size))


def iter_page_keys(before: bytes, tokens: Sequence[int], page_size: int) -> Iterator[bytes]:
    """Yields the keys that `page_keys` returns, each made when it is read."""
    data, width = array("i", tokens).tobytes(), 4 * page_size
    for at in range(0, len(data) - width + 1, width):
        before = hashlib.blake2b(before + data[at : at + width], digest_size=KEY_BYTES).digest()
        yield before


def short_key(key: bytes) -> int:
    """A page's key as page events carry it: its first 8 bytes, little-endian; 0 for an empty one, which no page has."""
    return int.from_bytes(key[:SHORT_BYTES], "little")


def rotary_table(prompt_lengths: Sequence[int], prompt_len: int) -> int:
    """The number of the rotary table of a request with such a prompt; `prompt_lengths`: the longest prompt of each
    table but the last, ascending."""
    return bisect_left(prompt_lengths, prompt_len)


@dataclass(frozen=True, slots=True)
class PageShape:
    """What the keys of a world's pages depend on beside the token ids and the salt."""

    page_tokens: int
    model: str
    weights_version: int = 1
    prompt_lengths: tuple[int, ...] = ()

    def keys(
        self, tokens: Sequence[int], prompt_len: int, salt: str, most: int, adapter: int = NO_ADAPTER
    ) -> Iterator[int]:
        """The short keys of the first full pages, at most `most`, each made when it is read, of a request that came
        over the wire: one without embedding rows and positions of its own. `adapter`: the digest of its adapter."""
        table = rotary_table(self.prompt_lengths, prompt_len)
        root = root_key(self.model, self.weights_version, adapter, "", table, salt)
        pages = iter_page_keys(root, tokens[: most * self.page_tokens], self.page_tokens)
        return map(short_key, pages)
