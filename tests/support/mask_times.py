"""How long masks and compiling take over the corpus of schemas:

    PYTHONPATH=tests python -m support.mask_times MODEL
    PYTHONPATH=tests python -m support.mask_times --train FOLDER_OF_TEXTS --vocab-size 151936

MODEL is a folder or GGUF file whose tokenizer is taken; `--train` makes one of so many tokens from texts (a minute).
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from allspan.protos.text import load_tokenizer
from allspan.protos.text.tokenizers.tokenizer import Tokenizer
from allspan.worker.sampling.guidance import GuidanceCompiler
from support.json_schemas import Case, cases
from support.matching import refused_names, schema

MOST_BYTES = 110_000_000
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SUFFIXES = {".c", ".h", ".html", ".json", ".md", ".po", ".py", ".rst", ".txt", ".js", ".yml"}
WALKS, STEPS = 6, 150


def trained(texts: Path, vocab_size: int, folder: Path) -> None:
    """Writes a byte-level BPE tokenizer of texts as a model folder."""
    backend = Backend(models.BPE())
    words = pre_tokenizers.Split(Regex(WORDS), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=["<end>"], initial_alphabet=alphabet)
    backend.train_from_iterator(some_of(texts), trainer)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": backend.get_vocab_size(), "eos_token_id": 0}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))


def some_of(texts: Path) -> Iterator[str]:
    paths = [path for path in texts.rglob("*") if path.suffix in SUFFIXES and path.is_file()]
    random.Random(0).shuffle(paths)
    total = 0
    for path in paths:
        text = path.read_text(errors="ignore")
        total += len(text)
        if total > MOST_BYTES:
            return
        yield text


def walk(compiler: GuidanceCompiler, tokenizer: Tokenizer, case: Case, seconds: list[float]) -> float:
    """Adds the times of masks, along values that are valid and along random choices; returns that of compiling."""
    started = time.perf_counter()
    compiled = compiler.compile(schema(case.schema))
    took = time.perf_counter() - started
    mask = np.zeros(-(-tokenizer.vocab_size // 32), dtype=np.int32)
    rng = random.Random(case.name)

    def fill() -> bool:
        begun = time.perf_counter()
        is_whole = matcher.fill(mask)
        seconds.append(time.perf_counter() - begun)
        return is_whole

    for value in case.valid:
        matcher = compiled.matcher()
        for token in tokenizer.encode(json.dumps(value, ensure_ascii=False), add_special_tokens=False):
            fill()
            matcher.consume([token])
        fill()
    for _ in range(WALKS):
        matcher = compiled.matcher()
        for _ in range(STEPS):
            is_whole = fill()
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if not len(allowed) or (is_whole and rng.random() < 0.5):
                break
            matcher.consume([int(rng.choice(allowed))])
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--train", type=Path)
    parser.add_argument("--vocab-size", type=int, default=151_936)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.train is not None:
            trained(options.train, options.vocab_size, Path(folder))
        tokenizer = load_tokenizer(options.model or Path(folder))
    started = time.perf_counter()
    compiler = GuidanceCompiler(tokenizer, tokenizer.vocab_size)
    print(f"{tokenizer.vocab_size} tokens, table in {time.perf_counter() - started:.2f} s")
    seconds: list[float] = []
    compiles = [walk(compiler, tokenizer, case, seconds) for case in cases() if case.name not in refused_names()]
    for name, times, unit in (("mask", seconds, 1e6), ("compile", compiles, 1e3)):
        median, late, last = np.percentile(np.array(times) * unit, (50, 99, 100))
        signs = "µs" if unit == 1e6 else "ms"
        print(
            f"{name}: {len(times)} times, median {median:.1f} {signs}, 99 % {late:.1f} {signs}, most {last:.1f} {signs}"
        )


if __name__ == "__main__":
    main()
