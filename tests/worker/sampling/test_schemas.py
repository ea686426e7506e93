"""Every schema of the corpus against a real tokenizer: random choices within the masks end in values that are valid."""

from __future__ import annotations

import json
import random
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from allspan.protos.text import load_tokenizer
from allspan.protos.text.tokenizers.tokenizer import Tokenizer
from allspan.worker.sampling.guidance import GuidanceCompiler
from support.default_model import default_model
from support.json_schemas import Case, cases, is_valid
from support.matching import refused_names, schema

TOKENS = 100
WALKS = 2

Ids = NDArray[np.int64]


@cache
def tools() -> tuple[Tokenizer, GuidanceCompiler]:
    tokenizer = load_tokenizer(default_model())
    return tokenizer, GuidanceCompiler(tokenizer, tokenizer.vocab_size)


@pytest.mark.parametrize("case", [case for case in cases() if case.name not in refused_names()], ids=lambda c: c.name)
def test_whatever_ends_by_itself_is_valid(case: Case) -> None:
    tokenizer, compiler = tools()
    compiled = compiler.compile(schema(case.schema))
    rng = random.Random(case.name)
    mask = np.zeros(-(-tokenizer.vocab_size // 32), dtype=np.int32)
    texts = []
    for _ in range(WALKS):
        matcher, output = compiled.matcher(), list[int]()
        while len(output) < TOKENS:
            is_whole = matcher.fill(mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if is_whole and (rng.random() < 0.5 or not len(allowed)):
                texts.append(tokenizer.decode(output, skip_special_tokens=False))
                break
            token = chosen(tokenizer, allowed, rng, len(output) > 8)
            output.append(token)
            matcher.consume([token])
    for text in texts:
        assert is_valid(case.schema, json.loads(text)), text
    assert texts, "no walk came to an end"


def chosen(tokenizer: Tokenizer, allowed: Ids, rng: random.Random, wants_end: bool) -> int:
    """Any; after a while one that closes something, or else a single sign."""
    if wants_end:
        for among in (closing(tokenizer), single(tokenizer))[rng.random() < 0.2 :]:
            some = np.intersect1d(allowed, among)
            if len(some):
                return int(rng.choice(some))
    return int(rng.choice(allowed))


@cache
def closing(tokenizer: Tokenizer) -> Ids:
    return ids_of(tokenizer, '"}]')


@cache
def single(tokenizer: Tokenizer) -> Ids:
    return ids_of(tokenizer, "ab1@.:-,T")


def ids_of(tokenizer: Tokenizer, signs: str) -> Ids:
    return np.array([tokenizer.encode(sign, add_special_tokens=False)[0] for sign in signs])
